"""A gradient as plain memory: strided views, and the local part of a DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._exchange import strides_of
from .._torch.tensors import is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The memory this rank holds of ``tensor``: itself, unless it is a DTensor."""
    return local_part(tensor) if is_dtensor(tensor) else tensor


def settled(grad: Tensor, param: Tensor) -> Tensor:
    """``grad`` laid out over the mesh as ``param`` is; plain tensors are so already."""
    if not is_dtensor(grad) or grad.placements == param.placements:  # type: ignore[attr-defined]
        return grad
    return grad.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined,no-any-return]


def view_for(flat: Tensor, start: int, param: Tensor) -> Tensor:
    """The stretch of ``flat`` from ``start`` in the shape of ``param``'s memory.

    It has the parameter's strides where they are dense, so that optimizers find both alike. It is
    not a view in autograd's sense: ``detach_`` works on it as on any gradient.
    """
    mine = local(param)
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(
        flat.untyped_storage(), flat.storage_offset() + start, mine.shape, strides_of(mine)
    )


def like(view: Tensor, param: Tensor) -> Tensor:
    """``view`` as what ``param.grad`` may be: a DTensor if the parameter is one."""
    if not is_dtensor(param):
        return view
    from torch.distributed.tensor import DTensor

    sharded: DTensor = param  # type: ignore[assignment]
    return DTensor.from_local(
        view,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def add_to_grad(param: Tensor, total: Tensor, *, sparse: bool) -> None:
    """Add ``total``, a plain tensor, to ``param.grad``, which stays sparse if it is to be."""
    if sparse:
        entries = total.to_sparse(1)
        param.grad = entries if param.grad is None else param.grad + entries
    elif param.grad is None:
        param.grad = like(total, param)
    else:
        local(param.grad).add_(total)


def add_part(param: Tensor, part: Tensor, times: float = 1.0) -> None:
    """Add ``part``, a gradient of this rank's in any form, to ``param.grad``."""
    if param.grad is None:
        param.grad = part if times == 1 else part * times
        return
    grad = settled(param.grad, param)
    if grad.is_sparse and not part.is_sparse:
        grad = (part * times).add_(grad)
    else:
        local(grad).add_(local(part), alpha=times)
    param.grad = grad
