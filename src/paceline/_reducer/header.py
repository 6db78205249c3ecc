"""The header: a few numbers that ride behind the gradients of the last bucket.

It is reduced as they are, so it costs no collective of its own. After the reduction every rank
knows the mean weight of the ranks, whether one is in trouble or has gradients that came too late,
which ranks were active and which only stood in, and of each parameter on how many ranks a gradient
reached it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..recorder import events
from .bucket import Bucket
from .dividing import FIXED, Divider

_IDLE = 2.0**-20  # above zero, and too little to count as use
_UNTOLD = -1.0  # what no header says of weights


def length(ranks: int, params: int) -> int:
    """How many elements a header for so many ranks and parameters has."""
    return FIXED + ranks + params


def can_ride(dtype: torch.dtype) -> bool:
    """Whether numbers of ``dtype`` hold a weight; in 16 bits a count of tokens would be rounded."""
    return dtype in (torch.float32, torch.float64)


@dataclass(frozen=True)
class Header:
    """What the ranks tell each other, after the reduction."""

    weight: float  # mean over ranks
    trouble: bool
    late: bool
    weighted: bool  # weights count; otherwise it is a plain mean
    active: list[float]  # for each rank, above zero unless it stood in; less if it only owed
    shares: list[float]  # for each parameter, the mean of what ranks said

    @classmethod
    def read(cls, memory: Tensor, ranks: int) -> Header:
        """From the reduced elements; waits for the device they are on."""
        values = memory.tolist()
        trouble, late, weighted = (value > 0 for value in values[1:FIXED])
        start = FIXED + ranks
        active, shares = values[FIXED:start], values[start:]
        return cls(values[0], trouble, late, weighted, active, shares)

    @property
    def counts_nothing(self) -> bool:
        """Whether ranks gave weights, all of them 0."""
        return self.weighted and self.weight == 0

    def active_ranks(self) -> list[int]:
        """Those that had a pass of their own."""
        return [rank for rank, share in enumerate(self.active) if share > 0]

    def stepping_ranks(self) -> list[int]:
        """Those of the active ones that go on; those that gave what they owed, if there are none.

        A rank that has run out may still owe what it gathered before.
        """
        most = max(self.active)
        return [rank for rank in self.active_ranks() if self.active[rank] > 0.75 * most]

    def present(self, number: int) -> bool:
        """Whether any rank had something to give for a parameter."""
        return self.shares[number] > 0

    def used(self, ranks: int) -> list[int]:
        """For each parameter, how many ranks' graphs reached it in this pass."""
        return [round(share * ranks) for share in self.shares]


@dataclass(frozen=True)
class Said:
    """One rank's part of a header."""

    active: int | None = None  # this rank, unless it only stands in
    weight: float = 1.0
    trouble: bool = False
    late: bool = False
    weighted: bool = False
    owing: bool = False  # it has run out
    absent: Collection[int] = ()  # parameters that have no gradient
    idle: Collection[int] = ()  # have one that this pass did not touch

    @property
    def usual(self) -> bool:
        """Whether nothing is special about this pass."""
        special = self.trouble or self.late or self.weighted or self.absent or self.idle
        return self.active is not None and not special and not self.owing


def write(memory: Tensor, said: Said, scale: float, ranks: int) -> None:
    """Write it; ``scale`` is the factor by which gradients are multiplied for the mean."""
    memory.fill_(scale)
    start = FIXED + ranks
    fixed = torch.zeros(start, dtype=memory.dtype)
    first = [said.weight, said.trouble, said.late, said.weighted]
    fixed[:FIXED] = torch.tensor(first, dtype=memory.dtype) * scale
    if said.active is not None:
        fixed[FIXED + said.active] = 0.5 if said.owing else 1.0
    memory[:start].copy_(fixed)
    for numbers, value in ((said.absent, 0.0), (said.idle, _IDLE * scale)):
        if numbers:
            where = torch.tensor(sorted(numbers), device=memory.device) + start
            memory.index_fill_(0, where, value)


