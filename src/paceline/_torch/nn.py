"""Modules: where they keep their tensors and hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _BatchNorm

batch_norm = _BatchNorm.forward
"""What every BatchNorm does by itself; SyncBatchNorm has another forward of the same name."""


def check_batch(layer: nn.SyncBatchNorm, given: Tensor) -> None:
    """Raise what ``layer`` raises for an input of a shape that it does not normalize."""
    layer._check_input_dim(given)
    layer._check_non_zero_input_channels(given)


def parameters_dict(module: nn.Module) -> dict[str, Any]:
    """Where ``module`` itself keeps its parameters; ``setattr`` would check and copy each."""
    return module._parameters


def buffers_dict(module: nn.Module) -> dict[str, Tensor | None]:
    """Where ``module`` itself keeps its buffers, to read in each forward: ``buffers()`` walks."""
    return module._buffers


def share_tensors(module: nn.Module, other: nn.Module) -> None:
    """Let ``module`` have the parameters, buffers and children of ``other``, now and later."""
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        module.__dict__[name] = other.__dict__[name]


def flat_weights(module: nn.RNNBase) -> dict[str, Any]:
    """The lists that an RNN keeps of its own parameters, as attributes; they do not follow."""
    return {name: v for name, v in vars(module).items() if name.startswith("_flat_weight")}


def forward_hooks(module: nn.Module) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
    """Yield hooks before and after the forward, each with what is noted of them beside.

    A handle removes what its owner keeps; those that a copy of a module came with have no handle.
    """
    yield module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    yield module._forward_hooks, module._forward_hooks_always_called


# -- backward hooks, which Dynamo refuses or drops ------------------------------------------------


def has_global_backward_hooks() -> bool:
    """Whether there are hooks of all modules (``register_module_full_backward_hook``)."""
    return bool(_module._global_backward_hooks or _module._global_backward_pre_hooks)


def backward_hooks(module: nn.Module) -> dict[int, Any]:
    """The hooks that are called with a module's gradients when they have passed it."""
    return module._backward_hooks


def backward_pre_hooks(module: nn.Module) -> dict[int, Any]:
    """The hooks that are called with a module's gradients before they pass it."""
    return module._backward_pre_hooks


def has_old_backward_hooks(module: nn.Module) -> bool:
    """Whether its hooks are of ``register_backward_hook``, which sees one operation's gradients."""
    return module._is_full_backward_hook is False and bool(module._backward_hooks)
