"""Optimizers that step a bucket's parameters as soon as its average is there.

torch keeps these names private, and its own DDP uses them. Over our DDP an optimizer steps at the
end of the pass, when the average is final: only then are weights and late gradients accounted for,
and only then is it certain that no rank's pass has failed.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from .._exchange import one_tensor
from ..errors import HookStateError
from .allreduce import Hook, allreduce_hook

# The kind of optimizer → what makes an OverlappedOptimizer of it.
_overlapped: dict[type, Callable[..., "OverlappedOptimizer"]] = {}


class _OptimizerHookState:
    """A functional optimizer (one with ``step_param``) and its parameters."""

    __slots__ = ["functional_optimizer", "params_to_optimize"]

    def __init__(self, functional_optim: Any, params: Iterable[Tensor] | None = None) -> None:
        if not hasattr(functional_optim, "step_param"):
            raise HookStateError(
                f"Class {type(functional_optim)} must implement method step_param.",
                "torch.distributed.optim.as_functional_optim makes such optimizers.",
            )
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)

    def concerns(self, param: Tensor) -> bool:
        """Return whether the optimizer steps this parameter."""
        return self.params_to_optimize is None or param in self.params_to_optimize


def _hook_then_optimizer(hook: Hook, optimizer_state: _OptimizerHookState) -> Hook:
    """Return a hook that steps the parameters of a bucket once ``hook`` has averaged it.

    It works with plain passes only: it does not know the sum of the weights, by which DDP divides
    later.
    """

    def hook_then_optimizer_wrapper(
        hook_state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        def step(future: Future[Any]) -> Tensor:
            settle(bucket, one_tensor(future.value()))
            for gradient, param in zip(bucket.gradients(), bucket.parameters(), strict=True):
                if optimizer_state.concerns(param):
                    optimizer_state.functional_optimizer.step_param(param, gradient)
            return bucket.buffer()

        return hook(hook_state, bucket).then(step)

    return hook_then_optimizer_wrapper


def settle(bucket: Any, average: Tensor) -> None:
    """Make ``bucket.gradients()`` the averages, wherever the hook has put them."""
    buffer = bucket.buffer()
    if average.data_ptr() != buffer.data_ptr():
        buffer.copy_(average.view_as(buffer))


def register_overlapped(optim_cls: type) -> Callable[[type], type]:
    """A class decorator: the class overlaps optimizers of ``optim_cls``."""

    def register(overlapped: type) -> type:
        if overlapped in _overlapped.values():
            raise HookStateError(
                f"{overlapped} already registered with optim_cls; trying to re-register it for "
                f"{optim_cls} is not supported.",
                "Write a subclass for each kind of optimizer.",
            )
        _overlapped[optim_cls] = overlapped
        return overlapped

    return register


class OverlappedOptimizer(ABC):
    """Base class of optimizers that attach themselves to a wrapped model."""

    def __init__(self, optim_cls: type) -> None:
        self.optim_cls = optim_cls

    @abstractmethod
    def register_ddp(self, ddp: Any) -> None:
        """Step in the backward passes of ``ddp`` from now on."""

    @abstractmethod
    def register_fsdp(self, fsdp: Any) -> None:
        """Step in the backward passes of ``fsdp`` from now on."""


@register_overlapped(Optimizer)
class _OverlappedStandardOptimizer(OverlappedOptimizer):
    """Any of torch's optimizers."""

    def __init__(self, optim_cls: type, params: Any, *optim_args: Any, **optim_kwargs: Any) -> None:
        super().__init__(optim_cls)
        self._params = None if params is None else list(params)
        self._args, self._kwargs = optim_args, optim_kwargs

    def register_ddp(self, ddp_inst: Any) -> None:
        """Step in the passes of ``ddp_inst``, which cannot have another communication hook."""
        if hasattr(ddp_inst, "after_backward"):  # ours steps after all is divided
            ddp_inst._register_fused_optim(
                self.optim_cls, *self._args, optim_params=self._params, **self._kwargs
            )
            return
        from torch.distributed.optim import as_functional_optim

        optimizer = as_functional_optim(self.optim_cls, *self._args, **self._kwargs)
        state = _OptimizerHookState(optimizer, self._params)
        ddp_inst.register_comm_hook(None, _hook_then_optimizer(allreduce_hook, state))

    def register_fsdp(self, fsdp: Any) -> None:
        """Raise an error, as torch does."""
        raise NotImplementedError(f"{type(self).__name__} does not support overlapped FSDP.")


def _as_overlapped_optim(
    optim_cls: type, params: Any, *args: Any, **kwargs: Any
) -> OverlappedOptimizer:
    """The overlapped form of an optimizer class, with its arguments."""
    for base in inspect.getmro(optim_cls):
        if base in _overlapped:
            return _overlapped[base](optim_cls, params, *args, **kwargs)
    return _OverlappedStandardOptimizer(optim_cls, params, *args, **kwargs)
