"""What ranks must have in common to share memory, and how they come to it.

CPU affinity, limits, page size, the environment, the library: each rank finds its own. Nothing that
two ranks must do alike may follow from those alone, or they read each other's memory wrongly and
notice nothing. So every rank tells what it can do (:class:`Wish`), all ranks get all wishes, and
:func:`settle` makes :class:`Terms` of them: a pure function, the same answer everywhere. What
cannot be settled is an error on every rank that says who differs.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import DisagreementError, RankUnableError

PAGE = 65536  # sizes in shared memory are multiples of it, whatever the system's pages are
_LIMITED_HEAP = 64 << 20  # bytes, where address space is limited


class Wish(msgspec.Struct, frozen=True):
    """What one rank can do, and what it was asked to."""

    build: str  # of paceline and its library; ranks must have the same
    cores: int  # that it may run on
    heap: int  # bytes that it can have of every rank's memory, beside what the engine needs
    window: int  # bytes per step that the user asked for; 0: any
    unable: str = ""  # why it cannot share memory; empty when it can


@dataclass(frozen=True)
class Terms:
    """What all ranks go by."""

    cores: int
    heap: int
    window: int


def settle(wishes: Sequence[Wish], rank: int) -> Terms:
    """The terms that every rank can keep; the same on every rank, or an error on every rank."""
    refuse_unable({r: wish.unable for r, wish in enumerate(wishes)}, rank)
    compare("the build of paceline", {r: w.build for r, w in enumerate(wishes)}, rank)
    compare("window=", {r: str(w.window) for r, w in enumerate(wishes)}, rank)
    return Terms(
        cores=min(w.cores for w in wishes),
        heap=min(w.heap for w in wishes) // PAGE * PAGE,
        window=wishes[0].window,
    )


def refuse_unable(reasons: Mapping[int, str], rank: int, backend: str = "shm") -> None:
    """Raise for the first rank that has a reason; the same on every rank."""
    for culprit, reason in sorted(reasons.items()):
        if reason:
            raise RankUnableError(backend, reason, rank, culprit=culprit)


def compare(what: str, values: Mapping[int, str], rank: int) -> None:
    """Raise unless all ranks have the same; the same on every rank."""
    if len(set(values.values())) > 1:
        raise DisagreementError(
            f"the ranks of the group differ in {what}, so it was opened on none of them",
            "Give every rank the same.",
            rank,
            what=what,
            values=dict(sorted(values.items())),
        )


# What this process may use.


def heap_limit(fixed: int, size: int) -> int:
    """Bytes for shared tensors in each rank's memory: address space, not memory.

    ``fixed`` is what the engine needs of each of the ``size`` segments that this process maps.
    Below zero where not even that is there.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    heap = min(memory, (16 << 40) // size)
    if (file := _soft(resource.RLIMIT_FSIZE)) is not None:
        heap = min(heap, file - fixed)
    if (room := address_space_left()) is not None:  # half of it, since others want some too
        heap = min(heap, _LIMITED_HEAP, room // 2 // size - fixed)
    return heap // PAGE * PAGE


def shortage(fixed: int, size: int) -> str:
    """Which limit of this process keeps it from sharing memory with ``size`` ranks, if any."""
    needed = 3 * size + 5  # at the meeting: connections, memory and lives of all others
    if (left := descriptors_left()) < needed:
        limit = _soft(resource.RLIMIT_NOFILE)
        return f"it has {left} file descriptors left (of {limit}: ulimit -n) and needs {needed}"
    file = _soft(resource.RLIMIT_FSIZE)
    if file is not None and file < fixed:
        return f"its files may have {file} bytes (ulimit -f) and shared memory needs {fixed}"
    room = address_space_left()
    if room is not None and room // 2 < fixed * size:
        return (
            f"it has {room} bytes of address space left (ulimit -v); twice the "
            f"{fixed * size} of shared memory are needed"
        )
    return ""


def descriptors_left() -> int:
    """How many files this process may still open."""
    limit = _soft(resource.RLIMIT_NOFILE)
    if limit is None:
        return 1 << 20
    try:
        opened = len(os.listdir("/proc/self/fd")) - 1  # one is that of the folder itself
    except OSError:
        return 0
    return max(limit - opened, 0)


def address_space_left() -> int | None:
    """Bytes this process may still map; None when nothing limits it."""
    limit = _soft(resource.RLIMIT_AS)
    if limit is None:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return max(limit - pages * os.sysconf("SC_PAGE_SIZE"), 0)


def _soft(which: int) -> int | None:
    limit, _ = resource.getrlimit(which)
    return None if limit == resource.RLIM_INFINITY else limit
