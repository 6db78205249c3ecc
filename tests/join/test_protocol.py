"""Join without DDP: a counter that joins, and everything that can go wrong around it."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import join as torch_join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as StockDDP

from paceline.errors import (
    InputsExhaustedError,
    JoinArgumentError,
    MismatchError,
    NestedJoinError,
    NotJoinableError,
    PeerDiedError,
    PeerDiedUnjoinedError,
    PeerExhaustedError,
    PeerFailedError,
    PeerLeftUnjoinedError,
)
from paceline.groups import Call, Group
from paceline.join import Join, Joinable, JoinConfig, JoinHook
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.marks import USUAL, needs_shm

CPU = torch.device("cpu")
WIDTH = 3


class Counter(Joinable):
    """Adds up ones over the ranks, ``calls`` times a step; joined ranks add zeros."""

    def __init__(self, group: Any, join: Any = Join) -> None:
        super().__init__()
        self.group, self.join = group, join
        self.shadowed = 0
        self.ended: list[bool] = []
        self.given: dict[str, Any] = {}

    def step(self, calls: int = 1) -> float:
        self.join.notify_join_context(self)
        return sum(self.add(1.0) for _ in range(calls))

    def add(self, own: float) -> float:
        tensor = torch.full((WIDTH,), own)
        (self.group or dist.group.WORLD).allreduce([tensor]).wait()
        return float(tensor[0])

    def join_hook(self, **kwargs: Any) -> CounterHook:
        self.given = kwargs
        return CounterHook(self, kwargs.get("calls", 1))

    @property
    def join_device(self) -> torch.device:
        return CPU

    @property
    def join_process_group(self) -> Any:
        return self.group


class CounterHook(JoinHook):
    def __init__(self, counter: Counter, calls: int) -> None:
        self.counter, self.calls = counter, calls

    def main_hook(self) -> None:
        self.counter.shadowed += 1
        for _ in range(self.calls):
            self.counter.add(0.0)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.ended.append(is_last_joiner)


class Stepper(Counter):
    """A counter whose hook takes a whole step, as ZeRO's does."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        stepper = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                stepper.step()

        return Hook()


def still_works(group: Group) -> bool:
    tensor = torch.ones(1)
    group.all_reduce(tensor)
    return tensor.item() == group.size()


def all_reduces_in(group: Group, fn: Callable[[], object]) -> int:
    calls: list[Call] = []
    handle = group.register_hooks(before=calls.append)
    fn()
    handle.remove()
    return len(calls)


# -- what ranks do for each other ---------------------------------------------------------------


@pytest.mark.parametrize("steps", [[0], [3], [0, 0], [1, 3], [4, 0, 2], [2, 2, 5, 5]])
def test_a_rank_that_has_run_out_stands_in_until_all_have(steps: list[int]) -> None:
    def one_rank(group: Group) -> tuple[list[float], int, list[bool]]:
        counter = Counter(group)
        with Join([counter]):
            sums = [counter.step() for _ in range(steps[group.rank()])]
        assert still_works(group)
        return sums, counter.shadowed, counter.ended

    for own, (sums, shadowed, ended) in zip(steps, run_ranks(len(steps), one_rank), strict=True):
        assert sums == [sum(s > k for s in steps) for k in range(own)]
        assert shadowed == max(steps) - own
        assert ended == [own == max(steps)]


def test_hooks_are_called_in_the_order_of_the_joinables_and_get_the_keywords() -> None:
    def one_rank(group: Group) -> tuple[list[float], list[dict[str, int]], list[int]]:
        counters = [Counter(group), Counter(group)]
        with Join(counters, calls=2):
            sums = [c.step(2) for _ in range(1 + 2 * group.rank()) for c in counters]
        return sums, [c.given for c in counters], [c.shadowed for c in counters]

    zero, one = run_ranks(2, one_rank)
    assert zero == ([4.0, 4.0], [{"calls": 2}] * 2, [2, 2])
    assert one == ([4.0, 4.0, 2.0, 2.0, 2.0, 2.0], [{"calls": 2}] * 2, [0, 0])


def test_only_the_first_joinable_sends_a_notice_and_it_is_one_all_reduce_of_the_count() -> None:
    def one_rank(group: Group) -> tuple[float, object, int]:
        first, second = Counter(group), Counter(group)
        with Join([first, second]):
            work = Join.notify_join_context(first)
            assert work is not None
            work.wait()
            count = work.result()[0].item()
            first.add(1.0)
            silent = Join.notify_join_context(second)
            calls = all_reduces_in(group, first.step)
            second.add(1.0)
        return count, silent, calls

    # Two steps of the first: in the second one, both counters' hooks add once each.
    assert run_ranks(2, one_rank) == [(2.0, None, 2), (2.0, None, 2)]


