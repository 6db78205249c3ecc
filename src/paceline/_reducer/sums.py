"""Sums that do not depend on order: the same bits however terms are shared out and added up.

**What is wanted.** The gradient of a step is the sum of one term for each of its shards. Which rank
has which terms, in which order it adds its own, and how the group adds what the ranks have: nothing
of that may be seen in the result. Floating-point sums show all of it, since each addition rounds.

**The rule.** A term is turned into whole numbers by itself, looking at no other term; whole numbers
are added, which is exact; what they mean is worked out at the very end. A term is the weighted
gradient of one parameter in one shard, in float64. Its *level* is the smallest number ``L`` such
that all its elements are below ``2**(WIDTH * L)`` in size. Each element becomes the nearest
multiple of the level's unit, ``2**(WIDTH * L - bits)``. Terms of one level are added in 64-bit
integers; terms of different levels are added in different integers. In the end each element is the
sum over levels, from the highest to the lowest, of integer times unit, in float64.

**Proof.** (1) What a term adds, and to which level, follows from the term alone. (2) With ``bits``
such that ``terms * 2**bits <= 2**62``, no sum of any part of the terms leaves 64 bits, since each
element is at most ``2**bits``; so every partial sum is exact, and addition of integers is
associative and commutative. Hence the integers of each level are the same for every order, every
owner and every engine. (3) Which levels there are is the union over all terms. (4) What comes after
is a fixed sequence of operations on each element by itself: a product with a power of two, which is
exact, one addition for each further level, one division. So the result is a function of the set of
terms. Nothing is carried from one step to the next, so nothing has to be saved, or agreed on when
a rank joins.

**What is lost.** A unit is at least ``bits - WIDTH`` and at most ``bits`` binary digits below the
largest element of its term, 49 to 57 for 17 to 32 shards: finer than what float32 keeps of every
element down to one 2**-25 of the largest, and elements smaller than one 2**-49 of the largest are
lost. Float64 terms have a second integer for what the first one rounds away. Infinities and NaNs
are counted, not added: one NaN, or infinities of both signs, make NaN, as in any order they would.

**What it costs.** Eight bytes for each element where a float32 sum has four. Levels are ``WIDTH``
digits wide, and the largest elements of a parameter's terms mostly lie within one or two digits of
each other, so most parameters have terms of one level; the others have a second integer.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

WIDTH = 8  # binary digits between the levels
_LOWEST = -100  # level: smaller elements are rounded as if they were larger
_CHUNK = {"cpu": 1 << 15}  # elements worked at together, so that they stay in a cache
_CHUNK_ELSEWHERE = 1 << 24

_PLUS, _MINUS, _NAN = 1, 1 << 20, 1 << 40  # counts of what is not finite, in one integer


def words_for(dtype: torch.dtype) -> int:
    """How many integers an element of a sum needs."""
    return 2 if dtype == torch.float64 else 1


def chunks(numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Stretches that are worked at one after the other."""
    size = _CHUNK.get(device.type, _CHUNK_ELSEWHERE)
    for start in range(0, numel, size):
        yield start, min(start + size, numel)


@dataclass(frozen=True)
class Grid:
    """How elements become whole numbers, where a sum has at most ``terms`` terms."""

    terms: int

    @cached_property
    def bits(self) -> int:
        """How many binary digits a whole number has."""
        return 62 - (self.terms - 1).bit_length()

    @cached_property
    def numbers(self) -> array[int]:
        """What loops in C need to know of it."""
        return array("i", [self.bits, WIDTH, _LOWEST, 0])

    def level(self, largest: float) -> int | None:
        """The level of a term whose largest element has this size; None: it is all zeros."""
        if largest == 0:
            return None
        _, exponent = math.frexp(largest)  # largest < 2**exponent
        return max(-(-exponent // WIDTH), _LOWEST)

    def unit(self, level: int) -> float:
        """What a 1 is worth."""
        return math.ldexp(1.0, WIDTH * level - self.bits)

    def scale(self, level: int, weight: int) -> float:
        """What elements of weight ``weight`` are multiplied by to be counted in units."""
        return math.ldexp(float(weight), self.bits - WIDTH * level)

    def add(self, term: Tensor, weight: int, level: int, words: Tensor, *, fresh: bool) -> None:
        """Add ``weight * term`` to the whole numbers ``words``; ``fresh`` ones hold nothing yet.

        ``words`` has a row for each integer of an element, and ``term`` is flat.
        """
        scale = self.scale(level, weight)
        for start, stop in chunks(term.numel(), term.device):
            part = term[start:stop].to(torch.float64, copy=True).mul_(scale)
            _put(words[0, start:stop], part.round(), fresh=fresh)
            if len(words) == 2:
                rest = part.sub_(part.round()).mul_(math.ldexp(1.0, self.bits)).round_()
                _put(words[1, start:stop], rest, fresh=fresh)

    def value(self, sums: Sequence[tuple[int, Tensor]], start: int, stop: int) -> Tensor:
        """What the integers of all levels, highest first, come to between two elements."""
        total = None
        for level, words in sums:
            unit = self.unit(level)
            part = words[0, start:stop].to(torch.float64).mul_(unit)
            if len(words) == 2:
                rest = words[1, start:stop].to(torch.float64)
                part.add_(rest.mul_(math.ldexp(unit, -self.bits)))
            total = part if total is None else total.add_(part)
        assert total is not None
        return total


def _put(place: Tensor, numbers: Tensor, *, fresh: bool) -> None:
    if fresh:
        place.copy_(numbers)
    else:
        place.add_(numbers.to(torch.int64))


# -- what is not finite -------------------------------------------------------------------------


def largest_of(terms: Sequence[Tensor]) -> list[float]:
    """The size of each one's largest element, inf or NaN if it has such; waits for their device."""
    if not terms:
        return []
    ends = [torch.stack(term.aminmax()).to(torch.float64) for term in terms]
    found = torch.stack(ends).abs_().amax(1)
    return [float(size) for size in found.tolist()]


def without_nonfinite(term: Tensor, counts: Tensor, sign: int = 1) -> Tensor:
    """``term`` with zeros where it is not finite; what was there is added to ``counts``.

    With a ``sign`` of -1 it is taken off them.
    """
    counts.add_(term == math.inf, alpha=sign * _PLUS)
    counts.add_(term == -math.inf, alpha=sign * _MINUS)
    counts.add_(term.isnan(), alpha=sign * _NAN)
    return torch.where(term.isfinite(), term, torch.zeros_like(term))


def put_nonfinite(value: Tensor, counts: Tensor) -> None:
    """Let ``value`` be what such terms come to, where any were counted."""
    plus, minus = counts % _MINUS > 0, counts // _MINUS % (_NAN // _MINUS) > 0
    value.masked_fill_(plus, math.inf)
    value.masked_fill_(minus, -math.inf)
    value.masked_fill_((counts >= _NAN) | (plus & minus), math.nan)
