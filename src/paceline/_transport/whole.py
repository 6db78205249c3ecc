"""Floats as whole numbers, which add up in any order: loops that torch would need five calls for.

``_reducer/sums.py`` says what they are for. They do one thing that torch can do as well, and both
round alike, so nothing depends on whether the library is there.
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from .clib import load


def fits(tensor: Tensor) -> bool:
    """Whether the loops are there for a tensor, which must be flat."""
    plain = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    return plain and tensor.is_contiguous() and isinstance(load(), ctypes.CDLL)


def largest_float(tensor: Tensor) -> float:
    """The largest size of an element; inf or NaN if there is such."""
    library = load()
    assert isinstance(library, ctypes.CDLL)
    bits = library.pl_largest(tensor.data_ptr(), tensor.numel())
    return float(struct.unpack("=f", struct.pack("=I", bits))[0])


def add_whole(sums: Tensor, tensor: Tensor, scale: float, *, fresh: bool) -> None:
    """Add the elements times ``scale``, rounded, to ``sums``; ``fresh``: nothing is there yet."""
    library = load()
    assert isinstance(library, ctypes.CDLL)
    assert sums.dtype == torch.int64
    assert sums.is_contiguous()
    assert sums.numel() == tensor.numel()
    library.pl_add_whole(sums.data_ptr(), tensor.data_ptr(), tensor.numel(), scale, fresh)


def mean_of_whole(mean: Tensor, sums: Tensor, unit: float, weight: float) -> None:
    """Write ``sums * unit / weight`` to ``mean``, which may be the first half of their memory."""
    library = load()
    assert isinstance(library, ctypes.CDLL)
    assert sums.dtype == torch.int64
    assert sums.is_contiguous()
    assert sums.numel() == mean.numel()
    library.pl_mean_of_whole(mean.data_ptr(), sums.data_ptr(), mean.numel(), unit, weight)
