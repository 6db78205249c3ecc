"""What a call promises, whichever engine does it: checked first, done when it says so, in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import Group
from paceline.errors import (
    AllocationSizeError,
    CollectiveTypeError,
    GroupClosedError,
    WaitTimeoutError,
)
from paceline.groups import ReduceOp, Work
from paceline.groups.work import Together, Watcher
from paceline.groups.work import Work as OwnWork
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.marks import needs_shm

BACKENDS = [pytest.param("shm", marks=needs_shm), "gloo"]
LONG = 60.0  # seconds: nothing here takes so long unless it hangs


# -- several calls in one ---------------------------------------------------------------------


def test_nothing_is_sent_when_one_of_several_tensors_cannot_be() -> None:
    def one_rank(group: Group) -> list[float]:
        first, second = torch.ones(2), torch.ones(2)
        with pytest.raises(CollectiveTypeError):
            group.all_reduce_coalesced([first, "second"])  # type: ignore[list-item]
        with pytest.raises(CollectiveTypeError):
            group.all_reduce([second, None])  # type: ignore[list-item]
        group.all_reduce_coalesced([first]).wait()  # all are at the same call
        return [*first.tolist(), *second.tolist()]

    assert run_ranks(2, one_rank) == [[2.0, 2.0, 1.0, 1.0]] * 2


# -- done is done -----------------------------------------------------------------------------


def see_the_end(meeting: Meeting, backend: str) -> list[list[float]]:
    with meeting.new_group(backend, timeout=timedelta(seconds=LONG)) as group:
        seen = []
        for start in (_all_reduce, _all_to_all, _hooked):
            columns = torch.zeros(4, 6)[:, ::2]  # contiguous it is not
            work = start(group, columns)
            until = time.monotonic() + LONG
            while not work.is_completed():
                assert time.monotonic() < until
                time.sleep(0.001)  # there is no event: to ask again is the point
            seen.append(columns.unique().tolist())
            work.wait()
        return seen


def _all_reduce(group: Group, columns: torch.Tensor) -> Work:
    columns.fill_(group.rank() + 1)
    return group.all_reduce(columns, async_op=True)


def _all_to_all(group: Group, columns: torch.Tensor) -> Work:
    return group.all_to_all_single(columns, torch.full((4, 3), 7.0), async_op=True)


def _hooked(group: Group, columns: torch.Tensor) -> Work:
    group.register_hooks(after=lambda call: columns.add_(1))
    return _all_reduce(group, columns)


class _JustDone(OwnWork):
    """Ends between two looks."""

    looks = 0

    def _poll(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def _block(self, seconds: float | None) -> bool:
        return True


def test_a_work_that_ends_while_it_is_asked_is_not_completed_before_its_results_are_in_place() -> (
    None
):
    result = torch.zeros(1)
    work = _JustDone([result]).then_do(lambda: result.add_(1))
    assert not work.is_completed()
    assert result == 0
    assert work.is_completed()
    assert result == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_in_place_when_a_work_says_that_it_is_completed(backend: str) -> None:
    assert spawn_ranks(2, see_the_end, backend) == [[[3.0], [7.0], [4.0]]] * 2


# -- timeouts of one call ---------------------------------------------------------------------

SLOW: dict[str, Callable[[Group, torch.Tensor], object]] = {
    "gather": lambda g, t: g.gather([t, torch.zeros(3)], torch.ones(3), 0, timeout=0.2),
    "scatter": lambda g, t: g.scatter(t, None, 1, timeout=0.2),
    "recv": lambda g, t: g.recv(t, 1, timeout=0.2),
    "started recv": lambda g, t: g.recv(t, 1, timeout=0.2, async_op=True).wait(),
    "started gather": lambda g, t: g.gather(
        [t, torch.zeros(3)], torch.ones(3), 0, timeout=0.2, async_op=True
    ).wait(),
}


def wait_in_vain(meeting: Meeting, kind: str, backend: str) -> bool:
    group = meeting.new_group(backend, timeout=timedelta(seconds=4 * LONG))
    group.barrier()
    if meeting.rank == 1:
        meeting.store().wait(["gave up"], timedelta(seconds=4 * LONG))
        return True
    with pytest.raises((RuntimeError, TimeoutError), match=r"[Tt]imed out"):
        SLOW[kind](group, torch.zeros(3))
    meeting.store().set("gave up", "yes")
    return True


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", SLOW)
def test_a_call_has_the_timeout_that_it_was_given(kind: str, backend: str) -> None:
    assert all(spawn_ranks(2, wait_in_vain, kind, backend, deadline=LONG))


def wait_and_have_it_waited_for(meeting: Meeting, backend: str) -> list[float]:
    found = []
    with meeting.new_group(backend) as group:
        for _ in range(20):
            tensor = torch.ones(100_000)  # as two ranks over gloo send each other
            work = group.all_reduce(tensor, async_op=True)
            future = work.get_future()  # a thread waits, too
            work.wait(timedelta(seconds=LONG))
            future.wait()
            found.append(tensor[7].item())
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_may_be_waited_for_by_several(backend: str) -> None:
    both = spawn_ranks(2, wait_and_have_it_waited_for, backend, deadline=LONG)
    assert both == [[2.0] * 20] * 2


class Message(dist.Work):
    """One of torch's engine's: whoever waits for it a second time waits for ever."""

    def __init__(self, *outcomes: bool) -> None:
        super().__init__()
        self.outcomes = list(outcomes)  # False: it takes longer than somebody waits

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.outcomes.pop(0):
            raise WaitTimeoutError(timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        return not self.outcomes


def test_what_has_come_is_not_waited_for_again_when_the_rest_took_too_long() -> None:
    first, second = Message(True), Message(False, True)
    work = Together([first, second], (), Watcher("test"))
    with pytest.raises(WaitTimeoutError):
        work.wait(timedelta(seconds=1))
    assert not work.is_completed()
    assert work.wait()
    assert work.is_completed()


# -- in place ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["all_reduce", "start_all_reduce", "all_reduce_coalesced"])
def test_what_is_reduced_in_place_reaches_the_engine_as_it_is_and_not_as_a_copy(way: str) -> None:
    def one_rank(group: Group) -> None:
        tensor, seen = torch.ones(8), []
        group.register_hooks(before=lambda call: seen.append((call.inputs[0], call.outputs[0])))
        getattr(group, way)([tensor] if way == "all_reduce_coalesced" else tensor).wait()
        assert [(a is tensor, b is tensor) for a, b in seen] == [(True, True)]
        assert tensor.tolist() == [2.0] * 8

    run_ranks(2, one_rank)


@pytest.mark.parametrize("numel", [(2, 3), -1, 2.5, None, "8", torch.ones(2)])
def test_memory_of_no_number_of_elements_is_refused(numel: Any) -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(AllocationSizeError, match=r"rank [01]: allocate: numel: expected"):
            group.allocate(numel)
        assert group.allocate(torch.Size([3])[0]).shape == (3,)

    run_ranks(2, one_rank)


# -- again and again --------------------------------------------------------------------------


def repeat(meeting: Meeting, backend: str) -> tuple[list[float], int, int]:
    with meeting.new_group(backend) as group:
        tensor = group.allocate(8, torch.float32, torch.device("cpu")).fill_(1.0)
        start = group.repeated_all_reduce(tensor, ReduceOp.SUM)
        found = []
        for _ in range(3):
            start().wait()
            found.append(tensor[5].item())
        seen: list[str] = []
        group.register_hooks(before=lambda call: seen.append(call.kind))
        start().wait()
        calls = group.traffic.calls
    with pytest.raises(GroupClosedError):
        start()
    return [*found, tensor[0].item()], len(seen), calls


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_repeated_call_is_made_and_seen_as_if_it_were_the_first_each_time(backend: str) -> None:
    results = spawn_ranks(2, repeat, backend, deadline=LONG)
    assert results == [([2.0, 4.0, 8.0, 16.0], 1, 4)] * 2


def test_a_call_to_be_repeated_is_checked_before_its_first_time() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(CollectiveTypeError):
            group.repeated_all_reduce([1.0])  # type: ignore[arg-type]

    run_ranks(2, one_rank)