def test_a_disabled_join_does_nothing_and_sends_nothing() -> None:
    def one_rank(group: Group) -> tuple[int, int, list[bool]]:
        counter = Counter(group)

        def train() -> None:
            with Join([counter], enable=False):
                assert not counter._join_config.enable
                counter.step()
                counter.step()

        return all_reduces_in(group, train), counter.shadowed, counter.ended

    assert run_ranks(2, one_rank) == [(2, 0, []), (2, 0, [])]


def test_outside_of_the_context_nothing_is_sent_also_after_it() -> None:
    def one_rank(group: Group) -> int:
        counter = Counter(group)
        with Join([counter]):
            assert counter._join_config.enable
            counter.step()
        assert counter._join_config == JoinConfig.construct_disabled_join_config()
        return all_reduces_in(group, counter.step)

    assert run_ranks(2, one_rank) == [1, 1]


def test_a_context_can_be_entered_again() -> None:
    def one_rank(group: Group) -> list[bool]:
        counter = Counter(group)
        context = Join([counter])
        for epoch in range(2):
            with context:
                for _ in range(1 + (group.rank() == epoch)):
                    counter.step()
        return counter.ended

    assert run_ranks(2, one_rank) == [[True, False], [False, True]]


def test_a_hook_that_takes_a_whole_step_is_not_taken_for_a_rank_with_work_left() -> None:
    def one_rank(group: Group) -> list[float]:
        stepper = Stepper(group)
        with Join([stepper]):
            return [stepper.step() for _ in range(1 + 2 * group.rank())]

    assert run_ranks(2, one_rank) == [[2.0], [2.0] * 3]


def test_standing_in_for_more_than_a_thousand_steps_is_warned_of_once() -> None:
    def one_rank(group: Group) -> None:
        counter = Counter(group)
        with Join([counter]):
            for _ in range(1003 * group.rank()):
                counter.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, one_rank)
    told = [str(w.message) for w in caught if "skew" in str(w.message)]
    assert len(told) == 1
    assert told[0].startswith(
        "Detected uneven input skew of greater than 1000. This means that rank 0 has at least 1000"
    )


# -- early termination --------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_with_throw_on_early_termination_every_rank_raises_at_the_same_step(several: bool) -> None:
    def one_rank(group: Group) -> tuple[int, str, bool]:
        counters = [Counter(group) for _ in range(1 + several)]
        done = 0
        kind = InputsExhaustedError if group.rank() == 1 else PeerExhaustedError
        with pytest.raises(kind) as caught, Join(counters, throw_on_early_termination=True):
            for _ in range(2 if group.rank() == 1 else 5):
                for counter in counters:
                    counter.step()
                done += 1
        assert isinstance(caught.value, RuntimeError)
        assert all(counter.ended == [] for counter in counters)
        return done, str(caught.value), still_works(group)

    results = run_ranks(3, one_rank)
    assert [done for done, _, _ in results] == [2, 2, 2]
    detected = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    assert results[0][1].startswith(detected)
    assert results[1][1].startswith("Rank 1 exhausted all inputs.")
    assert all(works for _, _, works in results)


def test_with_equal_inputs_nothing_is_thrown() -> None:
    def one_rank(group: Group) -> list[bool]:
        counter = Counter(group)
        with Join([counter], throw_on_early_termination=True):
            counter.step()
        return counter.ended

    assert run_ranks(2, one_rank) == [[True], [True]]


def test_a_rank_that_swallows_the_termination_leaves_at_once() -> None:
    def one_rank(group: Group) -> bool:
        counter = Counter(group)
        with (
            pytest.raises(InputsExhaustedError) if group.rank() == 0 else nullcontext(),
            Join([counter], throw_on_early_termination=True),
        ):
            try:
                for _ in range(group.rank()):
                    counter.step()
            except PeerExhaustedError:
                pass
        return still_works(group)

    assert run_ranks(2, one_rank) == [True, True]


# -- arguments ----------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused_before_anything_is_sent() -> None:
    def one_rank(group: Group) -> None:
        counter = Counter(group)
        with pytest.raises(JoinArgumentError, match="requires at least one joinable"):
            Join([])
        with pytest.raises(ValueError, match="with multiple process groups"):
            Join([counter, Counter(group.split([group.rank()]))])
        with pytest.raises(JoinArgumentError, match="the same joinable twice"):
            Join([counter, counter])
        with pytest.raises(JoinArgumentError, match="no process group on this rank"):
            Join([Counter(None)])

    run_ranks(2, one_rank)


