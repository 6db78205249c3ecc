"""Digests of tensors: one number each, the same wherever the same bits lie.

A tensor is read as 64-bit numbers. Each is multiplied by an odd number that belongs to its place,
and all are added up, modulo 2**64. To flip one bit adds or takes away a power of two, times an odd
number: never a multiple of 2**64. So a flipped bit always shows; other damage goes unseen with
a chance of about 2**-64. It is made where the tensor lies, on a GPU too, at the speed of memory:
this finds accidents. It is no protection against somebody who looks for a collision.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

_BLOCK = 1 << 17  # numbers that are multiplied at a time: 1 MiB, which stays in a CPU's cache
_PRIME = 0x9E3779B97F4A7C15  # odd; a block's sum is multiplied by a power of it
_MODULUS = 1 << 64


def digest(tensor: Tensor) -> int:
    """The digest of a tensor's bits, in the order of its elements; 0 to 2**64 - 1."""
    with torch.no_grad():
        raw = _bytes_of(tensor)
        count = raw.numel() // 8
        rest = raw.numel() % 8
        words = (raw[: 8 * count] if rest else raw).view(torch.int64)
        total = raw.numel()
        for found in _sums(words, count):
            total = (total * _PRIME + found) % _MODULUS
        last = int.from_bytes(bytes(raw[8 * count :].tolist()), "little") if rest else 0
        return (total * _PRIME + last) % _MODULUS


def _sums(words: Tensor, count: int) -> list[int]:
    """The sum of each block of numbers, each times the number of its place."""
    odd = _odd_numbers(words.device)
    if words.device.type == "cpu":
        blocks = words.split(_BLOCK) if count > _BLOCK else (words,)
        return [int(torch.dot(block, odd[: block.numel()])) for block in blocks]
    sums = [(block * odd[: block.numel()]).sum() for block in words.split(_BLOCK)]
    return list(torch.stack(sums).tolist())  # one wait for the device


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digest of each of ``tensors``."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def in_one(numbers: Mapping[str, int]) -> int:
    """One digest for several, with their names; below 2**62, so that any engine carries it."""
    total = 0
    for name, number in numbers.items():
        for part in (int.from_bytes(name.encode(), "little"), number):
            total = (total * _PRIME + part + 1) % _MODULUS
            total ^= total >> 29
    return total >> 2


def _bytes_of(tensor: Tensor) -> Tensor:
    """A flat tensor of its bytes, at an address that is a multiple of eight."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    flat = real.contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return flat.view(torch.uint8)


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(19)
    numbers = torch.randint(-(1 << 62), 1 << 62, (_BLOCK,), generator=generator)
    return (numbers * 2 + 1).to(device)
