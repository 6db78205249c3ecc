"""StepSums: what one rank has added up of a step's shards, and how it becomes the ranks' means.

``sums.py`` says why the result does not depend on who added what. Here is where the integers lie:
each tensor has a place in a bucket of 64-bit integers for the terms of one level, mostly all of
them, and gets more room for those of others. When the ranks know of each other's levels
(``account.py``), the place in the bucket holds the highest one. The mean of a parameter is written
over its own integers, so that a gradient needs no memory besides.

**Sending early.** A bucket can leave before the ranks have compared accounts, in the backward pass
of a rank's last shard, if all ranks know which level it holds. So at the end of each step they
*promise* buckets for the next one: in that step every rank sends each of them once, in order, with
the terms of one *expected* level for each tensor, which is the highest that the step before had.
When a rank does so is its own affair, as long as it is before accounts are compared: those without
a shard do so then. Terms of other levels, and what comes after a bucket has left, are added beside
it and exchanged when all ranks know of them. Whatever was expected, each level's integers are the
same in the end, so that a wrong guess costs time and changes no bit. A term that was sent and has
changed since is taken back by adding minus its integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor

from .._exchange import memory_like
from .._transport import (
    NO_LEVEL,
    OTHER_LEVEL,
    add_terms,
    add_whole,
    largest_floats,
    means_of_whole,
)
from ..groups import Group, ReduceOp
from .method import starts_quietly
from .sum_places import NONFINITE, Sum, SumBucket, Summed
from .sums import Grid, chunks, largest_of, put_nonfinite, without_nonfinite

_BUCKET = {"cpu": 8 * 1024 * 1024}  # bytes
_BUCKET_ELSEWHERE = 25 * 1024 * 1024
_RARE_BUCKET = 64 * 1024
_ALIGN = 8  # elements, 64 bytes: every mean begins where kernels like it


class StepSums:
    """The sums of ``tensors`` over at most ``terms`` shards, in memory that ``group`` likes."""

    def __init__(self, tensors: Sequence[Summed], terms: int, group: Group) -> None:
        self.tensors, self.grid, self.group = tuple(tensors), Grid(terms), group
        self.sums: dict[int, Sum] = {}
        self._buckets: list[SumBucket] = []
        self._owed: list[SumBucket] = []  # promised, of a layout that is gone
        self._left: list[SumBucket] = []  # of a step that failed; somebody may still write there
        self.interrupted = False  # a step was given up of which a part had been sent

    # -- this rank's terms ----------------------------------------------------------------------

    def begin(self, numbers: Iterable[int]) -> None:
        """Forget all sums; the next ones are of the tensors with these numbers."""
        wanted = list(numbers)
        sent = any(bucket.sent for bucket in self._buckets)
        if wanted != list(self.sums) or sent:
            self.interrupted = self.interrupted or sent
            self._owed += [bucket for bucket in self._buckets if bucket.promised]
            self._lay_out(wanted)
        for found in self.sums.values():
            found.begin()

    def _lay_out(self, numbers: Sequence[int]) -> None:
        self.sums, self._buckets = {}, []
        for row in self._rows(numbers):
            sizes = [_padded(self.tensors[number]) for number in row]
            device = self.tensors[row[0]].like.device
            bucket = self.group.allocate(sum(sizes), torch.int64, device)
            self._buckets.append(SumBucket(bucket, row))
            for number, stretch in zip(row, bucket.split(sizes), strict=True):
                of = self.tensors[number]
                place = stretch[: of.words * of.like.numel()].view(of.words, -1)
                self.sums[number] = Sum(of, place)
        self.sums = {number: self.sums[number] for number in numbers}

    def _rows(self, numbers: Sequence[int]) -> list[list[int]]:
        """Which tensors travel together: the last first, since their gradients come first."""
        rows: list[list[int]] = []
        open_rows: dict[tuple[torch.device, bool], tuple[list[int], int]] = {}
        for number in reversed(numbers):
            of = self.tensors[number]
            kind, size = (of.like.device, of.rare), 8 * _padded(of)
            row, filled = open_rows.get(kind, ([], 0))
            room = _BUCKET.get(of.like.device.type, _BUCKET_ELSEWHERE)
            if not row or filled + size > (_RARE_BUCKET if of.rare else room):
                row, filled = [], 0
                rows.append(row)
            row.append(number)
            open_rows[kind] = row, filled + size
        return rows

    def add(self, terms: Mapping[int, Tensor], weight: int) -> None:
        """Add ``weight`` times each of ``terms``, which have the numbers of their tensors.

        A negative ``weight`` takes back what was added with the same positive one.
        """
        quick: list[tuple[Sum, Tensor]] = []
        rest = {}
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
        """All of them in one call, except those of a level that has no place in a bucket."""
        levels = add_terms(
            [found.address for found, _ in terms],
            [term for _, term in terms],
            [found.of.numel for found, _ in terms],
            [found.takes() for found, _ in terms],
            [found.level is None for found, _ in terms],
            self.grid.numbers,
            weight,
        )
        beside = []
        for (found, term), level in zip(terms, levels, strict=True):
            if level == OTHER_LEVEL:
                beside.append((found, term))
            elif level != NO_LEVEL:
                found.level = level
        if beside:
            self._add_beside(beside, weight)

    def _add_beside(self, terms: Sequence[tuple[Sum, Tensor]], weight: int) -> None:
        """All of them in one call, except what is not finite."""
        into, taken, scales, firsts = [], [], [], []
        sizes = largest_floats([term for _, term in terms])
        for (found, term), largest in zip(terms, sizes, strict=True):
            if not largest * abs(weight) < math.inf:
                self._add_term(found, memory_like(term, found.of.like), weight, largest)
            elif (level := self.grid.level(largest * abs(weight))) is not None:
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
        if not largest * abs(weight) < math.inf:
            sign = 1 if weight > 0 else -1
            term, weight = term.to(torch.float64) * abs(weight), sign
            term = without_nonfinite(term, found.counts()[0], sign)
            (largest,) = largest_of([term])
        level = self.grid.level(largest * abs(weight))
        if level is not None:
            words, fresh = found.words_of(level)
            self.grid.add(term, weight, level, words, fresh=fresh)

    # -- those of all ranks ---------------------------------------------------------------------

    def promised(self) -> list[list[int]]:
        """The tensors of each promised bucket that has not left, in the order they leave."""
        return [b.row for b in self._buckets if b.promised and not b.sent]

    def rows(self) -> list[tuple[list[int], bool]]:
        """The tensors of each bucket, and whether it is promised."""
        return [(bucket.row, bucket.promised) for bucket in self._buckets]

    def send_next(self) -> None:
        """Send the first promised bucket that has not left; its terms should all be there."""
        bucket = next(b for b in self._buckets if b.promised and not b.sent)
        for number in bucket.row:
            self.sums[number].send()
        bucket.send(self.group, bucket.memory, quiet=starts_quietly(self.group))

    def send_promised(self) -> None:
        """Send all promised buckets that have not left: accounts are compared next."""
        self._send_zeros(self._owed)
        while self.promised():
            self.send_next()

    def send_nothing(self) -> None:
        """As :meth:`send_promised` with no terms, where this rank's are dropped anyway."""
        self._send_zeros([*self._owed, *(b for b in self._buckets if b.promised)])

    def _send_zeros(self, buckets: Iterable[SumBucket]) -> None:
        for bucket in buckets:
            if not bucket.sent:  # its own memory may be that of gradients
                bucket.memory = torch.zeros_like(bucket.memory)
                bucket.send(self.group, bucket.memory, quiet=True)

    def drop(self) -> None:
        """The ranks have not agreed: there are no sums, nothing is promised, on all of them."""
        self._left += [bucket for bucket in (*self._owed, *self._buckets) if bucket.sent]
        self.sums, self._buckets, self._owed, self.interrupted = {}, [], [], False

    def come_after(self, others: StepSums) -> None:
        """Keep what ``others`` had sent, for a group that may still write there, for a step."""
        self._left = [*others._left, *(b for b in others._buckets if b.sent)]

    def exchange(
        self, levels: Mapping[int, Sequence[int]], in_place: Set[int] = frozenset()
    ) -> None:
        """Make the sums those of all ranks.

        ``levels`` are those of the ranks' terms, highest first, as far as they were not sent;
        ``in_place`` are promised tensors that a rank had terms of the expected level for.
        """
        for number, found in self.sums.items():
            if not found.promised:
                mine = levels.get(number, ())
                found.put_on_top(mine[0] if mine else None)
        rest = [(n, lv) for n, found in levels.items() for lv in found[self._in_bucket(n) :]]
        beyond = self._gathered(rest)
        if self.group.size() > 1:
            self._add_up(levels, beyond)
            self._promise(levels, in_place)
        self._owed, self._left = [], []

    def _in_bucket(self, number: int) -> int:
        """How many of the levels that the ranks told of are in its bucket: the highest, or none."""
        return 0 if self.sums[number].promised else 1

    def _add_up(self, levels: Mapping[int, Sequence[int]], beyond: Sequence[Tensor]) -> None:
        for bucket in self._buckets:
            if not bucket.promised and any(levels.get(number) for number in bucket.row):
                bucket.send(self.group, bucket.memory, quiet=True)
        works = [self.group.start_all_reduce(b, ReduceOp.SUM, quiet=True) for b in beyond]
        for bucket in (*self._owed, *self._buckets):
            if bucket.sent:
                bucket.wait()
        for work in works:
            work.wait()
        for found in self.sums.values():
            if found.promised:
                found.merge()

    def _promise(self, levels: Mapping[int, Sequence[int]], in_place: Set[int]) -> None:
        """Settle what the next step sends early, which follows from what all ranks know."""
        for bucket in self._buckets:
            if bucket.promised and in_place >= set(bucket.row) and not levels:
                continue  # as in the step before
            tops = {number: self._highest(number, levels, in_place) for number in bucket.row}
            rare = self.tensors[bucket.row[0]].rare
            bucket.promised = not rare and any(top is not None for top in tops.values())
            for number, top in tops.items():
                found = self.sums[number]
                found.promised, found.expected = bucket.promised, top

    def _highest(
        self, number: int, levels: Mapping[int, Sequence[int]], in_place: Set[int]
    ) -> int | None:
        told = [level for level in levels.get(number, ()) if level != NONFINITE]
        if number in in_place and (sent := self.sums[number].expected) is not None:
            told.append(sent)
        return max(told, default=None)

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

    def means(self, numbers: Iterable[int], weight: int) -> dict[int, Tensor]:
        """The sums of these tensors divided by ``weight``, each in its tensor's type.

        They are written over the sums. Of float16 and bfloat16 one may round twice, as it does on
        every rank.
        """
        asked = {number: self.sums[number] for number in numbers}
        quick = [
            (found, self.grid.unit(found.level))
            for found in asked.values()
            if found.address and found.level is not None and not found.others
        ]
        if quick:
            means_of_whole(
                [found.address for found, _ in quick],
                [found.of.numel for found, _ in quick],
                [unit for _, unit in quick],
                float(weight),
            )
        done = {id(found) for found, _ in quick}
        for found in asked.values():
            if id(found) not in done:
                self._write_mean(found, weight)
        return {number: found.mean for number, found in asked.items()}

    def _write_mean(self, found: Sum, weight: int) -> None:
        """The mean of one tensor, by torch."""
        like, mean = found.of.like, found.mean
        flat = mean.as_strided((found.of.numel,), (1,), mean.storage_offset())
        levels = sorted((level for level in found.levels() if level != NONFINITE), reverse=True)
        parts = [(lv, found.place if lv == found.level else found.others[lv]) for lv in levels]
        counts = found.others.get(NONFINITE)
        # the mean ends before the next chunk begins
        for start, stop in chunks(found.of.numel, like.device):
            if parts:
                value = self.grid.value(parts, start, stop).div_(weight)
            else:
                value = torch.zeros(stop - start, dtype=torch.float64, device=like.device)
            if counts is not None:
                put_nonfinite(value, counts[0, start:stop])
            flat[start:stop].copy_(value)

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
