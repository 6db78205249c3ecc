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


def mean_of_whole(mean: Tensor, sums: Tensor, unit: float, weight: float) -> None:
    """Write ``sums * unit / weight`` to ``mean``, which may be the first half of their memory."""
    assert sums.dtype == torch.int64
    assert sums.numel() == mean.numel()
    _library().pl_mean_of_whole(mean.data_ptr(), sums.data_ptr(), mean.numel(), unit, weight)


def _library() -> ctypes.CDLL:
    library = load()
    assert isinstance(library, ctypes.CDLL)
    return library


def _places(tensors: Sequence[Tensor]) -> array[int]:
    return array("Q", map(Tensor.data_ptr, tensors))


def _at(numbers: array[int] | array[float]) -> int:
    """Where the numbers lie, as long as somebody holds the array."""
    return numbers.buffer_info()[0]
