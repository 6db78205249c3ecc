"""What is wrong on one rank is named on all, before a step is committed, or put right."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import paceline
from paceline import elastic
from paceline.data import ShardedLoader
from paceline.errors import (
    JobEndedError,
    JobStateError,
    MembershipError,
    NonFiniteGradientError,
    PeerDiedError,
    ReplicasDifferError,
    StepMismatchError,
)
from tests.waiting import until

from .runs import (
    BATCH,
    SAMPLES,
    SHARDS,
    Moment,
    Outcome,
    Ranks,
    dataset,
    model_of,
    require_equal,
    train,
)
from .test_job import kill_at, survivors, undisturbed


def at(step: int, where: str, act: Callable[[], None], who: int) -> Callable[[int], Moment]:
    """Moments of which one, of member ``who``, does something."""

    def of(member: int) -> Moment:
        def moment(now: elastic.JobStep, shards: int, place: str) -> None:
            if (member, now.number, place) == (who, step, where):
                act()

        return moment

    return of


class Grip:
    """Gets hold of what a rank has made."""

    def __init__(self) -> None:
        self.things: dict[int, dict[str, Any]] = {}

    def of(self, number: int) -> Callable[..., None]:
        return lambda **things: self.things.__setitem__(number, things)


def errors_of(outcomes: dict[int, Outcome]) -> dict[int, str]:
    return {member: type(one.error).__name__ for member, one in outcomes.items() if one.error}


def test_a_rank_that_missed_a_commit_gets_the_state_of_one_that_did_not() -> None:
    """Its last collective fails after the others' has succeeded."""
    ranks, grip = Ranks(3), Grip()
    calls: Counter[int] = Counter()
    step = [0]

    def after(_call: object) -> None:
        calls[step[0]] += 1
        if step[0] == 3 and calls[3] == calls[2]:
            raise PeerDiedError(1, "all_reduce", 0, (0,))

    def of(member: int) -> Moment:
        def moment(now: elastic.JobStep, shards: int, place: str) -> None:
            if member == 1 and place == "begin":
                step[0] = now.number
                if now.number == 2:
                    grip.things[1]["group"].register_hooks(after=after)

        return moment

    for number in range(3):
        ranks.start(of, prepare=grip.of(number))
    outcomes = ranks.wait()
    ends = survivors(outcomes)
    assert outcomes[1].committed == [0, 1, 2, *range(4, 10)]
    assert outcomes[0].committed == list(range(10))
    for end in ends:
        require_equal(end, undisturbed())


def test_every_sample_counts_once_in_committed_steps_whoever_is_lost() -> None:
    ranks = Ranks(3)
    for _ in range(3):
        ranks.start(kill_at(ranks, {2: (3, "shard"), 1: (7, "begin")}))
    outcomes = ranks.wait()
    survivors(outcomes)
    counted = Counter(n for one in outcomes.values() for n in one.counted)
    assert counted == Counter(dict.fromkeys(range(SAMPLES), 2))  # in two epochs


def test_another_learning_rate_at_the_start_is_named_on_all_ranks() -> None:
    ranks = Ranks(2)
    for lr in (0.05, 0.5):
        ranks.start(lr=lr)
    outcomes = ranks.wait()
    for one in outcomes.values():
        assert isinstance(one.error, StepMismatchError)
        assert "optimizer settings" in str(one.error)
        assert "lr=0.5" in str(one.error)


def test_a_learning_rate_that_changes_on_one_rank_is_named_before_the_next_commit() -> None:
    ranks, grip = Ranks(2), Grip()

    def act() -> None:
        grip.things[1]["optimizer"].param_groups[0]["lr"] = 3.0

    for number in range(2):
        ranks.start(at(2, "begin", act, 1), prepare=grip.of(number))
    for one in ranks.wait().values():
        assert isinstance(one.error, StepMismatchError)
        assert "lr=3.0" in str(one.error)
        assert one.committed == [0, 1]


