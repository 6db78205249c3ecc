"""Works that are waited for at once, or later, or never: the shared memory engine learns which.

Every test first makes a habit of waiting at once, so that calls are left to their callers; then it
does something else.
"""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline import Group, ReduceOp
from paceline.errors import CollectiveTimeoutError, MismatchError, PeerDiedError
from paceline.testing import Meeting, spawn_ranks
from tests.marks import needs_shm
from tests.waiting import until

pytestmark = needs_shm
LONG = 120.0  # seconds: nothing here takes so long unless it hangs


def ranks(meeting: Meeting) -> Group:
    """A group whose engine has seen callers come at once."""
    group = meeting.new_group("shm")
    come_a_few_times(group)
    return group


def come_a_few_times(group: Group) -> None:
    """Make it a habit, which is forgotten after some milliseconds."""
    for _ in range(20):
        group.allreduce([torch.ones(4)]).wait()


def mine(group: Group, scale: float = 1.0) -> Tensor:
    return torch.full((1024,), scale * (group.rank() + 1))


# -- done when it is returned ----------------------------------------------------------------------


def come_at_once(meeting: Meeting) -> bool:
    with ranks(meeting) as group:
        seen = False
        for _ in range(2000):  # on a busy machine the other rank is often late
            tensor = mine(group)
            work = group.allreduce([tensor])
            done = work.is_completed()
            assert not done or tensor[0] == 3
            work.wait()
            assert tensor.eq(3).all()
            seen = seen or done
            stop = torch.tensor(float(seen))
            group.all_reduce(stop, ReduceOp.MAX)
            if stop:
                break
        return seen


def test_a_work_that_is_always_waited_for_at_once_comes_back_done() -> None:
    assert any(spawn_ranks(2, come_at_once))


def keep_its_tensors(meeting: Meeting) -> None:
    with ranks(meeting) as group:
        for _ in range(50):
            tensor = mine(group)
            work = group.allreduce([tensor])
            assert work.get_future().wait()[0] is tensor
            assert work.result()[0] is tensor
            assert work.is_success()
            assert work.exception() is None


def test_a_work_has_its_tensors_whether_or_not_it_was_done_at_once() -> None:
    spawn_ranks(2, keep_its_tensors)


# -- a start does not wait -------------------------------------------------------------------------


def start_before_the_other(meeting: Meeting) -> None:
    with ranks(meeting) as group:
        store = meeting.store()
        for turn in range(3):
            come_a_few_times(group)
            if meeting.rank == turn % 2:
                store.wait([f"started {turn}"])  # the other rank has come back from its start
            tensor = mine(group)
            work = group.allreduce([tensor])
            if meeting.rank != turn % 2:
                store.set(f"started {turn}", "")
            work.wait()
            assert tensor.eq(3).all()


def test_a_start_comes_back_though_the_other_rank_does_not_come_before_that() -> None:
    spawn_ranks(2, start_before_the_other)


def wait_crosswise(meeting: Meeting) -> None:
    with ranks(meeting) as group:
        for size in (4, 100_000, 1_000_000):
            first, second = torch.ones(size), torch.ones(size)
            works = [group.allreduce([first]), group.allreduce([second])]
            for work in works if meeting.rank else reversed(works):
                work.wait()
            assert first.eq(2).all()
            assert second.eq(2).all()


def test_ranks_may_wait_for_two_works_in_different_orders() -> None:
    spawn_ranks(2, wait_crosswise)


def two_groups_crosswise(meeting: Meeting) -> None:
    """Legal where starts do not wait: the ranks start on two groups in different orders."""
    with ranks(meeting) as one, ranks(meeting) as other:
        for _ in range(5):
            groups = (one, other) if meeting.rank else (other, one)
            tensors = [mine(group) for group in groups]
            works = [g.allreduce([t]) for g, t in zip(groups, tensors, strict=True)]
            for work in works:
                work.wait()
            assert all(tensor.eq(3).all() for tensor in tensors)


def test_ranks_may_start_on_two_groups_in_different_orders() -> None:
    spawn_ranks(2, two_groups_crosswise)


# -- nobody waits ----------------------------------------------------------------------------------


def only_look(meeting: Meeting) -> None:
    with ranks(meeting) as group:
        store = meeting.store()
        for turn in range(3):
            come_a_few_times(group)
            if meeting.rank:
                store.wait([f"started {turn}"])
            tensor = mine(group)
            work = group.allreduce([tensor])
            store.set(f"started {turn}", "")
            assert until(work.is_completed)
            assert tensor.eq(3).all()


def test_a_work_that_is_only_asked_whether_it_is_done_gets_done() -> None:
    spawn_ranks(2, only_look)


def drop_it(meeting: Meeting) -> None:
    """Often: on a busy machine callers are late at times, and then there is no habit."""
    with ranks(meeting) as group:
        store = meeting.store()
        for turn in range(12):
            tensor = mine(group)
            come_a_few_times(group)
            if meeting.rank == 0:
                group.allreduce([tensor])  # and nothing else is done with the group
                store.set(f"started {turn}", "")
                store.wait([f"the other has it {turn}"])
                assert until(lambda own=tensor: own.eq(3).all())
            else:
                store.wait([f"started {turn}"])
                group.allreduce([tensor]).wait(LONG)
                store.set(f"the other has it {turn}", "")


