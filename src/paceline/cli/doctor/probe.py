"""Do two processes on this machine reach each other, and how fast? An all-reduce over each engine.

The sums are checked. A try has a deadline, and what it fails with is told in one line.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch

from ...errors import RanksFailedError
from ...groups import Group
from ...testing import Meeting, spawn_ranks
from ..failures import reason_of

RANKS = 2
SMALL, LARGE = 4 << 10, 16 << 20  # bytes
SECONDS = 0.4  # for each size
MOST = 200  # calls of each size
PATIENCE = 10.0  # seconds that ranks wait for each other
DEADLINE = 40.0  # seconds for a try in all
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Probe:
    """The result of one try."""

    asked: str  # for the backend of that name
    backend: str  # and got this one
    ok: bool
    error: str = ""  # why not, in one line
    microseconds: float = 0.0  # of an all-reduce of 4 KiB
    gigabytes_per_second: float = 0.0  # of one of 16 MiB: its bytes by its time


def probe(backend: str, env: Mapping[str, str] | None = None) -> Probe:
    """All-reduce between two new processes."""
    try:
        told = spawn_ranks(RANKS, measure, backend, PATIENCE, deadline=DEADLINE, env=env)
    except RanksFailedError as error:
        return Probe(backend, "", False, reason_of(error))
    name, small, large = told[0]
    return Probe(backend, name, True, "", 1e6 * small, LARGE / large / 1e9)


def measure(meeting: Meeting, backend: str, patience: float) -> tuple[str, float, float]:
    """One rank's part: the backend it got, and seconds of a small and of a large all-reduce."""
    with meeting.new_group(backend, timeout=timedelta(seconds=patience)) as group:
        small, large = (_seconds(group, size) for size in (SMALL, LARGE))
        group.barrier()  # nobody leaves while the other is still in its last call
        return group.backend, small, large


def _seconds(group: Group, size: int) -> float:
    tensor = group.allocate(size // 4)
    tensor.fill_(group.rank() + 1)
    group.all_reduce(tensor)
    if not bool((tensor == 3).all()):
        raise ArithmeticError(f"1 + 2 came out as {tensor[tensor != 3][0].item():g}")
    taken: list[float] = []
    go_on, until = torch.ones(1), time.perf_counter() + SECONDS
    while go_on.item():
        tensor.fill_(0.0)
        began = time.perf_counter()
        group.all_reduce(tensor)
        taken.append(time.perf_counter() - began)
        go_on.fill_(len(taken) < MOST and time.perf_counter() < until)
        group.broadcast(go_on)  # rank 0 says when it is enough
    return statistics.median(taken)
