"""Makes a call's tensors fit an engine: contiguous going in, copied back where they were not.

Also here: sums scaled beforehand (PREMUL_SUM), which only NCCL has of its own.
"""

from __future__ import annotations

from torch import Tensor

from .._torch.tensors import overlaps_itself
from ..errors import CollectiveArgumentError
from .engine import Call
from .work import Finisher


def make_dense(call: Call, rank: int) -> Finisher | None:
    """Replace strided tensors of ``call`` by contiguous ones; the finisher copies results back."""
    for tensor in call.inputs:
        if not tensor.is_contiguous():
            break
    else:
        for tensor in call.outputs:
            if not tensor.is_contiguous():
                break
        else:
            return None
    wanted = call.outputs
    _refuse_overlap(call, rank)
    same = call.outputs is call.inputs
    call.inputs = [t.contiguous() for t in call.inputs]
    call.outputs = call.inputs if same else [t.contiguous() for t in call.outputs]
    pairs = [(old, new) for old, new in zip(wanted, call.outputs, strict=True) if old is not new]

    def copy_back(error: BaseException | None) -> None:
        if error is None:
            for old, new in pairs:
                old.copy_(new)

    return copy_back


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


def scale(call: Call, factor: float | Tensor, rank: int) -> None:
    """Multiply the inputs beforehand; the last thing before an engine gets them."""
    if call.kind == "reduce" and rank != call.root:  # only the root's tensor may change
        call.inputs = call.outputs = [t * factor for t in call.inputs]
    elif call.outputs is call.inputs:
        for tensor in call.inputs:
            tensor.mul_(factor)
    else:
        call.inputs = [t * factor for t in call.inputs]
