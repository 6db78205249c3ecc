"""What the others get when a rank of an shm group dies, stops, leaves or calls something else."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from paceline import Group, ReduceOp, new_group
from paceline._transport.shm import Shm
from paceline.errors import (
    CollectiveTimeoutError,
    GroupClosedError,
    MismatchError,
    PeerDiedError,
    PeerLeftError,
)
from paceline.testing import Meeting, spawn_ranks
from tests.groups.descriptors import open_files, still_open
from tests.waiting import until

from .test_shm_late_writers import state_of

BIG = 3_000_000  # elements: far more than fits into a window

Collective = Callable[[Group, int], object]


def _per_rank(group: Group, numel: int) -> list[torch.Tensor]:
    return [torch.ones(numel) for _ in range(group.size())]


def _on(rank: int, group: Group, numel: int) -> list[torch.Tensor] | None:
    return _per_rank(group, numel) if group.rank() == rank else None


COLLECTIVES: dict[str, Collective] = {
    "barrier": lambda g, n: g.barrier(),
    "all_reduce": lambda g, n: g.all_reduce(torch.ones(n)),
    "reduce": lambda g, n: g.reduce(torch.ones(n), 0),
    "broadcast": lambda g, n: g.broadcast(torch.ones(n), 1),
    "all_gather": lambda g, n: g.all_gather(_per_rank(g, n), torch.ones(n)),
    "gather": lambda g, n: g.gather(_on(0, g, n), torch.ones(n), 0),
    "scatter": lambda g, n: g.scatter(torch.ones(n), _on(1, g, n), 1),
    "reduce_scatter": lambda g, n: g.reduce_scatter(torch.ones(n), _per_rank(g, n)),
    "all_to_all": lambda g, n: g.all_to_all(_per_rank(g, n), _per_rank(g, n)),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- a dead rank ------------------------------------------------------------------------------


def survive(meeting: Meeting, name: str, numel: int) -> tuple[float, int]:
    store = meeting.store()
    store.set("ready", "yes")
    before = open_files()
    group = new_group("shm", store=store, rank=meeting.rank, world_size=meeting.size)
    group.barrier()
    if meeting.rank == 1:
        die()
    start = time.monotonic()
    with pytest.raises(PeerDiedError) as caught:
        COLLECTIVES[name](group, numel)
    took = time.monotonic() - start
    assert list(caught.value.ranks) == [1]
    assert caught.value.operation == name
    with pytest.raises(PeerDiedError):  # it stays over
        group.barrier()
    group.shutdown()
    return took, still_open(before)


def files_in_memory() -> set[str]:
    """But for the semaphores of Python's own, which tests beside this one have too."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.mark.parametrize("numel", [10, BIG], ids=["small", "large"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_killed_rank_is_named_by_all_others_at_once(name: str, numel: int) -> None:
    there = files_in_memory()
    results = spawn_ranks(3, survive, name, numel, may_die=[1])
    for took, left_open in (results[0], results[2]):
        assert took < 30, "noticed by looking, not by the timeout of half an hour"
        assert left_open == 0
    assert until(lambda: files_in_memory() <= there), "tests beside this one may have some briefly"


def wait_for_works_of_a_dead_rank(meeting: Meeting) -> str:
    group = meeting.new_group("shm")
    group.barrier()
    if meeting.rank == 1:
        die()
    future = group.allreduce([torch.ones(3)]).get_future()
    work = group.all_reduce(torch.ones(BIG), async_op=True)
    with pytest.raises(PeerDiedError):
        work.wait()
    assert isinstance(work.exception(), PeerDiedError)
    with pytest.raises(RuntimeError) as caught:
        future.wait()
    return str(caught.value)


def test_a_killed_rank_ends_started_works_and_their_futures() -> None:
    assert "rank 1 died" in spawn_ranks(2, wait_for_works_of_a_dead_rank, may_die=[1])[0]


