"""StepSums: what one rank has added up of a step's shards, and how it becomes the ranks' means.

``sums.py`` says why the result does not depend on who added what. Here is where the integers lie:
each tensor has a place in a bucket of 64-bit integers for the terms of one level, mostly all of
them, and gets more room for those of others. When the ranks know of each other's levels
(``account.py``), the place in the bucket holds the highest one. The mean of a parameter is written
over its own integers, so that a gradient needs no memory besides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .._exchange import memory_like, strides_of
from .._transport import add_whole, has_loops, largest_floats, mean_of_whole
from ..groups import Group, ReduceOp
from .sums import Grid, chunks, largest_of, put_nonfinite, without_nonfinite, words_for

_BUCKET = 25 * 1024 * 1024  # bytes
_RARE_BUCKET = 64 * 1024
_ALIGN = 8  # elements, 64 bytes: every mean begins where kernels like it

NONFINITE = -(1 << 30)  # stands for a level, where infinities and NaNs are counted


@dataclass(frozen=True, eq=False)
class Summed:
    """A tensor of which a step makes the mean over its shards."""

    name: str
    like: Tensor  # has the same shape, type, device and order of elements
    rare: bool = False  # most steps have no terms for it, so it travels with none that have

    @cached_property
    def exact(self) -> bool:
        """Whether it is made of whole numbers already."""
        return not self.like.is_floating_point()

    @cached_property
    def words(self) -> int:
        """Integers for each element."""
        return words_for(self.like.dtype)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """How its elements lie in its sums, and in its mean."""
        return strides_of(self.like)

    @cached_property
    def has_loops(self) -> bool:
        """Whether loops in C add its terms."""
        return has_loops(self.like)

    def is_quick(self, term: Tensor) -> bool:
        """Whether a loop in C may read ``term`` as it lies."""
        return self.has_loops and term.stride() == self.strides and term.dtype is self.like.dtype


@dataclass(eq=False, slots=True)
class Sum:
    """The sum of one tensor, as far as it has come."""

    of: Summed
    place: Tensor  # a row for each integer of an element; a stretch of a bucket
    level: int | None = None  # of what is in the place; None: nothing
    others: dict[int, Tensor] = field(default_factory=dict)  # of other levels
    touched: bool = False  # a shard had a term, were it zero

    def words_of(self, level: int) -> tuple[Tensor, bool]:
        """Where terms of ``level`` are added, and whether nothing is there yet."""
        if self.level is None:
            self.level = level
            return self.place, True
        if self.level == level:
            return self.place, False
        fresh = level not in self.others
        if fresh:
            self.others[level] = torch.empty_like(self.place)
        return self.others[level], fresh

    def counts(self) -> Tensor:
        """Where infinities and NaNs are counted."""
        if NONFINITE not in self.others:
            self.others[NONFINITE] = torch.zeros_like(self.place[:1])
        return self.others[NONFINITE]

    def levels(self) -> list[int]:
        """All that something was added to."""
        first = [] if self.level is None else [self.level]
        return [*first, *self.others]

    def put_on_top(self, top: int | None) -> None:
        """Have the terms of level ``top`` in the place, and no others."""
        if self.level is not None and self.level != top:
            self.others[self.level] = self.place.clone()
        if self.level is None or self.level != top:
            found = None if top is None else self.others.pop(top, None)
            self.place.zero_() if found is None else self.place.copy_(found)
        self.level = top


class StepSums:
    """The sums of ``tensors`` over at most ``terms`` shards, in memory that ``group`` likes."""

    def __init__(self, tensors: Sequence[Summed], terms: int, group: Group) -> None:
        self.tensors, self.grid, self.group = tuple(tensors), Grid(terms), group
        self.sums: dict[int, Sum] = {}
        self._buckets: list[tuple[Tensor, list[int]]] = []  # and whose places are in it

    # -- this rank's terms ----------------------------------------------------------------------

    def begin(self, numbers: Iterable[int]) -> None:
        """Forget all sums; the next ones are of the tensors with these numbers."""
        wanted = list(numbers)
        if wanted != list(self.sums):
            self._lay_out(wanted)
        for found in self.sums.values():
            found.level, found.touched = None, False
            found.others.clear()

    def _lay_out(self, numbers: Sequence[int]) -> None:
        self.sums, self._buckets = {}, []
        for row in self._rows(numbers):
            sizes = [_padded(self.tensors[number]) for number in row]
            device = self.tensors[row[0]].like.device
            bucket = self.group.allocate(sum(sizes), torch.int64, device)
            self._buckets.append((bucket, row))
            for number, stretch in zip(row, bucket.split(sizes), strict=True):
                of = self.tensors[number]
                place = stretch[: of.words * of.like.numel()].view(of.words, -1)
                self.sums[number] = Sum(of, place)
        self.sums = {number: self.sums[number] for number in numbers}

    def _rows(self, numbers: Sequence[int]) -> list[list[int]]:
        rows: list[list[int]] = []
        open_rows: dict[tuple[torch.device, bool], tuple[list[int], int]] = {}
        for number in numbers:
            of = self.tensors[number]
            kind, size = (of.like.device, of.rare), 8 * _padded(of)
            row, filled = open_rows.get(kind, ([], 0))
            if not row or filled + size > (_RARE_BUCKET if of.rare else _BUCKET):
                row, filled = [], 0
                rows.append(row)
            row.append(number)
            open_rows[kind] = row, filled + size
        return rows

    def add(self, terms: Mapping[int, Tensor], weight: int) -> None:
        """Add ``weight`` times each of ``terms``, which have the numbers of their tensors."""
        quick, rest = [], {}
        for number, term in terms.items():
            found = self.sums[number]
            found.touched = True
            if found.of.is_quick(term):
                quick.append((found, term))
            elif found.of.exact:
                self._add_whole(found, memory_like(term, found.of.like), weight)
            elif term.numel():
                rest[number] = memory_like(term, found.of.like)
        if quick:
            self._add_quickly(quick, weight)
        sizes = largest_of(list(rest.values()))
        for (number, term), largest in zip(rest.items(), sizes, strict=True):
            self._add_term(self.sums[number], term, weight, largest)

    def _add_quickly(self, terms: Sequence[tuple[Sum, Tensor]], weight: int) -> None:
        """All of them in one call, except what is not finite."""
        into, taken, scales, firsts = [], [], [], []
        sizes = largest_floats([term for _, term in terms])
        for (found, term), largest in zip(terms, sizes, strict=True):
            if not largest * weight < math.inf:
                self._add_term(found, memory_like(term, found.of.like), weight, largest)
            elif (level := self.grid.level(largest * weight)) is not None:
                words, fresh = found.words_of(level)
                into.append(words)
                taken.append(term)
                scales.append(self.grid.scale(level, weight))
                firsts.append(fresh)
        add_whole(into, taken, scales, firsts)

    def _add_whole(self, found: Sum, term: Tensor, weight: int) -> None:
        place, fresh = found.words_of(0)
        whole = term.to(torch.int64) * weight
        place[0].copy_(whole) if fresh else place[0].add_(whole)

    def _add_term(self, found: Sum, term: Tensor, weight: int, largest: float) -> None:
        if not largest * weight < math.inf:
            term, weight = term.to(torch.float64) * weight, 1
            term = without_nonfinite(term, found.counts()[0])
            (largest,) = largest_of([term])
        level = self.grid.level(largest * weight)
        if level is not None:
            words, fresh = found.words_of(level)
            self.grid.add(term, weight, level, words, fresh=fresh)

    # -- those of all ranks ---------------------------------------------------------------------

    def exchange(self, levels: Mapping[int, Sequence[int]]) -> None:
        """Make the sums those of all ranks, which have terms of these ``levels``, highest first."""
        rest = [(n, level) for n, all_levels in levels.items() for level in all_levels[1:]]
        for number, found in self.sums.items():
            mine = levels.get(number, ())
            found.put_on_top(mine[0] if mine else None)
        beyond = self._gathered(rest)
        if self.group.size() > 1:
            works = [
                self.group.start_all_reduce(bucket, ReduceOp.SUM, quiet=True)
                for bucket, row in self._buckets
                if any(levels.get(number) for number in row)
            ]
            works += [self.group.start_all_reduce(b, ReduceOp.SUM, quiet=True) for b in beyond]
            for work in works:
                work.wait()

    def _gathered(self, rest: Sequence[tuple[int, int]]) -> list[Tensor]:
        """One tensor for each device, of which the words of ``rest`` are stretches from now on."""
        homes: dict[torch.device, list[tuple[int, int]]] = {}
        for number, level in rest:
            homes.setdefault(self.tensors[number].like.device, []).append((number, level))
        gathered = []
        for device, pairs in homes.items():
            shapes = [self._shape(number, level) for number, level in pairs]
            flat = torch.zeros(sum(r * c for r, c in shapes), dtype=torch.int64, device=device)
            stretches = flat.split([r * c for r, c in shapes])
            for (number, level), shape, stretch in zip(pairs, shapes, stretches, strict=True):
                words, others = stretch.view(shape), self.sums[number].others
                if level in others:
                    words.copy_(others[level])
                others[level] = words
            gathered.append(flat)
        return gathered

    def _shape(self, number: int, level: int) -> tuple[int, int]:
        of = self.tensors[number]
        return (1 if level == NONFINITE else of.words), of.like.numel()

    def mean(self, number: int, weight: int) -> Tensor:
        """The sum divided by ``weight``, in its tensor's type, written over the sum itself.

        Of float16 and bfloat16 it may round twice, as it does on every rank.
        """
        found = self.sums[number]
        like, numel = found.of.like, found.of.like.numel()
        mean = found.place.view(-1).view(like.dtype)[:numel]
        shaped = mean.as_strided(like.shape, found.of.strides, mean.storage_offset())
        if found.level is not None and not found.others and found.of.has_loops:
            mean_of_whole(mean, found.place, self.grid.unit(found.level), float(weight))
            return shaped
        levels = sorted((level for level in found.levels() if level != NONFINITE), reverse=True)
        parts = [(level, found.words_of(level)[0]) for level in levels]
        counts = found.others.get(NONFINITE)
        for start, stop in chunks(numel, like.device):  # the mean ends before the next chunk begins
            if parts:
                value = self.grid.value(parts, start, stop).div_(weight)
            else:
                value = torch.zeros(stop - start, dtype=torch.float64, device=like.device)
            if counts is not None:
                put_nonfinite(value, counts[0, start:stop])
            mean[start:stop].copy_(value)
        return shaped

    def mean_whole(self, number: int, weight: int) -> Tensor:
        """The sum of whole numbers divided by ``weight`` and rounded, halves up."""
        found = self.sums[number]
        total = found.place[0]
        doubled = total * 2 + weight
        whole = torch.div(doubled, 2 * weight, rounding_mode="floor")
        return whole.as_strided(found.of.like.shape, found.of.strides)


def _padded(of: Summed) -> int:
    """Integers that a tensor has room for in its bucket."""
    return -(-(of.words * of.like.numel()) // _ALIGN) * _ALIGN
