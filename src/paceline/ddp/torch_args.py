"""torch's keyword arguments, checked and turned into ours; no other file knows the old names."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .._torch.ddp import device_index, ignored
from ..errors import ModuleArgumentError, ModuleStateError
from ..groups import Group, group_or_default
from ..policies import BucketCaps, Reduction

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Devices:
    """Where a module is, and where its inputs go."""

    device: torch.device
    device_ids: list[int] | None
    output_device: int | None
    several: bool


@dataclass(frozen=True)
class BufferSync:
    """When buffers are made alike."""

    at_init: bool
    in_forward: bool


def choose_group(
    process_group: ProcessGroup | None, device_mesh: Any, module: nn.Module
) -> ProcessGroup:
    """The group to average over: the given one, the mesh's, the current one, torch's default."""
    if process_group is not None and device_mesh is not None:
        raise ModuleStateError(
            "Cannot specify both process_group and device_mesh arguments.", "Leave one out."
        )
    if device_mesh is None:
        return group_or_default(process_group)
    if device_mesh.ndim != 1:
        raise ModuleStateError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    group: ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


def wrapped_group(process_group: ProcessGroup, device: torch.device) -> Group:
    """Our interface around any group."""
    return Group.wrap(process_group, device)


def ignored_names(module: nn.Module) -> set[str]:
    """Parameters and buffers that the module was marked to keep to itself."""
    return set(ignored(module))


def check_parameters(params: Sequence[Tensor], *, may_be_none: bool) -> None:
    """There is something to train, and it has a shape."""
    for param in params:
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ModuleStateError(
                "Modules with uninitialized parameters can't be used with "
                "`DistributedDataParallel`.",
                "Run a dummy forward pass to correctly initialize the modules.",
            )
    if not any(p.requires_grad for p in params) and not may_be_none:
        raise ModuleStateError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient."
        )


def choose_devices(
    params: Sequence[Tensor], device_ids: Sequence[Any] | None, output_device: Any
) -> Devices:
    """Where inputs go; only a module on one accelerator takes ``device_ids``."""
    if device_ids is not None and len(device_ids) > 1:
        raise ModuleArgumentError("device_ids can only be None or contain a single element.")
    kinds = {p.device.type for p in params}
    if len(kinds) != 1:
        raise ModuleArgumentError(
            "DistributedDataParallel's input module must be on the same type of devices, but input "
            f"module parameters locate in {kinds}."
        )
    several = len({p.device for p in params}) > 1
    device = params[0].device
    if not device_ids or device.type == "cpu" or several:
        if device_ids or output_device:
            raise ModuleArgumentError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters on "
                f"{ {str(p.device) for p in params} }.",
                "Leave them out.",
            )
        return Devices(device, None, None, several)
    first = device_ids[0]
    output = first if output_device is None else output_device
    return Devices(device, [device_index(first, True)], device_index(output, True), False)


def choose_buffer_sync(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> BufferSync:
    """The old keyword ruled the construction as well, the new one only rules forward passes."""
    if broadcast_buffers is not None:
        if forward_sync_buffers is not None:
            text = (
                "Both `broadcast_buffers` and `forward_sync_buffers` were specified. "
                "`broadcast_buffers` is deprecated and its value is ignored when "
                "`forward_sync_buffers` is provided."
            )
        else:
            text = (
                "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. "
                "`forward_sync_buffers=False` still makes buffers alike at construction, "
                "which `broadcast_buffers=False` does not."
            )
        warnings.warn(text, FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return BufferSync(at_init=True, in_forward=forward_sync_buffers)
    both = True if broadcast_buffers is None else broadcast_buffers
    return BufferSync(at_init=both, in_forward=both)


def choose_policy(
    caps: BucketCaps,
    *,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool | None = None,
    static_graph: bool = False,
    skip_all_reduce_unused_params: bool = False,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    even_alone: bool = False,
    lazy: bool = False,
    shards: int | None = None,
) -> Reduction:
    """How gradients are averaged; views into buckets unless that is refused."""
    return Reduction(
        caps,
        grads_are_views=gradient_as_bucket_view is not False,
        find_unused=find_unused_parameters,
        static_graph=static_graph,
        strict=strict,
        skip_unused=skip_all_reduce_unused_params,
        dtype=dtype,
        even_alone=even_alone,
        lazy=lazy,
        shards=shards,
    )


def check_delayed(named: Iterable[Any] | None, hooked: Tensor | None) -> None:
    """Delayed parameters and the one that sets them off come together."""
    if (named is None) != (hooked is None):
        raise ModuleArgumentError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same "
            "time."
        )


def warn_of_check_reduction() -> None:
    """It has had no effect in torch for years."""
    warnings.warn(
        "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please "
        "avoid using it.",
        FutureWarning,
        stacklevel=3,
    )


def check_shards(shards: object, mixed_precision: object, delayed: Sequence[object]) -> int | None:
    """How many shards a step has; None: it has none."""
    if shards is None:
        return None
    if type(shards) is not int or shards < 1:
        raise ModuleArgumentError(
            f"shards: expected a whole number of shards, at least 1, got {shards!r}. Every rank "
            "raises this.",
            "It is how many parts a step's batch has on all ranks together.",
        )
    if mixed_precision is not None or delayed:
        what = "delay_all_reduce_named_params" if delayed else "mixed_precision"
        raise ModuleArgumentError(
            f"shards={shards} with {what}. Every rank raises this.",
            "Leave it out; torch.autocast works inside a shard.",
        )
    return shards
