"""Floats as whole numbers, which add up in any order: loops that torch would need five calls for.

``_reducer/sums.py`` says what they are for. They do one thing that torch can do as well, and both
round alike, so nothing depends on whether the library is there. One call works at many tensors:
each has its elements side by side in memory, and what goes with it has them in the same order.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from .clib import load

ANY_LEVEL = (1 << 31) - 1  # of sums that have no terms yet
NO_LEVEL = -(1 << 31)  # of terms that are all zeros; of sums that take no terms
OTHER_LEVEL = NO_LEVEL + 1  # of terms that the sums do not take


def has_loops(tensor: Tensor) -> bool:
    """Whether the loops are there for tensors of this type, where this one is."""
    plain = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    return plain and isinstance(load(), ctypes.CDLL)


def largest_floats(tensors: Sequence[Tensor]) -> list[float]:
    """The largest size of an element of each; inf or NaN if there is such."""
    most = array("f", bytes(4 * len(tensors)))
    places, counts = _places(tensors), array("Q", map(Tensor.numel, tensors))
    _library().pl_largest(_at(most), _at(places), _at(counts), len(tensors))
    return most.tolist()


def add_whole(
    sums: Sequence[Tensor],
    tensors: Sequence[Tensor],
    scales: Sequence[float],
    fresh: Sequence[bool],
) -> None:
    """Add the elements of each times its scale, rounded, to its 64-bit sums.

    ``fresh``: nothing is in the sums yet.
    """
    counts, factors, firsts = map(Tensor.numel, tensors), array("d", scales), array("B", fresh)
    assert all(s.numel() == t.numel() for s, t in zip(sums, tensors, strict=True))
    numbers, into, terms = array("Q", counts), _places(sums), _places(tensors)
    _library().pl_add_whole(
        _at(into), _at(terms), _at(numbers), _at(factors), _at(firsts), len(tensors)
    )


def add_terms(
    sums: Sequence[int],
    terms: Sequence[Tensor],
    counts: Sequence[int],
    takes: Sequence[int],
    fresh: Sequence[bool],
    grid: array[int],
    weight: int,
) -> list[int]:
    """Add ``weight`` times each of ``terms`` to the sums at its address; returns their levels.

    ``takes`` is the level that is added there, or :data:`ANY_LEVEL`. Nothing is added of terms that
    are all zeros, whose level is :data:`NO_LEVEL`, and of those that the sums do not take or that
    are not finite: their level is :data:`OTHER_LEVEL`. ``counts`` are the numbers of elements;
    ``grid`` are the numbers that make one: bits, width, lowest level, 0.
    """
    into, numbers, taken = array("Q", sums), array("Q", counts), array("i", takes)
    firsts, places, levels = array("B", fresh), _places(terms), array("i", bytes(4 * len(terms)))
    _library().pl_add_terms(
        _at(into),
        _at(places),
        _at(numbers),
        _at(taken),
        _at(firsts),
        _at(levels),
        len(terms),
        _at(grid),
        float(weight),
    )
    return levels.tolist()


def means_of_whole(
    sums: Sequence[int], counts: Sequence[int], units: Sequence[float], weight: float
) -> None:
    """Write ``sums * unit / weight`` as floats over the first half of the sums at each address."""
    places, numbers, worth = array("Q", sums), array("Q", counts), array("d", units)
    _library().pl_means_of_whole(_at(places), _at(numbers), _at(worth), len(sums), weight)


class KeptFloats:
    """Copies of tensors of which few ever change: made in one call, and compared in one.

    Every tensor has its elements side by side; its copy is flat, in the order of its memory.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._counts = array("Q")

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Copy them, over what was kept before."""
        self._counts = array("Q", map(Tensor.numel, tensors))
        if self._memory.numel() < sum(self._counts):
            self._memory = torch.empty(sum(self._counts))
        places = _places(tensors)
        _library().pl_keep(self._memory.data_ptr(), _at(places), _at(self._counts), len(places))

    def changed(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Which of them differ from what was kept; they are as many, and of the same sizes."""
        places, found = _places(tensors), array("B", bytes(len(tensors)))
        assert all(map(int.__eq__, map(Tensor.numel, tensors), self._counts))
        _library().pl_changed(
            _at(found), self._memory.data_ptr(), _at(places), _at(self._counts), len(places)
        )
        return [bool(flag) for flag in found]

    def copies(self) -> list[Tensor]:
        """What is kept of each."""
        kept = self._memory[: sum(self._counts)]
        return list(kept.split(self._counts.tolist()))


def _library() -> ctypes.CDLL:
    library = load()
    assert isinstance(library, ctypes.CDLL)
    return library


def _places(tensors: Sequence[Tensor]) -> array[int]:
    return array("Q", map(Tensor.data_ptr, tensors))


def _at(numbers: array[int] | array[float]) -> int:
    """Where the numbers lie, as long as somebody holds the array."""
    return numbers.buffer_info()[0]