def test_nesting_is_refused_with_a_word_on_what_is_shared() -> None:
    def one_rank(group: Group) -> None:
        counter, other = Counter(group), Counter(group)
        alone = Counter(group.split([group.rank()]))
        with Join([counter]):
            with pytest.raises(NestedJoinError) as same, Join([counter], enable=False):
                pass
            with pytest.raises(NestedJoinError) as group_too, Join([other]):
                pass
            with Join([alone]):  # another group
                alone.step()
            assert counter._join_config.enable, "the outer one goes on"
            counter.step()
        assert same.value.shared == "joinable"
        assert group_too.value.shared == "process group"
        with Join([counter], enable=False), Join([other]):  # a disabled one is not there
            other.step()

    run_ranks(2, one_rank)


def test_a_joinable_that_forgot_the_constructor_is_told() -> None:
    class Forgetful(Counter):
        def __init__(self) -> None:
            pass

    with pytest.raises(NotJoinableError, match=r"Forgetful.* constructor calls the ``Joinable``"):
        Join.notify_join_context(Forgetful())
    with pytest.raises(AssertionError):
        Join.notify_join_context(Forgetful())


def test_a_joinable_must_say_what_it_is() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Joinable()  # type: ignore[abstract]


def test_nothing_of_torchs_classes_is_inherited_by_accident() -> None:
    assert issubclass(Joinable, torch_join.Joinable)
    assert issubclass(JoinHook, torch_join.JoinHook)
    for ours, theirs in ((Joinable, torch_join.Joinable), (JoinHook, torch_join.JoinHook)):
        written = {name for name in vars(theirs) if not name.startswith("__")} | {"__doc__"}
        assert {name for name in written if not name.startswith("_abc")} <= vars(ours).keys()


# -- a rank fails -------------------------------------------------------------------------------


class Boom(Exception):
    pass


def fail_in(where: str, counter: Counter) -> None:
    """Fail in the third step: before its notice, between it and the sum, or after the sum."""
    for k in range(3):
        if k == 2 and where == "before":
            raise Boom("no more disk")
        counter.join.notify_join_context(counter)
        if k == 2 and where == "inside":
            raise Boom("no more disk")
        counter.add(1.0)
    raise Boom("no more disk")


def fail_on_rank_one(group: Group, where: str, steps: int) -> tuple[str, bool]:
    counter = Counter(group)
    if group.rank() == 1:
        with pytest.raises(Boom), Join([counter]):
            fail_in(where, counter)
        return "", still_works(group)
    with pytest.raises(PeerFailedError) as caught, Join([counter]):
        for _ in range(steps):
            counter.step()
    assert (caught.value.rank, caught.value.peers) == (group.rank(), [1])
    assert isinstance(caught.value.__cause__, MismatchError)
    assert counter.ended == []
    return str(caught.value), still_works(group)


@pytest.mark.parametrize("where", ["before", "inside", "after"])
@pytest.mark.parametrize("steps", [0, 1, 5])  # the others: joined long since, or active
def test_when_a_rank_fails_the_others_raise_its_message_and_the_group_lives(
    where: str, steps: int
) -> None:
    results = run_ranks(3, lambda group: fail_on_rank_one(group, where, steps))
    step = 2 if where == "before" else 3
    for rank in (0, 2):
        text = results[rank][0]
        assert f"rank {rank}: rank 1 failed inside the Join context in step {step}" in text
        assert "Boom: no more disk" in text
    assert all(works for _, works in results)


def fail_over_shm(meeting: Meeting, where: str, steps: int) -> tuple[str, bool]:
    with meeting.new_group("shm") as group:
        return fail_on_rank_one(group, where, steps)


@pytest.mark.parametrize(("where", "steps"), [("before", 5), ("inside", 5), ("inside", 0)])
def test_between_processes_over_shared_memory_too(where: str, steps: int) -> None:
    results = spawn_ranks(2, fail_over_shm, where, steps)
    assert "Boom: no more disk" in results[0][0]
    assert all(works for _, works in results)


def test_ranks_that_all_fail_each_raise_their_own() -> None:
    def one_rank(group: Group) -> bool:
        counter = Counter(group)
        with pytest.raises(Boom, match=f"rank {group.rank()}"), Join([counter]):
            counter.step()
            raise Boom(f"rank {group.rank()}")
        return still_works(group)

    assert run_ranks(3, one_rank) == [True] * 3


