"""CodedInTwoStages: a coded exchange whose bytes do not grow with the number of ranks.

Every rank averages one part of the buffer. The parts go there encoded, are decoded and added up in
full precision, and their means go to all ranks, encoded again. A rank sends about twice what it
encodes, where gathering sends it to each of the others. What the second encoding loses is kept, if
at all, by the rank that did it.

The second stage is a collective that begins when the first is awaited. So all ranks must wait in
the same order, which is so when nothing is in flight between steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from .coded import Coded, message_of, weighted_sum, without_nonsense
from .weighted_mean import HEAD, NOBODY, Pending, Standing


class CodedInTwoStages(Coded):
    """The buffer travels encoded, to be averaged in parts."""

    _lost_here: Tensor | None = None  # by the averages of this rank's part

    def start(self, buffer: Tensor, standing: Standing) -> Pending:
        """Send each rank its part."""
        values = self._corrected(buffer[:-HEAD], standing)
        ranks = self.group.size()
        room = values.new_zeros(ranks * self.part_size(buffer))
        room[: values.numel()] = values
        parts = room.chunk(ranks)
        encoded = [self._codec.encode(part) for part in parts]
        if standing.weight:
            self._keep_lost(values, torch.cat([self._decode(e, values) for e in encoded]))
        out = torch.cat([message_of(standing, e) for e in encoded])
        back = torch.empty_like(out)
        work = self.group.all_to_all_single(back, out, async_op=True)
        return _Averaging(self, work, back, buffer, encoded[0])

    def average(self, back: Tensor, like: Any, part: Tensor) -> Tensor:
        """What this rank tells all: how they stand, and the mean of its part, if there is one."""
        total = weighted_sum(back.chunk(self.group.size()), like, self._codec, part)
        if not total.weight:
            return message_of(total, self._codec.encode(part))
        part.div_(total.weight)
        if self._lost_here is not None and self._lost_here.shape == part.shape:
            part.add_(self._lost_here)
        encoded = self._codec.encode(part)
        if self._feedback:
            self._lost_here = without_nonsense(part - self._decode(encoded, part))
        return message_of(replace(total, weight=1.0), encoded)

    def give(self, everyone: Tensor, like: Any, buffer: Tensor) -> Standing:
        """Put the means of all parts into the buffer."""
        stretches = buffer[:-HEAD].split(self.part_size(buffer))
        standing = NOBODY
        for message, stretch in zip(everyone.chunk(self.group.size()), stretches, strict=False):
            part = stretch.new_zeros(self.part_size(buffer))
            standing = weighted_sum([message], like, self._codec, part)  # the same for every part
            stretch.copy_(part[: stretch.numel()])
        return standing

    def part_size(self, buffer: Tensor) -> int:
        """How many numbers each rank averages, the last ones of which may not be there."""
        return max(1, -(-(buffer.numel() - HEAD) // self.group.size()))  # split takes no 0

    def state_dict(self) -> dict[str, Any]:
        """The same, and what the second encoding has lost on this rank."""
        return {**super().state_dict(), "lost_here": self._lost_here}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; among another number of ranks without what belongs to a part."""
        super().load_state_dict(state)
        lost = state.get("lost_here")
        self._lost_here = None if lost is None else lost.clone()


class _Averaging:
    """Between the stages."""

    def __init__(
        self, exchange: CodedInTwoStages, work: Work, back: Tensor, buffer: Tensor, like: Any
    ) -> None:
        self._first = exchange, work, back, buffer, like
        self._standing: Standing | None = None

    def wait(self) -> Standing:
        if self._standing is None:
            exchange, work, back, buffer, like = self._first
            work.wait()
            part = buffer.new_zeros(exchange.part_size(buffer))
            own = exchange.average(back, like, part)
            everyone = own.new_empty(exchange.group.size() * own.numel())
            exchange.group.all_gather_single(everyone, own)
            self._standing = exchange.give(everyone, like, buffer)
        return self._standing