def test_a_nan_is_named_with_its_rank_and_nothing_is_committed() -> None:
    ranks, grip = Ranks(2), Grip()

    def act() -> None:
        def spoil(grad: torch.Tensor) -> torch.Tensor:
            return grad.clone().fill_(float("nan"))

        next(grip.things[1]["ddp"].module.parameters()).register_hook(spoil)

    for number in range(2):
        ranks.start(at(2, "begin", act, 1), prepare=grip.of(number))
    for one in ranks.wait().values():
        assert isinstance(one.error, NonFiniteGradientError)
        assert list(one.error.found) == [1]
        assert "0.weight" in str(one.error)
        assert one.committed == [0, 1]


def test_another_number_of_backward_passes_is_named() -> None:
    ranks, grip = Ranks(2), Grip()

    def act() -> None:
        def again(_module: object, _inputs: object, output: torch.Tensor) -> None:
            output.sum().backward(retain_graph=True)

        grip.things[1]["ddp"].register_forward_hook(again)

    for number in range(2):
        ranks.start(at(2, "begin", act, 1), prepare=grip.of(number))
    for one in ranks.wait().values():
        assert isinstance(one.error, StepMismatchError)
        assert "number of backward passes" in str(one.error)
        assert one.committed == [0, 1]


def flip(grip: Grip, number: int) -> Callable[[], None]:
    def act() -> None:
        weight = grip.things[number]["ddp"].module[0].weight
        weight.detach().view(torch.int32)[0, 0] ^= 1 << 3

    return act


def test_a_flipped_bit_is_named_and_the_majoritys_state_given_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks, grip = Ranks(3), Grip()
    for number in range(3):
        ranks.start(at(3, "end", flip(grip, 1), 1), prepare=grip.of(number), check_every=2)
    with caplog.at_level(logging.ERROR):
        ends = survivors(ranks.wait())
    assert "after 4 steps the state of rank 1 differs from the others" in caplog.text
    for end in ends:
        require_equal(end, undisturbed())


def test_two_ranks_that_differ_stop_since_nobody_knows_who_is_right() -> None:
    ranks, grip = Ranks(2), Grip()
    for number in range(2):
        ranks.start(at(3, "end", flip(grip, 1), 1), prepare=grip.of(number), check_every=2)
    for one in ranks.wait().values():
        assert isinstance(one.error, ReplicasDifferError)
        assert one.committed == [0, 1, 2, 3]


def test_an_exception_in_a_body_ends_its_rank_and_the_others_go_on() -> None:
    ranks = Ranks(3)

    def act() -> None:
        raise MemoryError("no room for this batch")

    for _ in range(3):
        ranks.start(at(4, "shard", act, 2))
    outcomes = ranks.wait()
    assert errors_of(outcomes) == {2: "MemoryError"}
    for member in (0, 1):
        require_equal(outcomes[member], undisturbed())


def test_a_step_that_fails_on_three_members_ends_the_job_on_all() -> None:
    ranks = Ranks(4)

    def of(member: int) -> Moment:
        def moment(now: elastic.JobStep, shards: int, place: str) -> None:
            if member and (now.number, place) == (4, "shard"):
                raise ArithmeticError("this sample")

        return moment

    for _ in range(4):
        ranks.start(of)
    outcomes = ranks.wait()
    assert isinstance(outcomes[0].error, MembershipError)
    assert "this sample" in str(outcomes[0].error)


def test_a_rank_that_is_asked_to_leave_finishes_its_step_and_the_others_go_on() -> None:
    ranks, grip = Ranks(3), Grip()

    def act() -> None:
        ranks.council.dismiss(1, "the host goes down")
        assert until(lambda: grip.things[1]["job"]._crew.dismissed)  # it has heard of it

    for number in range(3):
        ranks.start(at(4, "shard", act, 1), prepare=grip.of(number))
    outcomes = ranks.wait()
    assert errors_of(outcomes) == {}
    assert outcomes[1].left == "the host goes down"
    assert outcomes[1].committed == [*range(5)]
    for member in (0, 2):
        require_equal(outcomes[member], undisturbed())


