"""Why a step cannot be compiled, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._reducer import local
from .._torch import dynamo, inductor
from .._torch.tensors import hooks_of, late_hooks_of
from ..ddp import DistributedDataParallel
from ..errors import HookRefusedError


def never(ddp: DistributedDataParallel) -> str:
    """What will not change and cannot be traced; empty if there is nothing of the kind."""
    reducer = ddp.replica.reducer
    if reason := dynamo.missing_for_steps():
        return reason
    if ddp.mixed_precision is not None:
        return "the wrapper has mixed_precision; give autocast= to train_step instead"
    if ddp.replica.companions:
        return "the wrapper delays the averages of some parameters"
    if reducer.scattered:
        return "an optimizer holds its part of the gradients"
    for number, (name, param) in enumerate(zip(reducer.names, reducer.params, strict=True)):
        if reducer.is_sparse(number):
            return f"gradients of {name} are sparse"
        if local(param) is not param:
            return f"{name} is a DTensor"
    return ""


def unbuildable(ddp: DistributedDataParallel, backend: object) -> str:
    """What Inductor lacks to build code for the CPU; by itself it logs pages before it says so."""
    on_cpu = any(param.device.type == "cpu" for param in ddp.replica.reducer.params)
    return inductor.missing_tools() if backend == "inductor" and on_cpu else ""


def now(ddp: DistributedDataParallel, params: Sequence[Tensor]) -> str:
    """Hooks of parameters, which a traced backward pass would not call."""
    reducer = ddp.replica.reducer
    for slot, param in enumerate(params):
        known = slot < len(reducer.names)
        own = reducer.hooks_on(slot) if known else 0
        if len(hooks_of(param)) + len(late_hooks_of(param)) > own:
            name = reducer.names[slot] if known else f"parameter {slot} of the optimizer"
            return f"{name} has a hook of its own"
    return ""


def of(error: Exception) -> str:
    """Why something could not be compiled; empty for an error of another kind."""
    if isinstance(error, HookRefusedError):
        return str(error)
    return dynamo.reason_of(error)