@dataclass(eq=False)
class Kept:
    """What ranks said in a pass, on its way from the device."""

    copy: Tensor
    event: torch.cuda.Event | None
    unit: float  # of the weights in it
    entry: events.Entry | None = None  # the call that has come when it has
    header: Header | None = None  # once somebody has waited for it
    heard: bool = False  # somebody was told if a rank could not go on

    def is_completed(self) -> bool:
        """Whether the device has got that far.

        Looks at memory: to ask the device would disturb a graph that somebody captures.
        """
        return self.event is None or float(self.copy[FIXED - 1]) != _UNTOLD

    def wait(self) -> None:
        """Until it has."""
        if self.event is not None:
            self.event.synchronize()
        if self.entry is not None:
            self.entry.finished = self.entry.finished or events.now()


class Mailbox:
    """Writes headers quickly, and reads them when that need not stop a device."""

    def __init__(self) -> None:
        self.told: Header | None = None  # what the ranks said in the last pass, once it is known
        self.by_active = False  # a plain mean is one over the ranks that are active
        self._usual = torch.empty(0)  # the header of a pass in which nothing is special
        self._latest: tuple[Tensor, Header] | None = None  # read last: mostly it comes again
        self._kept: Kept | None = None  # of the last pass
        self.lost: Exception | None = None  # why what comes from the device means nothing any more
        # Where headers land that are read later; each is read before the next one leaves.
        self._landing: tuple[Tensor, torch.cuda.Event | None] = torch.empty(0), None
        self._divider = Divider()

    def write(self, memory: Tensor, said: Said, scale: float, ranks: int) -> None:
        """Say this rank's part; what is usual is kept ready."""
        if not said.usual:
            write(memory, said, scale, ranks)
            return
        if self._usual.dtype != memory.dtype or self._usual.shape != memory.shape:
            self._usual = torch.empty_like(memory)
            write(self._usual, said, scale, ranks)
        memory.copy_(self._usual)

    def read(self, memory: Tensor, ranks: int) -> Header:
        """What the ranks said; waits for the device it is on."""
        if memory.is_cuda:
            return Header.read(memory, ranks)
        return self._parsed(memory, ranks)

    def _parsed(self, memory: Tensor, ranks: int) -> Header:
        latest = self._latest
        if latest is None or latest[0].dtype != memory.dtype or not torch.equal(latest[0], memory):
            copy = torch.empty_like(memory).copy_(memory)
            latest = self._latest = copy, Header.read(memory, ranks)
        return latest[1]

    def keep(self, memory: Tensor, unit: float) -> Kept:
        """Let :meth:`earlier` have what the ranks said, once the device has got that far."""
        copy, event = self._landing
        if copy.dtype != memory.dtype or copy.shape != memory.shape:
            copy = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=memory.is_cuda)
            event = torch.cuda.Event() if memory.is_cuda else None
            self._landing = copy, event
        if event is not None:
            copy[FIXED - 1] = _UNTOLD
        copy.copy_(memory, non_blocking=True)
        if event is not None:
            event.record(torch.cuda.current_stream(memory.device))
        self._kept = Kept(copy, event, unit)
        return self._kept

    def divide(self, buckets: Sequence[Bucket], memory: Tensor, ranks: int) -> None:
        """Divide means as the ranks said, on their device; what they said need not be read."""
        self._divider.divide(buckets, memory, ranks, by_active=self.by_active)

    def earlier(self, ranks: int) -> Kept | None:
        """What was kept of the last pass, with its header; waits for the device."""
        kept = self._kept
        if kept is not None and kept.header is None:
            kept.wait()
            if self.lost is not None:
                raise self.lost
            kept.header = self._parsed(kept.copy, ranks)
        return kept

    @property
    def is_read(self) -> bool:
        """Whether what ranks said in the last pass is known here."""
        return self._kept is None or self._kept.heard

    def has_failed(self, ranks: int) -> bool:
        """Whether a rank could not go on in the last pass and nobody was told; waits as well."""
        kept = self.earlier(ranks)
        if kept is None or kept.header is None or kept.heard:
            return False
        kept.heard = True
        return kept.header.trouble or kept.header.late

    def note_heard(self) -> None:
        """Somebody was told whether a rank could not go on; weights may still be asked for."""
        if self._kept is not None:
            self._kept.heard = True

    def forget(self) -> None:
        """What was kept is known."""
        self._kept = None

    def successor(self) -> Mailbox:
        """One for other parameters, under the same rules."""
        heir = Mailbox()
        heir.told, heir.by_active = self.told, self.by_active
        return heir

    def begin_anew(self) -> None:
        """Start over with headers of another layout; the mailbox object stays the same."""
        self._usual, self._latest, self._kept = torch.empty(0), None, None