def test_sigterm_finishes_the_step_and_saves(tmp_path: Any) -> None:
    def moment(now: elastic.JobStep, shards: int, place: str) -> None:
        if (now.number, place) == (3, "shard") and shards == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = train(None, moment, save=tmp_path)
    assert (outcome.left, outcome.committed) == ("it got SIGTERM", [0, 1, 2, 3])
    again = train(None, save=tmp_path, seed=7)
    assert again.committed == list(range(4, 10))
    require_equal(again, undisturbed())


def test_a_loop_that_leaves_a_step_early_is_told_so() -> None:
    def prepare(job: elastic.Job, **_: object) -> None:
        for step in job:
            next(iter(step))

    with pytest.raises(JobStateError, match="before its last shard"):
        train(None, prepare=prepare)


def test_what_is_registered_and_changes_in_shards_is_put_back_before_they_are_done_again() -> None:
    class Count:
        total = 0

        def state_dict(self) -> dict[str, Any]:
            return {"total": self.total}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.total = state["total"]

    ranks = Ranks(2)
    counts = [Count(), Count()]

    def of(member: int) -> Moment:
        def moment(now: elastic.JobStep, shards: int, place: str) -> None:
            if place == "shard":
                counts[member].total += 1
            if (member, now.number, place) == (1, 1, "shard"):
                ranks.kill(member)

        return moment

    for number in range(2):
        ranks.start(
            of, prepare=lambda job, n=number, **_: job.register("count", counts[n]), epochs=1
        )
    survivors(ranks.wait())
    assert counts[0].total == 3 + 4 * 6  # half of the first step, then all of four


def test_steps_as_a_function_are_called_again_when_their_own_collectives_lose_a_rank() -> None:
    ranks, begun = Ranks(2), threading.Event()
    runs: list[int] = []

    def prepare_of(number: int) -> Callable[..., None]:
        def prepare(job: elastic.Job, ddp: Any, optimizer: Any, group: Any) -> None:
            def step_fn(step: elastic.JobStep) -> None:
                if number == 0:
                    runs.append(step.number)
                    begun.set() if step.number == 2 else None
                if (number, step.number) == (1, 2):
                    begun.wait()
                    ranks.kill(1)
                group.all_reduce(torch.ones(1))
                for shard, (x, _) in step:
                    with ddp.shard(shard):
                        ddp(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            job.run(step_fn)

        return prepare

    for number in range(2):
        ranks.start(prepare=prepare_of(number), epochs=1)
    survivors(ranks.wait())
    assert runs == [0, 1, 2, 2, 3, 4]


class Deadly(Dataset[Any]):
    """Ends the worker process that reads sample 60, the first time."""

    def __init__(self, folder: Path) -> None:
        self.samples, self.flag, self.parent = dataset(), folder / "read", os.getpid()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        if number == 60 and os.getpid() != self.parent and not self.flag.exists():
            self.flag.touch()
            os._exit(3)
        return self.samples[number]


def test_a_data_worker_that_dies_costs_no_sample(tmp_path: Path) -> None:
    outcome = train(None, samples=Deadly(tmp_path), workers=1)
    assert (tmp_path / "read").exists()
    require_equal(outcome, undisturbed())


class Elsewhere:
    """Members of a job that ends before this one is let in."""

    me = 3

    def listen(self, heard: Any) -> None:
        """There is nothing to hear."""

    def meet(self, how_far: Any, timeout: float) -> Any:
        raise JobEndedError(self.me, "it is finished", well=True)

    def leave(self, why: str = "", failed: bool = False, finished: bool = False) -> None:
        """It is gone anyway."""

    def close(self) -> None:
        """Nothing was opened."""


def test_a_spare_that_was_never_needed_ends_its_process_behind_the_job() -> None:
    with elastic.group("gloo") as group:
        ddp = paceline.DistributedDataParallel(model_of(1), process_group=group, shards=SHARDS)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        loader = ShardedLoader(dataset(), shards=SHARDS, batch=BATCH, group=group)
        beyond = []
        with pytest.raises(SystemExit) as ended:
            with elastic.job(ddp, optimizer, loader, members=Elsewhere()) as job:
                beyond += list(job)
            beyond.append("saved the weights of the beginning")
        assert ended.value.code == 0
        assert beyond == []