def keep_reducing_until_one_dies(meeting: Meeting, seed: int) -> list[int]:
    group = meeting.new_group("shm")
    tensor = group.allocate(BIG) if seed % 2 else torch.empty(BIG)
    tensor.zero_()
    if meeting.rank == 2:
        threading.Timer(0.01 + 0.007 * seed, die).start()
    with pytest.raises(PeerDiedError) as caught:
        while True:
            group.all_reduce(tensor)
    return list(caught.value.ranks)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_killed_in_the_middle_of_a_large_all_reduce_is_named(seed: int) -> None:
    results = spawn_ranks(4, keep_reducing_until_one_dies, seed, may_die=[2])
    assert results == [[2], [2], None, [2]]


def receive_from_the_dead(meeting: Meeting, source: int | None) -> list[int]:
    group = meeting.new_group("shm")
    group.barrier()
    if meeting.rank == 1:
        group.send(torch.arange(3.0), 0)
        die()
    got = torch.zeros(3)
    group.recv(got, source)
    assert got.tolist() == [0, 1, 2], "what was sent before the end arrives"
    with pytest.raises(PeerDiedError) as caught:
        group.recv(got, source)
    return list(caught.value.ranks)


@pytest.mark.parametrize("source", [1, None], ids=["named", "any"])
def test_receiving_from_a_dead_rank_delivers_what_it_sent_and_then_fails(
    source: int | None,
) -> None:
    assert spawn_ranks(2, receive_from_the_dead, source, may_die=[1])[0] == [1]


# -- a stopped rank ---------------------------------------------------------------------------


def outwait_a_stopped_rank(meeting: Meeting) -> str:
    group = meeting.new_group("shm")
    pids = group.all_gather_object(os.getpid())
    if meeting.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 wakes it up again
    if meeting.rank == 0:  # which must be the last to come, or the others would be late too
        shm = group._engine.shm  # type: ignore[attr-defined]
        assert until(lambda: state_of(pids[1]) == "T" and "all_reduce" in shm._position(2))
    with pytest.raises(CollectiveTimeoutError) as caught:
        group.all_reduce(torch.ones(4), timeout=4.0 if meeting.rank == 0 else 60.0)
    if meeting.rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    assert list(caught.value.ranks) == [1]
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.reporter == 0
    return str(caught.value)


def test_a_stopped_rank_is_named_at_the_timeout_of_the_call() -> None:
    first, second, third = spawn_ranks(3, outwait_a_stopped_rank)
    assert "timed out after 4 s waiting for rank 1" in first
    assert "rank 0 gave up waiting for rank 1" in second
    assert "rank 0 gave up waiting for rank 1" in third


def time_out_a_receive(meeting: Meeting) -> bool:
    group = meeting.new_group("shm")
    got = torch.zeros(2)
    if meeting.rank == 0:
        with pytest.raises(CollectiveTimeoutError) as caught:
            group.recv(got, 1, timeout=0.1)
        assert list(caught.value.ranks) == [1]
    group.barrier()  # the group goes on
    if meeting.rank == 1:
        group.send(torch.ones(2), 0)
    else:
        group.recv(got, 1)
        assert got.tolist() == [1, 1]
    group.shutdown()
    return True


def test_a_receive_that_times_out_leaves_the_group_usable() -> None:
    assert all(spawn_ranks(2, time_out_a_receive))


# -- abort and leaving ------------------------------------------------------------------------


def abort_from_another_thread(meeting: Meeting, kind: str) -> str:
    group = meeting.new_group("shm")
    group.barrier()
    if meeting.rank == 1:
        meeting.store().wait(["aborted"])
        with pytest.raises(PeerLeftError) as late:
            group.barrier()
        assert late.value.aborted
        assert list(late.value.ranks) == [0]
        return "rank 1 knows"
    inside = threading.Event()
    group.register_hooks(before=lambda call: inside.set())

    def abort() -> None:
        inside.wait()
        group.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(GroupClosedError) as caught:
        if kind == "all_reduce":
            group.all_reduce(torch.ones(5))
        else:
            group.recv(torch.ones(5), 1)
    thread.join()
    assert caught.value.aborted
    meeting.store().set("aborted", b"yes")
    with pytest.raises(GroupClosedError):
        group.barrier()
    group.shutdown()
    return "freed"


