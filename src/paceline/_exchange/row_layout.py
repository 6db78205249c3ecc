"""Where the parameters of a bucket lie: in its buffer, and in the rows that are encoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class ParamSpan:
    """A parameter's stretch of a bucket's buffer."""

    name: str
    number: int  # of the parameter, the same on all ranks and in all runs
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class RowLayout:
    """Large parameters are encoded, in rows of their own; small ones travel as they are."""

    large: tuple[ParamSpan, ...]
    small: tuple[ParamSpan, ...]
    block: int

    @classmethod
    def of(
        cls, spans: Sequence[ParamSpan], block: int, encodes: Callable[[ParamSpan], bool]
    ) -> RowLayout:
        """Parameters for which ``encodes`` returns True are encoded; the others count as small."""
        large = tuple(span for span in spans if encodes(span))
        small = tuple(span for span in spans if not encodes(span))
        return cls(large, small, block)

    @cached_property
    def counts(self) -> list[int]:
        """How many rows each large parameter has."""
        return [-(-span.numel // self.block) for span in self.large]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(self.counts)

    @property
    def spare(self) -> int:
        """How many elements the small parameters have."""
        return sum(span.numel for span in self.small)

    def stretches(self, rows: Tensor) -> list[Tensor]:
        """Each large parameter's elements in ``rows``, flat, without what fills its last row."""
        parts = rows.view(-1).split([count * self.block for count in self.counts])
        return [part[: span.numel] for part, span in zip(parts, self.large, strict=True)]

    def fillers(self, rows: Tensor) -> list[Tensor]:
        """What only fills rows up."""
        parts = rows.view(-1).split([count * self.block for count in self.counts])
        ends = [part[span.numel :] for part, span in zip(parts, self.large, strict=True)]
        return [end for end in ends if end.numel()]

    def labels(self) -> Tensor:
        """A number for each row, which it has in every layout."""
        rows = [
            torch.arange(count) + (span.number << 32)
            for span, count in zip(self.large, self.counts, strict=True)
        ]
        return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)

    def owners(self, ranks: int) -> Tensor:
        """Which rank averages a row; it is the same one in every layout."""
        labels = self.labels()
        return ((labels >> 32) + (labels & 0xFFFFFFFF)) % ranks


def spans_of(buffer: Tensor, spans: Sequence[ParamSpan]) -> list[Tensor]:
    """The spans' stretches of a bucket's buffer, flat."""
    return [buffer[span.start : span.start + span.numel] for span in spans]


@dataclass(frozen=True)
class OwnerOrder:
    """Rows sorted by the rank that owns them, each rank's filled up to as many as the most has."""

    order: Tensor  # for each rank a row of the numbers of its rows; 0 fills up
    place: Tensor  # of each row, in that order
    counts: list[int]  # of each rank's rows

    @classmethod
    def of(cls, owners: Tensor, ranks: int) -> OwnerOrder:
        """From the owner of each row."""
        mine = [(owners == rank).nonzero().flatten() for rank in range(ranks)]
        most = max(len(rows) for rows in mine)
        order = torch.zeros(ranks, most, dtype=torch.int64)
        place = torch.empty(len(owners), dtype=torch.int64)
        for rank, rows in enumerate(mine):
            order[rank, : len(rows)] = rows
            place[rows] = torch.arange(len(rows)) + rank * most
        return cls(order, place, [len(rows) for rows in mine])
