"""A rank that was stopped inside an all-reduce cannot write to the others once they went on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from paceline import DistributedDataParallel, Group
from paceline.errors import CollectiveTimeoutError, GroupError
from paceline.testing import Meeting, spawn_ranks
from tests.waiting import until

NUMEL = 300_000
STOPPED = 1


def stop_inside(group: Group, meeting: Meeting) -> None:
    """Stop a rank once it is inside an all-reduce for which the last rank has not come yet."""
    shm = group._engine.shm  # type: ignore[attr-defined]
    pid = int(meeting.store().get("pid"))
    assert until(lambda: "all_reduce" in shm._position(STOPPED))
    os.kill(pid, signal.SIGSTOP)
    assert until(lambda: state_of(pid) == "T")
    meeting.store().set("stopped", "yes")


def state_of(pid: int) -> str:
    """As the kernel calls it: T is stopped."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def let_it_go_on(meeting: Meeting, values: Callable[[], list[Tensor]]) -> bool:
    """Wake the stopped rank; whether its end of the all-reduce leaves ``values`` alone."""
    before = [value.clone() for value in values()]
    store = meeting.store()
    if meeting.rank == 0:
        os.kill(int(store.get("pid")), signal.SIGCONT)
    store.wait(["gone on"])
    return all(map(torch.equal, before, values()))


def reduce_with_a_stopped_rank(meeting: Meeting) -> bool:
    group, store = meeting.new_group("shm"), meeting.store()
    neighbours = [group.allocate(100).fill_(7) for _ in range(2)]
    tensor = group.allocate(NUMEL).fill_(meeting.rank + 1)
    neighbours.append(group.allocate(100).fill_(7))
    if meeting.rank == STOPPED:
        store.set("pid", str(os.getpid()))
    group.barrier()
    if meeting.rank == STOPPED:
        group.all_reduce(tensor)
        store.set("gone on", "yes")
        return True
    if meeting.rank == 2:
        store.wait(["stopped"])
    # The rank that comes last gives up first: then all that must happen before has happened.
    work = group.all_reduce(tensor, async_op=True, timeout=4.0 if meeting.rank == 2 else 60.0)
    if meeting.rank == 0:
        stop_inside(group, meeting)
    with pytest.raises(CollectiveTimeoutError):
        work.wait()
    tensor[NUMEL // 2 :] = -1.0  # half of it is used again before the group goes on
    group.reconfigure([0, 2])
    unharmed = let_it_go_on(meeting, lambda: [tensor])
    assert (tensor[NUMEL // 2 :] == -1).all()
    assert all((t == 7).all() for t in neighbours)
    tensor.fill_(1)
    group.all_reduce(tensor)
    assert (tensor == 2).all()
    group.shutdown()
    return unharmed


def test_a_stopped_rank_that_goes_on_leaves_the_tensors_of_the_others_alone() -> None:
    assert spawn_ranks(3, reduce_with_a_stopped_rank) == [True, True, True]


def train_with_a_stopped_rank(meeting: Meeting) -> bool:
    group, store = meeting.new_group("shm"), meeting.store()
    model = DistributedDataParallel(torch.nn.Linear(300, 300), process_group=group)
    given = torch.full((2, 300), float(meeting.rank))
    for _ in range(2):  # then the plan stays
        model.zero_grad()
        model(given).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 2  # stretches of the bucket that the next pass reduces
    if meeting.rank == STOPPED:
        store.set("pid", str(os.getpid()))
    loss = model(given).sum()
    group.barrier()
    if meeting.rank == STOPPED:
        with suppress(GroupError):  # the next bucket's is not completed by anybody
            loss.backward()
        store.set("gone on", "yes")
        return True
    group.set_timeout(4.0 if meeting.rank == 2 else 60.0)
    watching = threading.Thread(target=stop_inside, args=(group, meeting))
    if meeting.rank == 0:
        watching.start()
    else:
        store.wait(["stopped"])
    with pytest.raises(CollectiveTimeoutError):
        loss.backward()
    if meeting.rank == 0:
        watching.join()
    group.reconfigure([0, 2], timeout=timedelta(minutes=1))
    unharmed = let_it_go_on(meeting, lambda: gradients)
    group.shutdown()
    return unharmed


def test_gradients_of_a_wrapped_model_do_not_change_under_the_user() -> None:
    assert spawn_ranks(3, train_with_a_stopped_rank) == [True, True, True]