@pytest.mark.parametrize("kind", ["all_reduce", "recv"])
def test_abort_frees_a_waiting_rank_and_the_others_learn_of_it(kind: str) -> None:
    assert spawn_ranks(2, abort_from_another_thread, kind) == ["freed", "rank 1 knows"]


def leave_early(meeting: Meeting) -> str:
    group = meeting.new_group("shm")
    group.all_reduce(torch.ones(2))
    if meeting.rank == 0:
        group.shutdown()
        with pytest.raises(GroupClosedError):
            group.barrier()
        return "left"
    with pytest.raises(PeerLeftError) as caught:
        group.barrier()
    assert not caught.value.aborted
    return str(list(caught.value.ranks))


def test_waiting_for_a_rank_that_left_is_an_error_at_once() -> None:
    assert spawn_ranks(2, leave_early) == ["left", "[0]"]


def finish_one_after_the_other(meeting: Meeting) -> float:
    group = meeting.new_group("shm")
    tensor = torch.ones(BIG)
    group.all_reduce(tensor)
    group.shutdown()  # a fast rank is gone while a slow one still collects its result
    return tensor[-1].item()


def test_leaving_right_after_the_last_collective_harms_nobody() -> None:
    assert spawn_ranks(4, finish_one_after_the_other) == [4.0] * 4


# -- calls that do not match ------------------------------------------------------------------

MISMATCHES: dict[str, tuple[Collective, Collective, str, str]] = {
    "size": (
        lambda g, n: g.all_reduce(torch.ones(n)),
        lambda g, n: g.all_reduce(torch.ones(n + 1)),
        "all_reduce(10 x torch.float32, SUM)",
        "all_reduce(11 x torch.float32, SUM)",
    ),
    "dtype": (
        lambda g, n: g.all_reduce(torch.ones(n)),
        lambda g, n: g.all_reduce(torch.ones(n, dtype=torch.float64)),
        "torch.float32",
        "torch.float64",
    ),
    "reduction": (
        lambda g, n: g.all_reduce(torch.ones(n)),
        lambda g, n: g.all_reduce(torch.ones(n), ReduceOp.MAX),
        "SUM",
        "MAX",
    ),
    "operation": (
        lambda g, n: g.all_reduce(torch.ones(n)),
        lambda g, n: g.barrier(),
        "all_reduce(",
        "barrier()",
    ),
    "root": (
        lambda g, n: g.broadcast(torch.ones(n), 0),
        lambda g, n: g.broadcast(torch.ones(n), 1),
        "root 0",
        "root 1",
    ),
    "gathered size": (
        lambda g, n: g.all_gather(_per_rank(g, n), torch.ones(n)),
        lambda g, n: g.all_gather([torch.ones(n + r) for r in (0, 1, 0)], torch.ones(n + 1)),
        "40 bytes between the two",
        "44 bytes between the two",
    ),
    "splits": (
        lambda g, n: g.all_to_all_single(torch.ones(6), torch.ones(6), [2, 2, 2], [2, 2, 2]),
        lambda g, n: g.all_to_all_single(torch.ones(6), torch.ones(6), [1, 2, 3], [2, 2, 2]),
        "8 bytes between the two",
        "4 bytes between the two",
    ),
    "splits for the rank itself": (
        lambda g, n: g.all_to_all_single(torch.ones(6), torch.ones(6), [2, 2, 2], [2, 2, 2]),
        lambda g, n: g.all_to_all_single(torch.ones(6), torch.ones(6), [2, 1, 3], [2, 2, 2]),
        "",
        "",
    ),
}


def disagree(meeting: Meeting, name: str) -> str:
    group = meeting.new_group("shm")
    usual, other, _, _ = MISMATCHES[name]
    with pytest.raises(MismatchError) as caught:
        (other if meeting.rank == 1 else usual)(group, 10)
    tensor = torch.ones(BIG)
    group.all_reduce(tensor)
    assert tensor[0] == 3, "the group goes on"
    group.shutdown()
    return str(caught.value)


@pytest.mark.parametrize("name", MISMATCHES)
def test_differing_calls_are_an_error_on_every_rank_that_names_both_sides(name: str) -> None:
    _, _, one, another = MISMATCHES[name]
    for rank, text in enumerate(spawn_ranks(3, disagree, name)):
        assert text.startswith(f"rank {rank}: ")
        assert one in text
        assert another in text
        assert "rank 1 called" in text