def test_two_ranks_that_fail_are_both_named() -> None:
    def one_rank(group: Group) -> list[int]:
        counter = Counter(group)
        with pytest.raises((Boom, PeerFailedError)) as caught, Join([counter]):
            counter.step()
            if group.rank() > 0:
                raise Boom
            counter.step()
        return list(getattr(caught.value, "peers", []))

    assert run_ranks(3, one_rank) == [[1, 2], [], []]


def test_a_failure_in_throwing_mode_reaches_everybody_too() -> None:
    def one_rank(group: Group) -> bool:
        counter = Counter(group)
        kind = Boom if group.rank() == 1 else PeerFailedError
        with pytest.raises(kind), Join([counter], throw_on_early_termination=True):
            counter.step()
            if group.rank() == 1:
                raise Boom
            counter.step()
        return still_works(group)

    assert run_ranks(3, one_rank) == [True] * 3


def test_a_hook_that_fails_on_a_joined_rank_reaches_everybody() -> None:
    class Broken(Counter):
        def add(self, own: float) -> float:
            if own == 0.0:
                raise Boom("in the hook")
            return super().add(own)

    def one_rank(group: Group) -> bool:
        broken = Broken(group)
        kind = Boom if group.rank() == 0 else PeerFailedError
        with pytest.raises(kind, match="in the hook"), Join([broken]):
            for _ in range(1 + group.rank()):
                broken.step()
        return still_works(group)

    assert run_ranks(2, one_rank) == [True, True]


def test_ranks_that_really_call_different_things_see_that_error() -> None:
    def one_rank(group: Group) -> bool:
        counter = Counter(group)
        with pytest.raises(MismatchError), Join([counter]):
            counter.step()
            group.all_reduce(torch.ones(5 + group.rank()))
        return still_works(group)

    assert run_ranks(2, one_rank) == [True, True]


def test_a_very_long_message_is_cut() -> None:
    def one_rank(group: Group) -> int:
        with pytest.raises((Boom, PeerFailedError)) as caught, Join([Counter(group)]):
            if group.rank() == 0:
                raise Boom("\N{PILE OF POO}" * 5000)
        return len(getattr(caught.value, "message", ""))

    assert 0 < run_ranks(2, one_rank)[1] < 1000


def test_a_rank_that_leaves_the_group_without_joining_is_named_with_the_step() -> None:
    def one_rank(group: Group) -> str:
        counter = Counter(group)
        if group.rank() == 1:
            with pytest.raises(Boom), Join([counter]):
                counter.step()
                group.abort()
                raise Boom
            return ""
        with pytest.raises(PeerLeftUnjoinedError) as caught, Join([counter]):
            for _ in range(3):
                counter.step()
        return str(caught.value)

    text = run_ranks(2, one_rank)[0]
    assert "It had not joined: the others were inside a Join context in step 2." in text


def die_in_step_two(meeting: Meeting) -> tuple[str, int]:
    group = meeting.new_group("shm")
    counter = Counter(group)
    with pytest.raises(PeerDiedUnjoinedError) as caught, Join([counter]):
        counter.step()
        if meeting.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        counter.step()
        counter.step()
    assert isinstance(caught.value, PeerDiedError)
    assert list(caught.value.ranks) == [1]
    return str(caught.value), caught.value.step


def test_a_rank_that_dies_without_joining_is_named_with_the_step() -> None:
    text, step = spawn_ranks(2, die_in_step_two, may_die=[1])[0]
    assert "rank 1 died" in text
    assert step == 2


def fail_over_stock_gloo(meeting: Meeting) -> str:
    dist.init_process_group(
        "gloo", store=meeting.store(), rank=meeting.rank, world_size=meeting.size
    )
    counter = Counter(dist.group.WORLD)
    try:
        with Join([counter]):
            counter.step()
            if meeting.rank == 1:
                raise Boom("no more disk")
            counter.step()
    except Boom:
        os._exit(0)
    except PeerFailedError as error:
        return str(error)
    return "nothing was raised"


def test_over_a_stock_group_the_message_is_there_once_the_process_is_gone() -> None:
    text = spawn_ranks(2, fail_over_stock_gloo, may_die=[1])[0]
    assert "rank 1 failed inside the Join context in step 1: Boom: no more disk" in text


def fail_together_over_stock_gloo(meeting: Meeting) -> float:
    dist.init_process_group(
        "gloo", store=meeting.store(), rank=meeting.rank, world_size=meeting.size
    )
    counter = Counter(dist.group.WORLD)
    for late in range(2):  # this rank hears of the other's failure before it has its own
        own = f"rank {meeting.rank}, turn {late}"
        with pytest.raises(RuntimeError, match=own), Join([counter]):
            counter.step()
            if meeting.rank == late:
                counter.add(1.0)
            raise RuntimeError(own)
        if meeting.rank != late:
            counter.add(1.0)
    total = counter.add(1.0)
    dist.destroy_process_group()
    return total


