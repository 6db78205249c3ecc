"""A forked child neither frees nor writes what is its parent's, and keeps no dead parent alive."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline import DistributedDataParallel, Group
from paceline.errors import ForkedError, PeerDiedError
from paceline.optim import ZeroRedundancyOptimizer
from paceline.testing import Meeting, run_ranks, spawn_ranks

NUMEL = 1_000_000


def in_child(act: Callable[[], object]) -> int:
    """Run ``act`` in a forked child that ends as ``sys.exit`` does; its status."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr)
            os._exit(1)
        ctypes.pythonapi.Py_Exit(0)
    return os.waitpid(child, 0)[1]


# -- memory -------------------------------------------------------------------------------------


def hold_memory_while_a_child(meeting: Meeting, what: str) -> None:
    with meeting.new_group("shm") as group:
        held = {"tensor": group.allocate(NUMEL).fill_(3)}
        address = held["tensor"].data_ptr()

        def write() -> None:
            assert held["tensor"].sum() == 3 * NUMEL  # it can be read, and is the child's to write
            held["tensor"].zero_()
            assert held["tensor"].sum() == 0

        def drop() -> None:
            held.clear()
            gc.collect()

        def write_in_c() -> None:
            ctypes.memset(address, 0, 4 * NUMEL)

        assert in_child({"writes": write, "drops": drop, "writes in C": write_in_c}[what]) == 0
        assert (held["tensor"] == 3).all()
        assert group.allocate(NUMEL).data_ptr() != address
        group.all_reduce(held["tensor"])
        assert (held["tensor"] == 3 * meeting.size).all()


@pytest.mark.parametrize("what", ["writes", "drops", "writes in C"])
def test_what_a_child_does_to_allocated_memory_is_its_own_affair(what: str) -> None:
    spawn_ranks(2, hold_memory_while_a_child, what)


def fork_below_python(meeting: Meeting) -> None:
    with meeting.new_group("shm") as group:
        tensor = group.allocate(NUMEL).fill_(3)
        libc = ctypes.PyDLL(None)
        child = libc.fork()
        if child == 0:
            libc.memset(ctypes.c_void_p(tensor.data_ptr()), 0, ctypes.c_size_t(4 * NUMEL))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (tensor == 3).all()
        ran = subprocess.run(
            [sys.executable, "-S", "-c", ""], preexec_fn=tensor.zero_, check=False, timeout=300
        )
        assert ran.returncode == 0
        assert (tensor == 3).all()


def test_forks_that_python_does_not_see_are_covered() -> None:
    spawn_ranks(1, fork_below_python)


class Loading:
    """A dataset whose workers do to the model what they can."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        self.model.zero_grad(set_to_none=False)
        for parameter in self.model.parameters():
            parameter.data.zero_()
        return torch.ones(1)


def train_with_workers(meeting: Meeting, sharded: bool) -> None:
    with meeting.new_group("shm") as group:
        model = DistributedDataParallel(torch.nn.Linear(300, 300), process_group=group)
        if sharded:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, ddp=model, lr=0.1
            )
        model(torch.ones(1, 300)).sum().backward()
        if sharded:
            optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        list(DataLoader(Loading(model), num_workers=2, multiprocessing_context="fork"))
        assert all(map(torch.equal, before, model.parameters()))
        now = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, grads, now))
        model(torch.ones(1, 300)).sum().backward()


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "ZeRO"])
def test_workers_of_a_data_loader_leave_weights_and_gradients_alone(sharded: bool) -> None:
    spawn_ranks(2, train_with_workers, sharded)


# -- calls --------------------------------------------------------------------------------------


def use_a_group_in_a_child(meeting: Meeting, backend: str) -> None:
    with meeting.new_group(backend) as group:
        started = group.all_reduce(torch.ones(10), async_op=True)
        started.wait()

        def use() -> None:
            calls: list[Callable[[], object]] = [
                group.barrier,
                lambda: group.all_reduce(torch.ones(5), async_op=True),
                lambda: group.send(torch.ones(5), 1 - meeting.rank),
                lambda: group.allocate(5),
                lambda: group.split([meeting.rank]),
                lambda: group.reconfigure([meeting.rank]),
                lambda: group.monitored_barrier(),
            ]
            for call in calls:
                with pytest.raises(ForkedError, match="forked from rank"):
                    call()
            assert group.rank() == meeting.rank
            group.abort()
            group.shutdown()

        assert in_child(use) == 0
        total = torch.ones(100_000)
        group.all_reduce(total)
        assert total[0] == meeting.size


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_child_that_uses_its_parents_group_is_refused_and_disturbs_nobody(backend: str) -> None:
    spawn_ranks(2, use_a_group_in_a_child, backend)


def fork_in_the_middle(meeting: Meeting) -> None:
    """The child is forked while another operation holds whatever locks it holds."""
    with meeting.new_group("shm") as group:
        works = [group.all_reduce(torch.ones(200_000), async_op=True) for _ in range(20)]

        def use() -> None:
            signal.alarm(120)
            for work in works:
                with suppress(ForkedError):
                    work.wait()
                assert work.is_completed()
            group.progress()

        assert in_child(use) == 0
        for work in works:
            work.wait()


def test_a_child_forked_in_the_middle_of_collectives_does_not_hang() -> None:
    spawn_ranks(2, fork_in_the_middle)


def test_a_group_of_threads_knows_its_children_too() -> None:
    def one_rank(group: Group) -> int:
        status = 0
        if group.rank() == 0:
            child = os.fork()
            if child == 0:
                with suppress(ForkedError):
                    group.barrier()
                    os._exit(1)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
        group.barrier()
        return status

    assert run_ranks(2, one_rank) == [0, 0]


# -- a dead parent ------------------------------------------------------------------------------


def no_pidfd(pid: int, flags: int = 0) -> int:
    raise OSError  # an old kernel


def die_with_a_child_alive(meeting: Meeting, pidfd: bool) -> list[int]:
    if not pidfd:
        os.pidfd_open = no_pidfd
    reader, writer = os.pipe()
    group = meeting.new_group("shm")
    if meeting.rank == 1:
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent's end is closed, and then until the test is over
            meeting.store().wait(["over"])
            os._exit(0)
        group.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    with pytest.raises(PeerDiedError) as caught:
        group.barrier()
    meeting.store().set("over", "yes")  # only now the child ends
    return list(caught.value.ranks)


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "socket"])
def test_a_child_that_lives_on_does_not_keep_its_dead_parent_alive(pidfd: bool) -> None:
    found = spawn_ranks(2, die_with_a_child_alive, pidfd, may_die=[1])
    assert found == [[1], None]
