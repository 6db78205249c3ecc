"""Tensors as stretches of memory: one dimension, elements in the order in which they lie there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import foreach


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gaps and overlaps."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def local_part(tensor: Any) -> Tensor:
    """What this rank holds of ``tensor``: all of it, unless it is a DTensor."""
    mine: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return mine


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a plain tensor, not a subclass with behaviour of its own such as DTensor."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and is_dense(tensor)


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """How its elements lie in memory, or would lie if they were packed."""
    if is_dense(tensor):
        return tuple(tensor.stride())
    return tuple(torch.empty(tensor.shape, device="meta").stride())


def memory_of(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, in one dimension; writing there changes the tensor."""
    mine = tensor.detach()
    return mine.as_strided((mine.numel(),), (1,))


def memory_like(tensor: Tensor, param: Tensor) -> Tensor:
    """The elements of ``tensor`` in the order of ``param``'s memory; a copy only if need be."""
    mine = tensor.detach()
    strides = strides_of(param)
    if is_dense(mine) and tuple(mine.stride()) == strides:
        return memory_of(mine)
    flat = torch.empty(mine.numel(), dtype=mine.dtype, device=mine.device)
    flat.as_strided(mine.shape, strides).copy_(mine)
    return flat


def shaped_like(flat: Tensor, param: Tensor) -> Tensor:
    """Memory that is ordered as ``param``'s, in its shape."""
    return flat.as_strided(param.shape, strides_of(param), flat.storage_offset())


def move_into(params: Sequence[Tensor], buffer: Tensor) -> None:
    """Move the parameters into ``buffer``, one after the other; it holds their data from now on."""
    at = 0
    for param in params:
        stretch = buffer[at : at + param.numel()]
        place = stretch.as_strided(param.shape, strides_of(param), stretch.storage_offset())
        place.copy_(param.detach())
        param.data = place
        at += param.numel()
    buffer[at:].zero_()


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device and type together, for calls that take only such."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target."""
    if targets:
        foreach.copy_(list(targets), list(sources))
