"""Memory of a bucket: flat, with a stretch for each gradient; for good, or from pass to pass.

A *lazy* bucket has memory from the first gradient of a pass to the end of the pass. After that only
what lies in it keeps it: ``.grad`` of its parameters, where that is a stretch of the bucket. When
``zero_grad`` has dropped the last of these the memory is given back, to the group's heap, or to
torch, or to the system. Gradients that are not dropped are found where they lie by the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .tensors import like, local, view_for


class BucketMemory(NamedTuple):
    """One flat tensor, and each gradient's part of it."""

    buffer: Tensor
    views: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]  # the views, as what ``.grad`` may be


NOTHING = BucketMemory(torch.empty(0), (), ())


def cut(buffer: Tensor, params: Sequence[Tensor]) -> BucketMemory:
    """``buffer`` with stretches for the gradients of ``params``, one after another."""
    views, at = [], 0
    for param in params:
        views.append(view_for(buffer, at, param))
        at += local(param).numel()
    grads = tuple(like(view, param) for view, param in zip(views, params, strict=True))
    return BucketMemory(buffer, tuple(views), grads)


class LazyMemory:
    """Memory that a bucket for ``params`` has only while a pass needs it; ``make`` makes it."""

    def __init__(self, params: Sequence[Tensor], make: Callable[[], Tensor]) -> None:
        self._params, self._make = params, make
        self._lent: tuple[TensorWeakRef, ...] = ()  # what .grad was when it was let go
        self._numel, self._at = 0, 0

    def get(self) -> BucketMemory:
        """Where a gradient still lies in what was let go of, that; otherwise other memory."""
        lent = [g if g is not None and self._is_in_place(g) else None for g in self.lent()]
        kept = next((local(g) for g in lent if g is not None), None)
        if kept is None:
            return cut(self._make(), self._params)
        flat = torch.empty(0, dtype=kept.dtype, device=kept.device)
        flat.set_(kept.untyped_storage(), 0, (self._numel,), (1,))
        memory = cut(flat, self._params)
        grads = (new if old is None else old for new, old in zip(memory.grads, lent, strict=True))
        return BucketMemory(memory.buffer, memory.views, tuple(grads))

    def let_go(self, memory: BucketMemory) -> None:
        """Keep nothing of it but where gradients may lie."""
        self._lent = tuple(map(TensorWeakRef, memory.grads))
        self._numel, self._at = memory.buffer.numel(), memory.buffer.data_ptr()

    def lent(self) -> list[Tensor | None]:
        """By slot, ``.grad`` where it is what it was when the memory was let go of."""
        if not self._lent:
            return [None] * len(self._params)
        rows = zip(self._params, self._lent, strict=True)
        return [grad if (grad := ref()) is param.grad else None for param, ref in rows]

    def _is_in_place(self, grad: Tensor) -> bool:
        """Whether it lies where it did; a program may have put other memory under it."""
        return local(grad).untyped_storage().data_ptr() == self._at
