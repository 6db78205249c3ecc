"""Dividing means by what the header says, where it is: nobody waits for a device.

Mostly the divisor is 1, and then a division would read and write every gradient for nothing. So on
a GPU one kernel of our own works the divisor out, and leaves at once when it is 1. Where it cannot
be compiled, and for numbers of 16 bits, torch's operations do the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch import foreach
from .._torch.kernels import Kernel, compiled
from .._torch.tensors import values_of
from .bucket import Bucket

FIXED = 4  # numbers at the start of a header: weight, trouble, late, weighted


def trouble_in(memory: Tensor) -> Tensor:
    """Of a header, the numbers that are above zero where a rank could not go on."""
    return memory[1 : FIXED - 1]


def divisor(memory: Tensor, ranks: int, *, by_active: bool) -> Tensor:
    """What means are divided by, on the header's device.

    Infinite when a rank cannot go on: what the others have is half a gradient, and becomes zeros.
    """
    flags = memory[1:FIXED] > 0  # trouble, late, weighted
    plain: Tensor | float = 1.0
    if by_active:
        plain = (memory[FIXED : FIXED + ranks] > 0).sum().to(memory.dtype) / ranks
    weight = torch.where(flags[2], memory[0], plain).clamp_min(torch.finfo(memory.dtype).tiny)
    return torch.where(flags[:2].any(), torch.inf, weight)


def divide(tensors: Sequence[Tensor], by: Tensor) -> None:
    """Divide ``tensors`` in place by one number on their device, in at least 32 bits.

    By an infinite one all become zero, also what is not a number.
    """
    wide = [t for t in tensors if not t.is_sparse and t.dtype.itemsize >= 4]
    if wide:
        foreach.div_(wide, by)
    for tensor in tensors:
        if tensor.is_sparse:
            tensor.div_(by)
            values_of(tensor).masked_fill_(by.isinf(), 0.0)
            continue
        if tensor.dtype.itemsize < 4:
            tensor.copy_(tensor.float().div_(by))
        tensor.masked_fill_(by.isinf(), 0.0)


class Divider:
    """Divides the means of one reducer's buckets, pass after pass."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []  # address and length of each bucket's means
        self._rows = torch.empty(0)  # the same on the device

    def divide(
        self, buckets: Sequence[Bucket], memory: Tensor, ranks: int, *, by_active: bool
    ) -> None:
        """Divide means in place as the header in ``memory`` says."""
        kernel = _kernel(buckets, memory) if memory.is_cuda else None
        if kernel is None:
            by = divisor(memory, ranks, by_active=by_active)
            divide([bucket.means for bucket in buckets], by)
            return
        rows = self._rows_of(buckets, memory.device)
        with torch.cuda.device(memory.device):
            arguments = [rows, memory, ranks, int(by_active)]
            kernel((_BLOCKS, len(buckets), 1), (_THREADS, 1, 1), arguments)

    def _rows_of(self, buckets: Sequence[Bucket], device: torch.device) -> Tensor:
        places = [(bucket.buffer.data_ptr(), bucket.size) for bucket in buckets]
        if places != self._places or self._rows.device != device:
            self._places, self._rows = places, torch.tensor(places, device=device)
        return self._rows


_BLOCKS, _THREADS = 256, 256
_NAMES = {torch.float32: "float", torch.float64: "double"}
_LIMITS = {  # the smallest divisor, and the infinite one
    torch.float32: ("1.1754943508222875e-38f", "__int_as_float(0x7f800000)"),
    torch.float64: ("2.2250738585072014e-308", "__longlong_as_double(0x7ff0000000000000LL)"),
}
_SOURCE = """
extern "C" __global__ void divide(
    const long long* rows, const HEADER* header, int ranks, int by_active)
{
    HEADER divisor = 1;
    if (header[3] > 0) {
        divisor = header[0];
    } else if (by_active) {
        int active = 0;
        for (int rank = 0; rank < ranks; rank++)
            active += header[FIXED + rank] > 0;
        divisor = (HEADER)active / (HEADER)ranks;
    }
    if (divisor < TINY)
        divisor = TINY;
    if (header[1] > 0 || header[2] > 0)
        divisor = INFINITE;
    if (divisor == 1)
        return;
    MEANS* means = (MEANS*)rows[2 * blockIdx.y];
    long long count = rows[2 * blockIdx.y + 1];
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        means[i] = divisor == INFINITE ? (MEANS)0 : means[i] / (MEANS)divisor;
}
"""


def _kernel(buckets: Sequence[Bucket], memory: Tensor) -> Kernel | None:
    if any(type(bucket) is not Bucket for bucket in buckets):  # their means lie elsewhere
        return None
    kind, *others = {bucket.buffer.dtype for bucket in buckets}
    if others or kind not in _NAMES or memory.dtype not in _NAMES:
        return None
    return _kernel_for(kind, memory.dtype, memory.device)


@functools.cache
def _kernel_for(kind: torch.dtype, header: torch.dtype, device: torch.device) -> Kernel | None:
    tiny, infinite = _LIMITS[header]
    words = {"HEADER": _NAMES[header], "MEANS": _NAMES[kind], "FIXED": str(FIXED)}
    source = _SOURCE
    for word, meant in {**words, "TINY": tiny, "INFINITE": infinite}.items():
        source = source.replace(word, meant)
    return compiled(source, "divide", device)
