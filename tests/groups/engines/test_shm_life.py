"""Threads, finalizers and the ends of an shm group: nobody is stuck, nobody loses memory."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import threading

import pytest
import torch

from paceline import DistributedDataParallel
from paceline.errors import GroupError, PeerLeftError
from paceline.testing import Meeting, spawn_ranks
from tests.waiting import until


class Knot:
    """Memory of a group that only the garbage collector frees."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.own = memory, self


def collect_all_the_time() -> None:
    """Have finalizers run everywhere, also inside the allocator."""
    gc.freeze()
    gc.set_threshold(5)


def allocate_and_drop_in_cycles(meeting: Meeting) -> int:
    with meeting.new_group("shm") as group:
        collect_all_the_time()
        for _ in range(2000):
            Knot(group.allocate(100))
        gc.collect()
        return int(group._engine.shm._resources.segment.heap.used)


def test_memory_dropped_in_cycles_is_freed_while_more_is_taken() -> None:
    assert spawn_ranks(1, allocate_and_drop_in_cycles) == [0]


def wrap_one_model_after_another(meeting: Meeting) -> None:
    with meeting.new_group("shm") as group:
        collect_all_the_time()
        for _ in range(25):
            model = DistributedDataParallel(torch.nn.Linear(20, 20), process_group=group)
            model(torch.ones(2, 20)).sum().backward()


def test_a_script_may_wrap_one_model_after_another() -> None:
    spawn_ranks(2, wrap_one_model_after_another)


# -- the end, with threads inside ---------------------------------------------------------------


def shut_down_under_a_thread(meeting: Meeting, kind: str) -> str:
    group = meeting.new_group("shm")
    group.barrier()
    store, told = meeting.store(), list[BaseException]()
    if meeting.rank == 1:
        store.wait(["over"])
        group.shutdown()
        return "GroupClosedError"
    entered = threading.Event()

    def wait_for_ever() -> None:
        entered.set()
        try:
            if kind == "recv":
                group.recv(torch.ones(5), 1)
            else:
                group.all_reduce(torch.ones(100_000))
        except GroupError as error:
            told.append(error)

    thread = threading.Thread(target=wait_for_ever)
    thread.start()
    entered.wait()
    thread.join(0.05)  # most times it is inside by then; either way must be right
    group.shutdown()
    thread.join()
    store.set("over", "yes")
    return type(told[0]).__name__


@pytest.mark.parametrize("kind", ["all_reduce", "recv"])
def test_shutdown_frees_a_thread_that_waits_in_the_group(kind: str) -> None:
    for _ in range(3):
        results = spawn_ranks(2, shut_down_under_a_thread, kind)
        assert results == ["GroupClosedError"] * 2


def shut_down_under_many(meeting: Meeting) -> int:
    """Threads that come and go while the group ends; none may touch what is gone."""
    group = meeting.new_group("shm")
    refused = []

    def keep_calling() -> None:
        try:
            while True:
                group.send(torch.ones(5), 1 - meeting.rank)
                group.recv(torch.ones(5), 1 - meeting.rank)
                group.progress()
        except GroupError as error:
            refused.append(error)

    threads = [threading.Thread(target=keep_calling) for _ in range(4)]
    for thread in threads:
        thread.start()
    group.barrier()
    group.shutdown()
    for thread in threads:
        thread.join()
    return len(refused)


def test_threads_that_call_while_the_group_ends_are_refused() -> None:
    assert spawn_ranks(2, shut_down_under_many) == [4, 4]


def leave_with_a_thread_inside(meeting: Meeting) -> None:
    """What a script does that ends while a daemon thread of its own waits in the group.

    A thread that is inside one of torch's own operations, such as ``torch.ones``, then ends the
    process with SIGABRT, so it must have left the last one before.
    """
    group = meeting.new_group("shm")
    group.barrier()
    tensor = torch.ones(100_000)
    thread = threading.Thread(target=lambda: group.all_reduce(tensor), daemon=True)
    thread.start()
    assert until(lambda: innermost(thread) == "_finish")  # …of the transport, where it waits


def innermost(thread: threading.Thread) -> str:
    """The function that a thread is in."""
    return sys._current_frames()[thread.ident or 0].f_code.co_name


def end_an_interpreter(meeting: Meeting, turn: int) -> int | str:
    here = Meeting(meeting.rank, meeting.size, f"{meeting.store_path}-{turn}")
    if meeting.rank == 1:
        group = here.new_group("shm")
        group.barrier()
        with pytest.raises(PeerLeftError) as caught:
            group.recv(torch.ones(1), 0)
        return type(caught.value).__name__
    child = os.fork()
    if child == 0:
        threading.excepthook = lambda args: None  # the daemon thread fails, as it should
        leave_with_a_thread_inside(here)
        ctypes.pythonapi.Py_Exit(0)
    return os.waitpid(child, 0)[1]


def test_the_interpreter_ends_in_peace_with_a_daemon_thread_in_a_collective() -> None:
    for turn in range(2):
        assert spawn_ranks(2, end_an_interpreter, turn) == [0, "PeerLeftError"]


# -- core files -----------------------------------------------------------------------------------


def mappings_in_a_core_file(meeting: Meeting) -> tuple[int, int]:
    with meeting.new_group("shm") as group:
        group.barrier()
        with open("/proc/self/smaps") as file:
            parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", file.read(), flags=re.MULTILINE)
        ours = [part.split("VmFlags:")[1].split() for part in parts if "memfd:paceline" in part]
        group.barrier()
    return len(ours), sum("dd" not in flags for flags in ours)


def test_a_core_file_has_the_memory_of_its_own_rank_alone() -> None:
    assert spawn_ranks(3, mappings_in_a_core_file) == [(3, 1)] * 3
