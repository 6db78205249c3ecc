"""The wrapper-free form: the model stays what it is, and is kept in step."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ..errors import ModuleArgumentError
from ..policies import BucketCaps
from . import torch_args
from .replica import Replica

_Model = TypeVar("_Model", bound=nn.Module)
_KEPT = "_paceline_replica"


def parallelize(
    model: _Model,
    group: ProcessGroup | None = None,
    *,
    bucket_cap_mb: float | None = None,
    forward_sync_buffers: bool = True,
    init_sync: bool = True,
) -> _Model:
    """Average the model's gradients over ``group`` from now on; returns the same object.

    Keys of its ``state_dict`` and all its methods stay as they were. :func:`replica_of` has what
    the wrapper has as methods: ``no_sync``, ``accumulate``, ``sync_grads``. A copy of the model is
    an ordinary model.
    """
    copied = _KEPT in vars(model)  # a copy keeps the hooks, and None in the place of the replica
    if vars(model).get(_KEPT) is not None:
        raise ModuleArgumentError("This model is parallelized already.")
    params = list(model.parameters())
    torch_args.check_parameters(params, may_be_none=False)
    device = torch_args.choose_devices(params, None, None).device
    chosen = torch_args.wrapped_group(torch_args.choose_group(group, None, model), device)
    policy = torch_args.choose_policy(BucketCaps.create(bucket_cap_mb, None))
    replica = Replica(
        model,
        chosen,
        policy,
        ignored=torch_args.ignored_names(model),
        init_sync=init_sync,
        forward_buffers=forward_sync_buffers,
    )
    object.__setattr__(model, _KEPT, replica)
    if not copied:
        model.register_forward_pre_hook(_before)
        model.register_forward_hook(_after, always_call=True)
    return model


def replica_of(model: nn.Module) -> Replica:
    """What keeps a parallelized model in step."""
    replica: Replica | None = vars(model).get(_KEPT)
    if replica is None:
        raise ModuleArgumentError(
            "This model is not parallelized.", "Call paceline.parallelize(model) first."
        )
    return replica


@torch._disable_dynamo(recursive=True)
def _before(model: nn.Module, _inputs: Any) -> None:
    replica = vars(model).get(_KEPT)
    if replica is not None:  # None in a copy
        replica.handled = sys.exc_info()[1]
        replica.before_forward()


@torch._disable_dynamo(recursive=True)
def _after(model: nn.Module, _inputs: Any, output: Any) -> None:
    replica = vars(model).get(_KEPT)
    if replica is None:
        return
    error = sys.exc_info()[1]
    raised = error is not None and error is not replica.handled
    replica.handled = None
    if output is None and raised:  # always_call: the forward raised
        replica.forward_failed(error)
    else:
        replica.after_forward(output)
