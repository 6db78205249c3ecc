"""Makes a call's tensors fit an engine: contiguous going in, copied back where they were not.

An engine reads memory. A conjugate, and the imaginary part of one, is a tensor whose memory holds
something else, so such tensors are copied like strided ones. Copies are no steps of autograd.

Also here: sums scaled beforehand (PREMUL_SUM), which only NCCL has of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch.tensors import overlaps_itself
from ..errors import CollectiveArgumentError
from .engine import Call
from .work import Finisher

_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


def make_dense(call: Call, rank: int) -> Finisher | None:
    """Replace strided tensors of ``call`` by contiguous ones; the finisher copies results back."""
    same, wanted = call.outputs is call.inputs, call.outputs
    for tensor in call.inputs if same else (*call.inputs, *wanted):
        if not tensor.is_contiguous() or tensor.is_neg():
            break
        if tensor.dtype in _COMPLEX and tensor.is_conj():
            break
    else:
        return None
    _refuse_overlap(call, rank)
    with torch.no_grad():
        call.inputs = [_dense(t) for t in call.inputs]
        call.outputs = call.inputs if same else [_dense(t) for t in call.outputs]
    pairs = [(old, new) for old, new in zip(wanted, call.outputs, strict=True) if old is not new]

    @torch.no_grad()
    def copy_back(error: BaseException | None) -> None:
        if error is None:
            for old, new in pairs:
                old.copy_(new)

    return copy_back


def _dense(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


def _refuse_overlap(call: Call, rank: int) -> None:
    for tensor in call.outputs:
        if overlaps_itself(tensor):
            raise CollectiveArgumentError(
                rank,
                call.kind,
                "output",
                "a tensor with memory of its own for each element",
                f"an expanded one (shape {list(tensor.shape)}, strides {list(tensor.stride())})",
            )


@torch.no_grad()
def scale(call: Call, factor: float | Tensor, rank: int) -> None:
    """Multiply the inputs beforehand; the last thing before an engine gets them."""
    if call.kind == "reduce" and rank != call.root:  # only the root's tensor may change
        call.inputs = call.outputs = [_scaled(t, factor) for t in call.inputs]
    elif call.outputs is call.inputs:
        for tensor in call.inputs:
            tensor.mul_(factor)
    else:
        call.inputs = [_scaled(t, factor) for t in call.inputs]


def _scaled(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """The product in the type of ``tensor``, whatever that of ``factor`` is."""
    return torch.mul(tensor, factor, out=torch.empty_like(tensor))
