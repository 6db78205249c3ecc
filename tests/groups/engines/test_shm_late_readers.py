"""A rank that reads the memory of others after they have given up gets an error, not their data."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import Group
from paceline.errors import CollectiveTimeoutError
from paceline.testing import Meeting, spawn_ranks
from tests.waiting import until

from .test_shm_late_writers import state_of

NUMEL = 300_000  # elements: too many for a slot, so they are read where they lie

# Each of them has rank 1 read what is in `shared` of rank 0.
READS: dict[str, Callable[[Group, Tensor, float], object]] = {
    "broadcast": lambda g, shared, timeout: g.broadcast(shared, 0, timeout),
    "all_gather": lambda g, shared, timeout: g.all_gather_single(
        torch.empty(2 * NUMEL), shared, timeout
    ),
    "reduce_scatter": lambda g, shared, timeout: g.reduce_scatter_single(
        torch.empty(NUMEL // 2), shared, timeout=timeout
    ),
    "all_to_all": lambda g, shared, timeout: g.all_to_all_single(
        torch.empty(NUMEL), shared, timeout=timeout
    ),
}


def read_late(meeting: Meeting, name: str) -> int:
    group, store = meeting.new_group("shm"), meeting.store()
    shared = group.allocate(NUMEL).fill_(1)
    pids: list[Any] = group.all_gather_object(os.getpid())
    pid = pids[1]
    group.barrier()
    if meeting.rank == 0:
        shm = group._engine.shm  # type: ignore[attr-defined]
        assert until(lambda: name in shm._position(1))
        os.kill(pid, signal.SIGSTOP)
        assert until(lambda: state_of(pid) == "T")
    with pytest.raises(CollectiveTimeoutError) as caught:
        READS[name](group, shared, 0.5 if meeting.rank == 0 else 60.0)
    if meeting.rank == 0:
        shared.fill_(-1)  # it is used for something else
        os.kill(pid, signal.SIGCONT)
    assert list(caught.value.ranks) == [1]
    store.set(f"{meeting.rank} knows", "yes")
    store.wait(["0 knows", "1 knows"])  # or the one that leaves first would be the reason
    return caught.value.reporter


@pytest.mark.parametrize("name", READS)
def test_what_is_read_after_its_owner_gave_up_is_an_error(name: str) -> None:
    assert spawn_ranks(2, read_late, name) == [0, 0]
