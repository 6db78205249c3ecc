"""Random numbers for rounding, the same ones for the same key.

A number that lies between two steps is rounded up with the probability of its distance from the
lower one; then rounding is right on average. Drawing a fresh number for every gradient takes ten
times as long as the rounding, so each row takes a stretch of one fixed table instead; its key says
which. A key is made of what the row is (parameter, place, step, rank), not of how many were drawn
before it: the same step of a run that was resumed rounds in the same way, however its buckets lie.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_LENGTH = 1 << 16
_LEVELS = 1 << 12  # values are well inside (0, 1): a number on a step is not moved off it
_ODD = (0x2545F4914F6CDD1D, 0x1B873593CC9E2D51, 0x369DEA0F31A53F85)


def mix(keys: Tensor, *numbers: int) -> Tensor:
    """Other keys, for other numbers."""
    for number, odd in zip(numbers, _ODD, strict=False):
        keys = keys * odd + (number + 1)
    return keys


def noise(keys: Tensor, width: int) -> Tensor:
    """For each key a row of ``width`` numbers between 0 and 1."""
    table = _table(str(keys.device))
    if width > _LENGTH // 2:
        table = table.repeat(-(-2 * width // _LENGTH))
    rows = table.unfold(0, width, 1)
    return rows.index_select(0, _scatter(keys) % len(rows))


def _scatter(keys: Tensor) -> Tensor:
    """Spread keys over all non-negative numbers."""
    for odd in _ODD[:2]:
        keys = (keys ^ ((keys >> 29) & 0x7FFFFFFFF)) * odd
    return (keys ^ ((keys >> 32) & 0xFFFFFFFF)) & 0x7FFFFFFFFFFFFFFF


@lru_cache(maxsize=8)
def _table(device: str) -> Tensor:
    """Every level equally often, in an order that never changes."""
    generator = torch.Generator().manual_seed(20260)
    levels = torch.randperm(_LENGTH, generator=generator) % _LEVELS
    return ((levels + 0.5) / _LEVELS).to(device)