def test_a_work_that_is_dropped_is_done_all_the_same() -> None:
    spawn_ranks(2, drop_it)


def hear_of_it(meeting: Meeting) -> None:
    with ranks(meeting) as group:
        for _ in range(5):
            tensor, told = mine(group), threading.Event()
            future = group.allreduce([tensor]).get_future()
            future.then(lambda done, told=told: done.value()[0].eq(3).all() and told.set())
            assert told.wait(LONG)


def test_whoever_asked_to_be_told_is_told_though_nobody_waits() -> None:
    spawn_ranks(2, hear_of_it)


# -- other threads ---------------------------------------------------------------------------------


def call_from_two_threads(meeting: Meeting) -> None:
    """The main thread starts, another one runs, in the same order on both ranks."""
    with ranks(meeting) as group:
        for _ in range(10):
            first, second = mine(group), mine(group, 10.0)
            work = group.allreduce([first])
            thread = threading.Thread(target=group.all_reduce, args=(second,))
            thread.start()
            thread.join(LONG)
            assert second.eq(30).all()
            work.wait()
            assert first.eq(3).all()


def test_calls_of_another_thread_come_after_what_was_started_before() -> None:
    spawn_ranks(2, call_from_two_threads)


def wait_in_two_threads(meeting: Meeting) -> None:
    with ranks(meeting) as group:
        for _ in range(10):
            tensor, seen = mine(group), []
            work = group.allreduce([tensor])
            threads = [
                threading.Thread(target=lambda work=work, seen=seen: seen.append(work.wait()))
                for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG)
            assert seen == [True] * 3
            assert tensor.eq(3).all()


def test_several_threads_may_wait_for_one_work() -> None:
    spawn_ranks(2, wait_in_two_threads)


# -- what goes wrong -------------------------------------------------------------------------------


def differ(meeting: Meeting) -> None:
    with ranks(meeting) as group:
        work = group.allreduce([torch.ones(4 + meeting.rank)])
        with pytest.raises(MismatchError):
            work.wait()
        with pytest.raises(MismatchError):
            work.wait()
        assert isinstance(work.exception(), MismatchError)
        tensor = mine(group)
        group.allreduce([tensor]).wait()  # the group stays usable
        assert tensor.eq(3).all()


def test_calls_that_differ_are_an_error_of_the_wait_and_not_of_the_start() -> None:
    spawn_ranks(2, differ)


def never_come(meeting: Meeting) -> None:
    group = ranks(meeting)
    store = meeting.store()
    if meeting.rank == 0:
        work = group.all_reduce(torch.ones(4), timeout=0.3, async_op=True)
        with pytest.raises(CollectiveTimeoutError):
            work.wait()
        store.set("timed out", "")
    else:
        store.wait(["timed out"])
    group.abort()
    group.shutdown()


def test_a_rank_that_never_comes_is_an_error_of_the_wait_after_the_timeout() -> None:
    spawn_ranks(2, never_come)


def outlive(meeting: Meeting) -> None:
    group = ranks(meeting)
    if meeting.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    work = group.allreduce([torch.ones(4)])
    with pytest.raises(PeerDiedError):
        work.wait()
    group.shutdown()


def test_a_dead_rank_is_named_by_the_wait() -> None:
    spawn_ranks(2, outlive, may_die=[0])


# -- the recorder ----------------------------------------------------------------------------------


def be_recorded(meeting: Meeting) -> None:
    with ranks(meeting) as group:
        assert group.board is not None
        for number in range(40):
            work = group.allreduce([mine(group)])
            entry = group.board.latest
            assert entry is not None
            assert entry.sequence == 21 + number
            work.wait()
            assert entry.began <= entry.finished
            assert not entry.look()
            assert not entry.error
        store = meeting.store()
        if meeting.rank == 0:  # one that waits for the other rank is not over
            work, entry = group.allreduce([mine(group)]), group.board.latest
            assert entry is not None
            assert entry.look()
            store.set("looked", "")
        else:
            store.wait(["looked"])
            work, entry = group.allreduce([mine(group)]), group.board.latest
        work.wait()
        assert entry is not None
        assert not entry.look()


def test_the_recorder_knows_when_each_of_them_ended() -> None:
    spawn_ranks(2, be_recorded)


# -- as torch calls --------------------------------------------------------------------------------


def through_torch(meeting: Meeting) -> None:
    with ranks(meeting) as group:
        group.register(default=True)
        for _ in range(20):
            tensor = mine(group)
            dist.all_reduce(tensor)
            assert tensor.eq(3).all()
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)
            assert work is not None
            work.wait()
            assert tensor.eq(3).all()
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.PRODUCT
            group.allreduce([tensor], options).wait()
            assert tensor.eq(9).all()


def test_torchs_own_functions_get_the_reduction_they_ask_for() -> None:
    spawn_ranks(2, through_torch)
