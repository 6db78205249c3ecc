"""Works that are asked, not waited for: what they say is so, and who waits later loses nothing."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import Work

from paceline import Group, ReduceOp
from paceline.errors import CollectiveTimeoutError, WaitTimeoutError
from paceline.groups.engines.lane import Lane
from paceline.groups.engines.threads.engine import Receiving
from paceline.groups.work import Together, Watcher, Wrapped
from paceline.groups.work import Work as OwnWork
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.marks import needs_shm

BACKENDS = [pytest.param("shm", marks=needs_shm), "gloo"]
LONG = 120.0  # seconds: nothing here takes so long unless it hangs


class Scripted(OwnWork):
    """Does in turn what it was told: an error is raised, anything else returned."""

    def __init__(self, *outcomes: bool | BaseException) -> None:
        super().__init__([])
        self.outcomes = list(outcomes)

    def _poll(self) -> bool:
        return True

    def _block(self, seconds: float | None) -> bool:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


# -- what a work says ------------------------------------------------------------------------------


def test_who_only_asks_learns_whether_it_went_well() -> None:
    work = Scripted(True)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None


def test_who_only_asks_learns_what_went_wrong() -> None:
    work = Scripted(ValueError("lost"))
    assert work.is_completed()
    assert not work.is_success()
    assert str(work.exception()) == "lost"
    with pytest.raises(ValueError, match="lost"):
        work.wait()


def ask_until_the_end(work: Work) -> bool:
    until = time.monotonic() + LONG
    while not work.is_completed():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)  # there is no event: to ask again is the point
    return work.is_success()


def ask_about_everything(meeting: Meeting, backend: str) -> list[str]:
    """gloo itself never says that a message or a reduce-scatter is done."""
    with meeting.new_group(backend, timeout=timedelta(seconds=2 * LONG)) as group:
        return [
            f"{kind} of {numel}"
            for numel in (8, 40_000)  # two ranks over gloo have a way of their own for many
            for kind, start in CALLS.items()
            if not ask_until_the_end(start(group, numel))
        ]


def _all_reduce(group: Group, numel: int) -> Work:
    return group.all_reduce(torch.ones(numel), async_op=True)


def _all_gather(group: Group, numel: int) -> Work:
    room = list(torch.zeros(group.size(), numel).unbind())
    return group.all_gather(room, torch.ones(numel), async_op=True)


def _reduce_scatter(group: Group, numel: int) -> Work:
    parts = list(torch.ones(group.size(), numel).unbind())
    return group.reduce_scatter(torch.ones(numel), parts, async_op=True)


def _product_scatter(group: Group, numel: int) -> Work:
    given = torch.ones(group.size() * numel)
    return group.reduce_scatter_single(torch.ones(numel), given, ReduceOp.PRODUCT, async_op=True)


def _gather(group: Group, numel: int) -> Work:
    room = list(torch.zeros(group.size(), numel).unbind()) if group.rank() == 0 else None
    return group.gather(room, torch.ones(numel), 0, async_op=True)


def _scatter(group: Group, numel: int) -> Work:
    parts = list(torch.ones(group.size(), numel).unbind()) if group.rank() == 0 else None
    return group.scatter(torch.zeros(numel), parts, 0, async_op=True)


def _message(group: Group, numel: int) -> Work:
    if group.rank() == 0:
        return group.send(torch.ones(numel), 1, async_op=True)
    if group.rank() == 1:
        return group.recv(torch.ones(numel), 0, async_op=True)
    return Scripted(True)


def _mean_of_integers(group: Group, numel: int) -> Work:
    return group.all_reduce(torch.ones(numel, dtype=torch.int32), ReduceOp.AVG, async_op=True)


CALLS: dict[str, Callable[[Group, int], Work]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _product_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "message": _message,
    "mean of integers": _mean_of_integers,
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_who_only_asks_is_told_the_end_of_every_call(backend: str, size: int) -> None:
    assert spawn_ranks(size, ask_about_everything, backend, deadline=3 * LONG) == [[]] * size


def keep_a_message_waiting(meeting: Meeting, backend: str) -> float:
    with meeting.new_group(backend, timeout=timedelta(seconds=LONG)) as group:
        message, total = torch.zeros(1), torch.ones(1)
        if meeting.rank == 0:
            received = group.recv(message, 1, async_op=True).get_future()
            group.all_reduce(total, async_op=True).get_future().wait()
            group.send(total, 1)  # the message comes after this one
            received.wait()
        else:
            group.all_reduce(total, async_op=True).wait()
            group.recv(message, 0)
            group.send(message, 0)
        return message.item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_future_of_a_message_does_not_hold_up_that_of_another_call(backend: str) -> None:
    assert spawn_ranks(2, keep_a_message_waiting, backend, deadline=2 * LONG) == [2.0, 2.0]


def test_a_look_ends_nothing() -> None:
    errors = []
    inner = Scripted(ValueError("lost"))
    outer = Together([Wrapped(inner, (), Watcher("none"))], (), Watcher("none"))
    outer.finally_do(errors.append)
    assert outer.is_over()
    assert errors == []
    assert inner.exception() is None
    assert outer.is_completed()
    assert [str(error) for error in errors] == ["lost"]


def test_what_is_around_a_silent_work_is_awaited_as_well() -> None:
    watcher = Watcher("test-around")
    inner = Scripted(True)
    inner.tells = False
    outer = Together([Wrapped(inner, (), watcher)], (), watcher)
    assert ask_until_the_end(outer)
    watcher.close()


def test_a_message_between_hosts_does_not_hold_up_other_futures_either() -> None:
    lane, comes = Lane("test-aside"), threading.Event()
    message = lane.aside(lambda: comes.wait(LONG)).get_future()
    lane.start(lambda: None).get_future().wait()
    assert not message.done()
    comes.set()
    message.wait()
    lane.close()


def end_while_asking(meeting: Meeting, hooked: bool) -> bool:
    group = meeting.new_group("gloo", timeout=timedelta(seconds=10 * LONG))
    if meeting.rank:
        meeting.store().wait(["ended"], timedelta(seconds=LONG))
        group.abort()
        return True
    if hooked:
        group.register_hooks(before=lambda call: None)
    work = group.recv(torch.zeros(1), 1, async_op=True)
    assert not work.is_completed()
    waiting = [t for t in threading.enumerate() if t.name == "paceline-gloo-futures"]
    group.shutdown()
    for thread in waiting:
        thread.join(LONG)
    meeting.store().set("ended", "yes")
    return len(waiting) == 1 and not waiting[0].is_alive()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_message_that_was_asked_about_does_not_hold_gloo_after_the_end_of_its_group(
    hooked: bool,
) -> None:
    assert spawn_ranks(2, end_while_asking, hooked, deadline=3 * LONG) == [True, True]


def leave_with_a_future(meeting: Meeting) -> list[float]:
    group = meeting.new_group("gloo", timeout=timedelta(seconds=LONG))
    store, found = meeting.store(), torch.zeros(2, 3)
    if meeting.rank:
        future = group.gather(None, torch.ones(3), 0, async_op=True).get_future()
        group.shutdown()
        store.set("left", "yes")
        future.wait()
    else:
        store.wait(["left"], timedelta(seconds=LONG))
        group.gather(list(found.unbind()), torch.ones(3), 0)
        group.shutdown()
    return found.sum(1).tolist()


def test_a_rank_that_leaves_cuts_off_nobody_who_gathers() -> None:
    assert spawn_ranks(2, leave_with_a_future, deadline=3 * LONG) == [[3.0, 3.0], [0.0, 0.0]]


# -- who waits is interrupted, or too late ---------------------------------------------------------


def test_an_interrupt_ends_the_waiting_and_not_the_work() -> None:
    errors = []
    work = Scripted(KeyboardInterrupt(), True)
    work.finally_do(errors.append)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert errors == []
    assert work.wait()
    assert errors == [None]


def test_a_task_that_ends_its_thread_has_failed_with_that() -> None:
    def leave() -> None:
        raise SystemExit(3)

    lane = Lane("test-leaving")
    work = lane.start(leave)
    for _ in range(2):
        with pytest.raises(SystemExit):
            work.wait()
    lane.close()
    assert work.is_completed()
    assert isinstance(work.exception(), SystemExit)


def test_a_work_that_cannot_be_waited_for_twice_ends_with_an_interrupt() -> None:
    work = Scripted(KeyboardInterrupt())
    work.tells = False  # as messages of gloo's: the interrupt comes when the message has
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            work.wait()


@pytest.mark.parametrize("around", [Wrapped, Together])
def test_what_is_around_a_work_fails_with_it_whatever_the_error(around: Any) -> None:
    errors = []
    lane, watcher = Lane("test-around-leaving"), Watcher("none")
    inner = lane.start(partial(sys.exit, 3))
    outer = around(inner if around is Wrapped else [inner], (), watcher)
    outer.finally_do(errors.append)
    for _ in range(2):
        with pytest.raises(SystemExit):
            outer.wait()
    assert outer.is_completed()
    assert errors == [inner.exception()]
    lane.close()


def test_a_device_that_fails_at_the_end_is_the_error_of_the_work() -> None:
    class Device(Scripted):
        def _mark_streams(self) -> None:
            raise RuntimeError("device-side assert")

    ends: list[object] = []
    work = Device(True)
    work.finally_do(ends.append)
    assert work.is_completed()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device-side assert"):
            work.wait()
    assert ends == [None]


def test_who_asks_a_failed_work_does_not_keep_it_alive() -> None:
    gc.disable()
    try:
        work = Scripted(ValueError("lost"))
        held = weakref.ref(work)
        assert work.is_completed()
        del work
        assert held() is None
    finally:
        gc.enable()


class _Taken:
    """A lock that another thread gives back when it is too late, having ended the work."""

    def __init__(self, work: OwnWork) -> None:
        self.work = work

    def acquire(self, timeout: float) -> bool:
        self.work._ended = True
        return False


def test_a_work_that_ends_when_the_time_is_up_has_ended() -> None:
    work = Scripted(True)
    work._turn = _Taken(work)  # type: ignore[assignment]
    assert work.wait(timedelta(seconds=1))


def test_the_turn_that_does_not_come_is_a_timeout() -> None:
    work = Scripted(True)
    work._turn = threading.RLock()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        assert work._turn is not None
        with work._turn:
            held.set()
            over.wait(LONG)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(LONG)
    with pytest.raises(WaitTimeoutError):
        work.wait(0.01)
    over.set()
    thread.join()
    assert work.wait(LONG)


def test_a_message_that_comes_when_the_time_is_up_is_received() -> None:
    def one_rank(group: Group) -> float:
        message = torch.zeros(1)
        if group.rank() == 0:
            group.send(torch.full((1,), 5.0), 1)
            return 5.0
        work = group.recv(message, 0, timeout=LONG, async_op=True)
        assert isinstance(work, Receiving)
        world = work._engine.world
        receive = world.receive

        def too_late(rank: int, receipt: Any, seconds: float) -> bool:
            world.receive = receive  # type: ignore[method-assign]
            assert receive(rank, receipt, LONG)
            return False

        world.receive = too_late  # type: ignore[method-assign]
        work.wait()
        return message.item()

    assert run_ranks(2, one_rank) == [5.0, 5.0]


def test_a_message_that_does_not_come_in_time_is_not_taken_from_who_asks_next() -> None:
    def one_rank(group: Group) -> float:
        message = torch.zeros(1)
        if group.rank() == 0:
            group.barrier()
            group.send(torch.full((1,), 5.0), 1)
            return 5.0
        with pytest.raises(CollectiveTimeoutError):
            group.recv(message, 0, timeout=0.01)
        group.barrier()
        group.recv(message, 0)
        return message.item()

    assert run_ranks(2, one_rank) == [5.0, 5.0]


# -- who sent it -----------------------------------------------------------------------------------


def take_it_from_anybody(meeting: Meeting) -> int:
    with meeting.new_group("shm") as group:
        if meeting.rank:
            group.send(torch.ones(1), 0)
            return meeting.rank
        shm: Any = group._engine.shm  # type: ignore[attr-defined]
        run = shm.run

        def run_while_another_thread_does(*arguments: Any) -> Any:
            operation = run(*arguments)
            for spare in shm._spare:
                spare.source = 99
            return operation

        shm.run = run_while_another_thread_does
        found = group.recv(torch.zeros(1), None, async_op=False).source_rank()
        shm.run = run
        return int(found)


@needs_shm
def test_the_source_of_a_message_is_not_that_of_another_threads_next_operation() -> None:
    assert spawn_ranks(2, take_it_from_anybody) == [1, 1]


def test_a_thread_waits_once_however_often_somebody_asks() -> None:
    opened = []

    class Silent(Scripted):
        tells = False

        def _watcher(self) -> Watcher:
            opened.append(self)
            return watcher

    watcher = Watcher("test-asking")
    work = Silent(True)
    assert ask_until_the_end(work)
    assert work.is_completed()
    assert opened == [work]
    watcher.close()