def send_what_does_not_fit(meeting: Meeting) -> str:
    group = meeting.new_group("shm")
    if meeting.rank == 0:
        group.send(torch.ones(3), 1)
        group.barrier()
        with pytest.raises(MismatchError) as caught:
            group.send(torch.ones(4), 1)
        group.send(torch.ones(4), 1)
    else:
        got = torch.zeros(4)
        with pytest.raises(MismatchError) as caught:
            group.recv(got, 0)
        assert got.tolist() == [0, 0, 0, 0]
        group.barrier()
        group.recv(got, 0)
        assert got.tolist() == [1, 1, 1, 1]
    group.shutdown()
    return str(caught.value)


def test_a_message_that_does_not_fit_is_an_error_at_both_ends() -> None:
    for text in spawn_ranks(2, send_what_does_not_fit):
        assert "rank 0 called send(12 bytes" in text
        assert "rank 1 called recv(16 bytes" in text


# -- a death is noticed before the memory of the dead is freed ----------------------------------


def know_by_the_futex_alone(meeting: Meeting, kind: str) -> list[int]:
    descriptor = os.pidfd_open(os.getpid())
    os.pidfd_open = lambda pid, flags=0: os.dup(descriptor)  # type: ignore[assignment]  # lives
    group = meeting.new_group("shm")
    others: list[Group | None] = []
    if meeting.rank == 1:  # neither a thread that ends is a death, nor a group that ends
        thread = threading.Thread(target=lambda: others.append(group.split([1])))
        thread.start()
        thread.join()
        others.append(group.split([1]))
        assert others[0] is not None
        others[0].shutdown()
        if os.fork() == 0:
            os._exit(0)  # nor is the end of a child
        os.wait()
    for _ in range(3):
        group.barrier()
    if meeting.rank == 1:
        die()
    with pytest.raises(PeerDiedError) as caught:
        if kind == "recv":
            group.recv(torch.ones(5), 1, timeout=20)
        else:
            group.barrier(timeout=120)
    return list(caught.value.ranks)


@pytest.mark.parametrize("kind", ["barrier", "recv"])
def test_a_death_is_told_by_a_word_in_shared_memory(kind: str) -> None:
    results = spawn_ranks(3, know_by_the_futex_alone, kind, may_die=[1])
    assert results == [[1], None, [1]]


# -- nothing is left behind -------------------------------------------------------------------


def come_and_go(meeting: Meeting, there: set[str]) -> tuple[int, bool]:
    meeting.new_group("shm").shutdown()  # what is opened once, such as the random source
    before = open_files()
    for _ in range(3):
        group = meeting.new_group("shm")
        kept = group.allocate(1000)
        group.all_reduce(torch.ones(BIG), async_op=True).wait()
        group.shutdown()
        kept.fill_(1)  # memory outlives the group
    return still_open(before), until(lambda: files_in_memory() <= there)


def test_a_group_leaves_no_descriptor_and_no_file() -> None:
    assert spawn_ranks(2, come_and_go, files_in_memory()) == [(0, True)] * 2


def interrupt_a_wait(_: int, frame: FrameType | None) -> None:
    """Raise as Ctrl-C does once the engine waits; before that, ring again."""
    if frame and frame.f_code is Shm._finish.__code__:
        raise KeyboardInterrupt
    signal.setitimer(signal.ITIMER_REAL, 0.05)


def be_interrupted(meeting: Meeting) -> str:
    group = meeting.new_group("shm")
    group.barrier()
    if meeting.rank == 0:
        signal.signal(signal.SIGALRM, interrupt_a_wait)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            group.all_reduce(torch.ones(2))
        return "interrupted"
    with pytest.raises(PeerLeftError) as caught:
        group.recv(torch.ones(1), 0)
    return str(caught.value)


def test_an_interrupt_gets_through_and_frees_the_others() -> None:
    first, second = spawn_ranks(2, be_interrupted)
    assert first == "interrupted"
    assert "rank 0 aborted the group" in second
