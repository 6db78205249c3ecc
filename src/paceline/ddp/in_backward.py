"""Optimizers that step as soon as the gradients of a bucket are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from .._reducer import Bucket, Reducer
from .._torch.ddp import optimizers_in_backward
from ..errors import ModuleStateError


def adopt_optimizers(params: Sequence[nn.Parameter], reducer: Reducer) -> None:
    """Take over what ``apply_optimizer_in_backward`` set up: it must wait for the average."""
    mine = [p for p in params if optimizers_in_backward(p)]
    if not mine:
        return
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for param in mine:
        for handle in param_to_optim_hook_handle_map.get(param, []):
            handle.remove()

    def step(bucket: Bucket) -> None:
        for param in bucket.params:
            for optimizer in optimizers_in_backward(param):
                optimizer.step()
                param.grad = None

    reducer.observers.on_bucket(step)


def check_fused(kind: type, *, hooked: bool) -> None:
    """Refuse what is no optimizer, and any if the wrapper has a communication hook."""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ModuleStateError(
            f"{kind} does not support overlapped DDP. Please file an issue to PyTorch or the "
            f"respective owner of {kind}. It is not a torch.optim.Optimizer, and every rank would "
            "refuse it."
        )
    if hooked:
        raise ModuleStateError("A fused optimizer and a communication hook cannot be combined.")


def step_with_buckets(optimizers: Mapping[Tensor, Optimizer], reducer: Reducer) -> None:
    """Step each parameter's optimizer when its bucket is averaged."""

    def step(bucket: Bucket) -> None:
        for param in bucket.params:
            if param in optimizers and param.grad is not None:
                optimizers[param].step()

    reducer.observers.on_bucket(step)
