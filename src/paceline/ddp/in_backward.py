"""Optimizers that step as soon as the gradients of a bucket are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._reducer import Bucket, Reducer
from ..errors import ModuleStateError


def adopt_optimizers(params: Sequence[nn.Parameter], reducer: Reducer) -> None:
    """Take over what ``apply_optimizer_in_backward`` set up: it must wait for the average."""
    mine = [p for p in params if hasattr(p, "_in_backward_optimizers")]
    if not mine:
        return
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for param in mine:
        for handle in param_to_optim_hook_handle_map.get(param, []):
            handle.remove()

    def step(bucket: Bucket) -> None:
        for param in bucket.params:
            for optimizer in getattr(param, "_in_backward_optimizers", ()):
                optimizer.step()
                param.grad = None

    reducer.after_bucket.append(step)


def register_fused(
    ddp: Any,
    kind: type,
    args: Sequence[Any],
    params: Iterable[Tensor] | None,
    kwargs: dict[str, Any],
) -> None:
    """One optimizer for each parameter, stepped with its bucket."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ModuleStateError(
            f"{kind} does not support overlapped DDP. Please file an issue to PyTorch or the "
            f"respective owner of {kind}. It is not a torch.optim.Optimizer, and every rank would "
            "refuse it."
        )
    if ddp._comm_hooks:
        raise ModuleStateError("A fused optimizer and a communication hook do not go together.")
    chosen = ddp._module_parameters if params is None else list(params)
    optimizers = {p: kind([p], *args, **kwargs) for p in chosen if p.requires_grad}

    def step(bucket: Bucket) -> None:
        for param in bucket.params:
            if param in optimizers and param.grad is not None:
                optimizers[param].step()

    ddp._replica.reducer.after_bucket.append(step)