def test_over_a_stock_group_ranks_that_all_fail_each_raise_their_own() -> None:
    assert spawn_ranks(2, fail_together_over_stock_gloo) == [2.0, 2.0]


def fail_in_stock_backward(meeting: Meeting) -> tuple[str, float]:
    dist.init_process_group(
        "paceline", store=meeting.store(), rank=meeting.rank, world_size=meeting.size
    )
    model = StockDDP(nn.Sequential(*[nn.Linear(50, 50) for _ in range(4)]), bucket_cap_mb=0.01)
    with pytest.raises((ZeroDivisionError, PeerFailedError)) as caught, Join([model]):
        for step in range(2 + meeting.rank):
            if step == meeting.rank == 1:  # after some of the buckets have left
                model.module[1].weight.register_hook(lambda gradient: 1 / 0)
            model(torch.ones(2, 50)).sum().backward()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return str(caught.value), tensor.item()


@needs_shm  # gloo ends the process when ranks call different things
def test_a_rank_that_fails_in_the_middle_of_torchs_backward_frees_the_others() -> None:
    results = spawn_ranks(3, fail_in_stock_backward)
    assert [total for _, total in results] == [3.0] * 3, "the group goes on"
    for rank in (0, 2):
        assert "rank 1 failed inside the Join context: ZeroDivisionError" in results[rank][0]


# -- other groups, and torch's own joinables ----------------------------------------------------


def count(meeting: Meeting, backend: str) -> tuple[list[float], int, list[bool]]:
    if backend.startswith("torch"):
        dist.init_process_group(
            "gloo", store=meeting.store(), rank=meeting.rank, world_size=meeting.size
        )
        group: Any = None if backend == "torch default" else dist.group.WORLD
    else:
        group = meeting.new_group(backend)
    counter = Counter(group)
    with Join([counter]):
        sums = [counter.step() for _ in range(1 + 2 * meeting.rank)]
    if backend.startswith("torch"):
        dist.destroy_process_group()
    else:
        group.shutdown()
    return sums, counter.shadowed, counter.ended


@pytest.mark.parametrize("backend", ["shm", "gloo", "torch", "torch default"])
def test_any_group_will_do(backend: str) -> None:
    zero, one = spawn_ranks(2, count, backend)
    assert zero == ([2.0], 2, [False])
    assert one == ([2.0, 1.0, 1.0], 0, [True])


def join_theirs_and_ours(meeting: Meeting) -> tuple[list[float], list[float], list[bool]]:
    with meeting.new_group(USUAL) as group:
        group.register(default=True)
        counter, stranger = Counter(group), Counter(group, torch_join.Join)
        steps = 1 + 2 * group.rank()
        with torch_join.Join([counter]):
            theirs = [counter.step() for _ in range(steps)]
        with Join([stranger]):
            ours = [stranger.step() for _ in range(steps)]
        throwing = Join([stranger], throw_on_early_termination=True)
        with pytest.raises(RuntimeError) as caught, throwing:
            for _ in range(steps):
                stranger.step()
        assert "exhausted" in str(caught.value)
        assert still_works(group)
        return theirs, ours, [*counter.ended, *stranger.ended]


def test_our_joinables_go_into_torchs_join_and_torchs_notice_fits_ours() -> None:
    zero, one = spawn_ranks(2, join_theirs_and_ours)
    assert zero == ([2.0], [2.0], [False, False])
    assert one == ([2.0, 1.0, 1.0], [2.0, 1.0, 1.0], [True, True])


def train_stock(join: Any, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = StockDDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    batches = torch.Generator().manual_seed(rank)
    with join([model, optimizer]):
        for _ in range(2 + 3 * rank):
            optimizer.zero_grad()
            model(torch.randn(5, 3, generator=batches).double()).square().mean().backward()
            optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


def train_stock_in_both(meeting: Meeting, backend: str) -> tuple[list[Tensor], list[Tensor]]:
    dist.init_process_group(
        backend, store=meeting.store(), rank=meeting.rank, world_size=meeting.size
    )
    results = train_stock(torch_join.Join, meeting.rank), train_stock(Join, meeting.rank)
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_torchs_ddp_and_zero_train_alike_in_torchs_join_and_in_ours(backend: str) -> None:
    for theirs, ours in spawn_ranks(2, train_stock_in_both, backend):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
