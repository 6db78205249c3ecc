"""Means of whole numbers, where an engine can only add.

A mean of integers fits their type, but their sum may not: int8 100 and 100 add up to -56. So they
are added as int64, and int64 itself in two parts: what is left when each number is divided by the
number of ranks, and how often that went. The mean is cut off towards zero, as torch divides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..engine import Call


def applies(call: Call) -> bool:
    """Whether ``call`` asks for a mean of integers."""
    if call.reduction != "avg":
        return False
    dtype = call.outputs[0].dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def as_sum(call: Call, rank: int, size: int) -> tuple[Call, Callable[[], None]]:
    """A sum that cannot overflow instead of ``call``, and what to do when it is done."""
    wide = call.outputs[0].dtype is torch.int64
    rows = size if call.kind == "reduce_scatter_single" else 1
    inputs = [_parts(t, size, rows) if wide else t.to(torch.int64) for t in call.inputs]
    kept = call.kind in ("all_reduce", "reduce")
    outputs = inputs if kept else [_room(t, wide) for t in call.outputs]
    instead = dataclasses.replace(call, inputs=inputs, outputs=outputs, reduction="sum")

    def finish() -> None:
        if call.kind == "reduce" and call.root != rank:
            return
        for target, total in zip(call.outputs, outputs, strict=True):
            mean = _from_parts(total, size) if wide else total.div(size, rounding_mode="trunc")
            target.copy_(mean.view_as(target))

    return instead, finish


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of ``tensors``, all of one integer type, as that type."""
    dtype, size = tensors[0].dtype, len(tensors)
    if dtype is torch.int64:
        parts = sum((_parts(t, size, 1) for t in tensors), torch.zeros((), dtype=dtype))
        return _from_parts(parts, size).view_as(tensors[0])
    if dtype is torch.uint64:
        return _mean_of_uint64([t.view(torch.int64) for t in tensors]).view(dtype)
    total = sum((t.to(torch.int64) for t in tensors), torch.zeros((), dtype=torch.int64))
    return total.div(size, rounding_mode="trunc").to(dtype)


def _room(like: Tensor, wide: bool) -> Tensor:
    return like.new_empty(2 * like.numel() if wide else like.shape, dtype=torch.int64)


def _parts(tensor: Tensor, size: int, rows: int) -> Tensor:
    """Quotients, then remainders (from 0 to size), for each of ``rows`` equal stretches."""
    flat = tensor.reshape(rows, -1)
    quotients = flat.div(size, rounding_mode="floor")
    return torch.stack([quotients, flat - quotients * size], 1).reshape(-1)


def _from_parts(parts: Tensor, size: int) -> Tensor:
    quotients, remainders = parts.view(2, -1)
    carried = remainders.div(size, rounding_mode="floor")
    lowest, left = quotients + carried, remainders - carried * size
    below = (lowest < 0) & (left > 0)
    return torch.add(lowest, below)


def _mean_of_uint64(tensors: Sequence[Tensor]) -> Tensor:
    """On int64, which has the same bits and lacks unsigned division."""
    size = len(tensors)
    quotients = remainders = torch.zeros_like(tensors[0])
    for tensor in tensors:
        half = (tensor >> 1) & torch.iinfo(torch.int64).max
        quotient = half.div(size, rounding_mode="floor") << 1  # the true one, or one below
        left = tensor - quotient * size
        over = left.div(size, rounding_mode="floor")
        quotients, remainders = quotients + quotient + over, remainders + left - over * size
    return quotients + remainders.div(size, rounding_mode="floor")
