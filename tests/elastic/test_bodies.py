"""What goes wrong in the body of one rank's loop: its message reaches all, and the others go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import elastic
from paceline.errors import MembershipError, MismatchError
from paceline.groups import Group

from .runs import Moment, Ranks, require_equal
from .test_faults import Grip, at, errors_of
from .test_job import survivors, undisturbed


def run_out_in_backward(error: Exception) -> Callable[[nn.Module], None]:
    def arrange(module: nn.Module) -> None:
        def raises(_grad: Tensor) -> None:
            raise error

        next(module.parameters()).register_hook(raises)

    return arrange


def raise_in_forward(error: Exception) -> Callable[[nn.Module], None]:
    def arrange(module: nn.Module) -> None:
        def raises(*_: object) -> None:
            raise error

        module.register_forward_pre_hook(raises)

    return arrange


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
NO_ROOM = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
FAILURES = {
    "out of memory in backward": (run_out_in_backward(NO_MEMORY), NO_MEMORY),
    "no room in backward": (run_out_in_backward(NO_ROOM), NO_ROOM),
    "raise in forward": (raise_in_forward(ValueError("this sample")), ValueError("this sample")),
}


@pytest.mark.parametrize("what", list(FAILURES))
def test_what_a_body_raises_is_told_to_all_and_the_others_go_on_while_it_lingers(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process need not end: it has left the job when its `with` is left."""
    arrange, error = FAILURES[what]
    ranks, grip, over = Ranks(3), Grip(), threading.Event()

    def linger() -> None:
        assert over.wait(60)

    def act() -> None:
        arrange(grip.things[2]["ddp"].module)

    for number in range(3):
        after = linger if number == 2 else lambda: None
        ranks.start(at(4, "begin", act, 2), prepare=grip.of(number), after=after)
    with caplog.at_level(logging.WARNING):
        ranks.wait_for(0, 1)
        over.set()
        outcomes = ranks.wait()
    assert type(outcomes[2].error) is type(error)
    assert outcomes[2].committed == [0, 1, 2, 3]
    told = [r.getMessage() for r in caplog.records if r.name == "paceline.elastic.loop"]
    for rank in (0, 1):
        assert any(f"rank {rank}" in text and str(error) in text for text in told)
        require_equal(outcomes[rank], undisturbed())


@pytest.mark.parametrize("error", [NO_MEMORY, NO_ROOM], ids=["device", "host"])
def test_out_of_memory_in_a_step_function_is_not_taken_for_a_lost_rank(error: Exception) -> None:
    ranks, calls = Ranks(2), []

    def prepare_of(number: int) -> Callable[..., None]:
        def prepare(job: elastic.Job, ddp: Any, optimizer: Any, group: Group) -> None:
            def step_fn(step: elastic.JobStep) -> None:
                for shard, (x, _) in step:
                    with ddp.shard(shard):
                        ddp(x).square().mean().backward()
                    if (number, step.number) == (1, 2):
                        calls.append(step.number)
                        raise error
                optimizer.step()
                optimizer.zero_grad()

            job.run(step_fn)

        return prepare

    for number in range(2):
        ranks.start(prepare=prepare_of(number), epochs=1)
    outcomes = ranks.wait()
    assert outcomes[1].error is error
    assert calls == [2]
    assert outcomes[0].error is None
    assert outcomes[0].steps == 5


def test_a_rank_that_lingers_inside_the_job_is_left_out_by_the_others_at_their_deadline() -> None:
    ranks, over = Ranks(3), threading.Event()

    def linger() -> None:
        assert over.wait(60)

    limits = {"seconds": 8.0, "timeout": timedelta(seconds=8)}
    for _ in range(3):
        ranks.start(at(4, "shard", linger, 2), **limits)
    ranks.wait_for(0, 1)
    over.set()
    outcomes = ranks.wait()
    for rank in (0, 1):
        require_equal(outcomes[rank], undisturbed())
    assert isinstance(outcomes[2].error, MembershipError)
    assert "others waited" in str(outcomes[2].error)
    assert outcomes[2].committed == [0, 1, 2, 3]


class Skipping(nn.Module):
    """Has a layer that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.skips = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (x if self.skips else x + self.second(x).relu()).sum(1)


def made(_seed: int) -> nn.Module:
    torch.manual_seed(3)
    return Skipping()


def test_a_layer_that_one_rank_skips_has_a_gradient_of_zero_there_and_all_stay_equal() -> None:
    ranks, grip = Ranks(2), Grip()

    def act() -> None:
        grip.things[1]["ddp"].module.skips = True

    for number in range(2):
        ranks.start(at(2, "begin", act, 1), prepare=grip.of(number), model=made, check_every=1)
    one, other = survivors(ranks.wait())
    require_equal(one, other)
    assert one.committed == list(range(10))


def swap(group: Group, number: int, sizes: tuple[int, int]) -> None:
    """Call two collectives, in another order on one rank."""
    for which in (0, 1) if number == 0 else (1, 0):
        if which:
            group.all_reduce(torch.ones(sizes[1]))
        else:
            group.all_reduce(torch.ones(sizes[0]))


@pytest.mark.parametrize("after_a_loss", [False, True])
@pytest.mark.parametrize("sizes", [(3, 4), (3, 3)], ids=["other size", "same size"])
def test_collectives_that_one_rank_swaps_are_an_error_on_all(
    sizes: tuple[int, int], after_a_loss: bool
) -> None:
    """Those of one size are found by ``checks="strict"``."""
    ranks, grip = Ranks(3), Grip()

    def of(member: int) -> Moment:
        def moment(now: elastic.JobStep, shards: int, place: str) -> None:
            if (member, now.number, place, after_a_loss) == (2, 1, "shard", True):
                ranks.kill(2)
            if (now.number, place) == (2, "averages"):
                swap(grip.things[member]["group"], member, sizes)

        return moment

    checks = "strict" if sizes[0] == sizes[1] else "warn"
    for number in range(3):
        ranks.start(of, prepare=grip.of(number), checks=checks, epochs=1)
    outcomes = ranks.wait()
    assert len(errors_of(outcomes)) == (2 if after_a_loss else 3)
    for member in (0, 1):
        assert isinstance(outcomes[member].error, MismatchError)
        assert outcomes[member].committed == [0, 1]
