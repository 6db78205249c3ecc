"""Which backward passes are averaged: those that follow a forward through the wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline import replicate
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import Grads, assert_same, count_calls, data, fill, grads


class Halves(nn.Module):
    """Two layers, and a loss of each; ``hidden``: the output is one that nobody can look into."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(3, 2, dtype=torch.float64) for _ in range(2))
        self.hidden = hidden
        fill(self)

    def forward(self, x: Tensor) -> Any:
        self.losses = [layer(x).square().sum() for layer in (self.left, self.right)]
        return object() if self.hidden else self.losses[0] + self.losses[1]


def batch(rank: int, step: int = 0) -> Tensor:
    return data(4, 3, seed=10 * step + rank)


Script = Callable[[Any, int], None]  # a wrapper, a rank


def the_module_alone(ddp: Any, rank: int) -> None:
    ddp.module(batch(rank)).backward()


def the_module_alone_after_a_pass(ddp: Any, rank: int) -> None:
    ddp(batch(rank)).backward()
    ddp.module(batch(rank, 1)).backward()


def one_rank_warms_up(ddp: Any, rank: int) -> None:
    for step in range(3 if rank == 1 else 0):
        ddp.module(batch(rank, step)).backward()
        ddp.module.zero_grad()
    ddp(batch(rank, 3)).backward()


def what_the_module_left_is_averaged_by_the_next_pass(ddp: Any, rank: int) -> None:
    ddp.module(batch(rank)).backward()
    ddp(batch(rank, 1)).backward()


def a_penalty_alone(ddp: Any, rank: int) -> None:
    ddp(batch(rank)).backward()
    sum(p.square().sum() * (rank + 1) for p in ddp.parameters()).backward()


def the_first_backward_after_a_forward(ddp: Any, rank: int) -> None:
    ddp(batch(rank))
    ddp.module(batch(rank, 1)).backward()


def a_forward_without_grad(ddp: Any, rank: int) -> None:
    with torch.no_grad():
        ddp(batch(rank))
    ddp.module(batch(rank, 1)).backward()


def a_forward_in_no_sync(ddp: Any, rank: int) -> None:
    with ddp.no_sync():
        ddp(batch(rank)).backward()
    ddp.module(batch(rank, 1)).backward()


def a_penalty_on_gradients(ddp: Any, rank: int) -> None:
    output = ddp(batch(rank))
    first = torch.autograd.grad(output, list(ddp.parameters()), create_graph=True)
    sum(grad.square().sum() for grad in first).backward()
    ddp.module(batch(rank, 1)).backward()


def autograd_grad_does_not_answer_a_forward(ddp: Any, rank: int) -> None:
    torch.autograd.grad(ddp(batch(rank)), list(ddp.parameters()))
    ddp.module(batch(rank, 1)).backward()


def several_forwards_and_one_backward(ddp: Any, rank: int) -> None:
    (ddp(batch(rank)) + ddp(batch(rank, 1))).backward()
    ddp.module(batch(rank, 2)).backward()


def halves_of_one_forward(ddp: Any, rank: int) -> None:
    for step in range(3):
        ddp(batch(rank, step))
        for loss in ddp.module.losses:
            loss.backward()
        ddp.module(batch(rank, step + 4))
        ddp.module.losses[0].backward()


SCRIPTS = {
    script.__name__: script
    for script in (
        the_module_alone,
        the_module_alone_after_a_pass,
        one_rank_warms_up,
        what_the_module_left_is_averaged_by_the_next_pass,
        a_penalty_alone,
        the_first_backward_after_a_forward,
        a_forward_without_grad,
        a_forward_in_no_sync,
        a_penalty_on_gradients,
        autograd_grad_does_not_answer_a_forward,
        several_forwards_and_one_backward,
        halves_of_one_forward,
    )
}


def _run_under_both(meeting: Meeting) -> dict[str, tuple[Grads, Grads]]:
    dist.init_process_group("gloo")
    found = {}
    for name, script in SCRIPTS.items():
        hidden = script is halves_of_one_forward
        pair = []
        for wrapper in (DDP, nn.parallel.DistributedDataParallel):
            ddp = wrapper(Halves(hidden))
            for _ in range(2):
                script(ddp, meeting.rank)
            pair.append(grads(ddp))
        found[name] = pair[0], pair[1]
    dist.destroy_process_group()
    return found


def test_the_passes_that_torch_averages_are_averaged_and_the_others_are_not() -> None:
    results = spawn_ranks(2, _run_under_both)
    for name in SCRIPTS:
        for rank in range(2):
            ours, theirs = results[rank][name]
            try:
                assert_same(ours, theirs)
            except AssertionError as error:
                raise AssertionError(f"{name}, rank {rank}: {error}") from error


def wrapped(model: nn.Module, group: Group) -> Any:
    return DDP(model, process_group=group)


def replicated(model: nn.Module, group: Group) -> Any:
    return replicate(model, process_group=group)


@pytest.mark.parametrize("form", [wrapped, replicated])
def test_a_backward_that_no_forward_came_before_calls_no_collective(form: Any) -> None:
    def one_rank(group: Group) -> Grads:
        model = Halves()
        kept = form(model, group)
        kept(batch(group.rank())).backward()
        calls = count_calls(group)
        if group.rank() == 0:
            for step in range(3):
                (model.left(batch(0, step)).sum() + model.right(batch(0, step)).sum()).backward()
        assert not calls
        model.zero_grad()
        kept(batch(group.rank())).backward()
        return grads(model)

    found = run_ranks(2, one_rank)
    assert_same(found[0], found[1])


def test_unused_parameters_do_not_make_a_later_backward_a_pass() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Halves(), process_group=group)
        for step in range(3):
            ddp(batch(group.rank(), step))
            ddp.module.losses[group.rank() if step == 2 else 0].backward()
        calls = count_calls(group)
        if group.rank() == 1:
            ddp.module(batch(1)).backward()
        assert not calls

    run_ranks(2, one_rank)


class Manual(nn.Module):
    """Calls backward twice inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Halves()

    def forward(self, x: Tensor) -> None:
        for _ in range(2):
            self.inner(x).backward()


def test_every_backward_inside_a_forward_is_averaged() -> None:
    def one_rank(group: Group) -> Grads:
        ddp = DDP(Manual(), process_group=group)
        for step in range(2):
            ddp.zero_grad()
            ddp(batch(group.rank(), step))
        return grads(ddp)

    expected = Manual()
    for rank in range(2):
        expected(batch(rank, 1))
    for found in run_ranks(2, one_rank):
        half = {n: None if g is None else g / 2 for n, g in grads(expected).items()}
        assert_same(found, half)


def test_a_forward_that_fails_arms_nothing() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Halves(), process_group=group)
        ddp(batch(group.rank())).backward()
        with contextlib.suppress(Exception):  # both ranks, so that none waits
            ddp(torch.zeros(1, dtype=torch.float64))
        calls = count_calls(group)
        if group.rank() == 0:
            ddp.module(batch(0)).backward()
        assert not calls

    run_ranks(2, one_rank)
