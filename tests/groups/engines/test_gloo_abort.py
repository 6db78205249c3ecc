"""Group.abort over gloo, which has none of its own."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from paceline.errors import GroupClosedError
from paceline.groups import Group, new_group
from paceline.testing import Meeting, spawn_ranks
from tests.waiting import until

FAR = timedelta(minutes=5)


def _wait_in_vain(group: Group, size: int) -> float:
    """Wait for a rank that does not come, until somebody ends it; when that was."""
    try:
        group.all_reduce(torch.ones(size))
    except RuntimeError:
        return time.monotonic()
    raise AssertionError("the last rank never came")


def _one_aborts(meeting: Meeting, size: int) -> float:
    group, store = meeting.new_group("gloo", timeout=FAR), meeting.store()
    if meeting.rank == 3:
        store.wait(["waiting"])
        began = time.monotonic()
        group.abort()
    elif meeting.rank == 0:
        threading.Timer(0.2, store.set, ("waiting", "")).start()
        began = _wait_in_vain(group, size)
    else:
        began = _wait_in_vain(group, size)
    group.shutdown()
    return began


def test_one_rank_that_aborts_frees_those_that_wait_on_others() -> None:
    for size in (1, 1 << 20):
        *freed, aborted = spawn_ranks(4, _one_aborts, size)
        assert max(freed) - aborted < FAR.total_seconds() / 2


def _each_aborts_itself(meeting: Meeting) -> bool:
    """As a listener does that hears of a lost rank; the lost one is no neighbour of all."""
    group, store = meeting.new_group("gloo", timeout=FAR), meeting.store()
    group.all_reduce(torch.ones(8))
    if meeting.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    news = threading.Timer(0.1, group.abort)
    news.start()
    _wait_in_vain(group, 8)
    news.join()
    before = len(os.listdir("/proc/self/fd"))
    ranks = [0, 2, 3]
    group.move(PrefixStore("second", store), ranks.index(meeting.rank), ranks)
    total = torch.ones(8)
    group.all_reduce(total)
    assert (group.size(), group.members, total.tolist()) == (3, (0, 2, 3), [3.0] * 8)
    assert len(os.listdir("/proc/self/fd")) <= before + 8
    group.shutdown()
    return True


def test_survivors_over_gloo_are_freed_and_go_on_as_the_same_group() -> None:
    assert spawn_ranks(4, _each_aborts_itself, may_die=[1]) == [True, None, True, True]


def test_a_group_of_one_is_moved_and_moved_back() -> None:
    group = new_group("gloo", store=HashStore(), rank=0, world_size=1)
    for number in range(3):
        group.move(PrefixStore(str(number), HashStore()), 0, [7 + number])
        assert (group.rank(), group.size(), group.members) == (0, 1, (7 + number,))
        total = torch.ones(2)
        group.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
    group.shutdown()


def _move_without_the_other(meeting: Meeting) -> float:
    """A rank dies between the store and its connections: gloo itself waits for its timeout."""
    group, store = meeting.new_group("gloo", timeout=FAR), meeting.store()
    if meeting.rank == 1:
        store.wait(["waits"])
        os.kill(os.getpid(), signal.SIGKILL)

    def abort_once_it_opens() -> None:
        assert until(lambda: any(t.name == "paceline-opening" for t in threading.enumerate()))
        store.set("waits", "")
        group.abort()

    aborting = threading.Thread(target=abort_once_it_opens)
    aborting.start()
    began = time.monotonic()
    with pytest.raises(GroupClosedError):
        group.move(PrefixStore("second", store), 0, [0, 1])
    took = time.monotonic() - began
    aborting.join()
    return took


def test_abort_frees_a_rank_that_opens_a_group_with_one_that_died() -> None:
    seconds, _ = spawn_ranks(2, _move_without_the_other, may_die=[1])
    assert seconds < FAR.total_seconds() / 2


@pytest.mark.parametrize("during", ["the end of the old engine", "the change to the new one"])
def test_an_abort_while_a_group_moves_is_not_forgotten(
    during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = new_group("gloo", store=HashStore(), rank=0, world_size=1)
    old = group._engine
    here, name = (old, "shutdown") if during == "the end of the old engine" else (group, "_adopt")
    do = getattr(here, name)

    def be_aborted_meanwhile(*args: object) -> None:
        aborting = threading.Thread(target=group.abort)
        aborting.start()
        aborting.join()
        do(*args)

    with monkeypatch.context() as patched:
        patched.setattr(here, name, be_aborted_meanwhile)
        with pytest.raises(GroupClosedError):
            group.move(PrefixStore("first", HashStore()), 0, [0])
    assert (group._engine is old) == (here is old), "nobody waits for what is not wanted"
    with pytest.raises(GroupClosedError):
        group.barrier()
    group.move(PrefixStore("second", HashStore()), 0, [0])
    group.barrier()
    group.shutdown()
