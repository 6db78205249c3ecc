"""Which rank owns which stretch: pure functions on sizes.

Parameters are known by their index. Laid one after the other they make a line of elements, and a
line is cut by *bounds*: rank r owns the elements from ``bounds[r]`` up to ``bounds[r + 1]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

Bounds = tuple[int, ...]  # one more than there are ranks


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` up to ``stop`` of one parameter, counted as they lie in its memory."""

    param: int  # its index
    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many elements."""
        return self.stop - self.start


def even_bounds(total: int, ranks: int) -> Bounds:
    """Equal stretches; what does not divide is missing at the end."""
    step = -(-total // ranks)
    return tuple(min(rank * step, total) for rank in range(ranks + 1))


def level_bounds(total: int, loads: Sequence[int]) -> Bounds:
    """Stretches that make the ranks' loads as equal as can be; ``loads`` is what they have."""
    low, high = min(loads), max(loads) + total
    while low < high:  # the lowest level at which there is room for all
        middle = (low + high) // 2
        if sum(max(0, middle - load) for load in loads) >= total:
            high = middle
        else:
            low = middle + 1
    shares = [max(0, low - load) for load in loads]
    spare = sum(shares) - total
    for rank in reversed(range(len(loads))):
        if spare and shares[rank]:
            shares[rank] -= 1
            spare -= 1
    return tuple(itertools.accumulate(shares, initial=0))


def greedy_owners(sizes: Sequence[int], loads: Sequence[int]) -> tuple[int, ...]:
    """For each parameter the rank that gets it whole: large ones first, to whoever has least."""
    loads, owners = list(loads), [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        owners[at] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[at]] += sizes[at]
    return tuple(owners)


def slices_between(
    indices: Sequence[int], sizes: Sequence[int], start: int, stop: int
) -> tuple[Slice, ...]:
    """The parts of parameters, laid one after the other, between two places of the line."""
    found, at = [], 0
    for index, size in zip(indices, sizes, strict=True):
        first, last = max(start, at), min(stop, at + size)
        if first < last:
            found.append(Slice(index, first - at, last - at))
        at += size
        if at >= stop:
            break
    return tuple(found)


def runs_of(
    slices: Sequence[Slice], kind: Callable[[Slice], Hashable], longest: int
) -> list[tuple[Slice, ...]]:
    """Neighbouring slices of one kind together, at most ``longest`` elements in each run.

    Slices whose kind is None are left out. Runs are about as long as each other, so that none is
    a crumb.
    """
    runs: list[tuple[Slice, ...]] = []
    for found, row in itertools.groupby(slices, kind):
        if found is None:
            continue
        together = list(row)
        total = sum(part.length for part in together)
        pieces = -(-total // longest)
        bounds = even_bounds(total, pieces)
        for a, b in itertools.pairwise(bounds):
            if a < b:
                runs.append(cut_slices(together, a, b))
    return runs


def cut_slices(slices: Sequence[Slice], start: int, stop: int) -> tuple[Slice, ...]:
    """What lies between two places of these slices, laid one after the other."""
    found, at = [], 0
    for part in slices:
        first, last = max(start, at), min(stop, at + part.length)
        if first < last:
            found.append(Slice(part.param, part.start + first - at, part.start + last - at))
        at += part.length
    return tuple(found)


def length_of(slices: Sequence[Slice]) -> int:
    """Elements of all of them together."""
    return sum(part.length for part in slices)
