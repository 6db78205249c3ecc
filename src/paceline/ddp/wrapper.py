# mypy: disable-error-code="override, misc"
# (torch's class has no annotations worth inheriting, and other ones in every version)
"""DistributedDataParallel: torch's interface around a Replica.

It is a subclass of torch's class, so that ``isinstance`` checks for torch's class succeed, but it
uses none of its methods (``tests/ddp/test_wrapper.py`` checks that). Names that only torch's own
code uses are in ``torch_names.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from .._reducer import ScatteredGradients
from .._torch.autograd import is_profiling
from .._torch.c10d import has_left
from .._torch.ddp import active, move_inputs, set_active
from .._torch.dynamo import untraced
from ..errors import ModuleStateError
from ..groups import Group
from ..join import Joinable
from ..policies import BucketCaps, Reduction
from . import torch_args
from .averaged_passes import AveragedPasses
from .comm_hooks import CommHooks
from .copies import Copies
from .delayed import Delayed
from .finalization import ManualFinalization
from .in_backward import adopt_optimizers
from .in_graph import Traced, forward_in_graph, number
from .join_names import JoinsUneven
from .joining import announce_step
from .mixed_precision import Caster, _MixedPrecision, strip
from .moving import Move
from .replica import Replica
from .shard_replica import ShardReplica
from .stand_in import StandsForTorchs
from .strictness import is_strict
from .torch_names import TorchNames
from .torch_reducer import TorchReducer

log = logging.getLogger(__name__)
_forwards = threading.local()  # the wrappers in whose forward this thread is


class DistributedDataParallel(
    AveragedPasses,
    CommHooks,
    JoinsUneven,
    Copies,
    ManualFinalization,
    TorchNames,
    metaclass=StandsForTorchs,
):
    """Wraps a module so that backward averages gradients over all ranks.

    Takes every keyword of torch's class. ``find_unused_parameters`` and ``static_graph`` are not
    needed. ``.grad`` is a view of a bucket unless ``gradient_as_bucket_view=False``.
    """

    _active_ddp_module: Any = None  # Dynamo asks for it

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        shards: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self._error = ""
        torch_args.check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.process_group = torch_args.choose_group(process_group, device_mesh, module)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        delayed = list(delay_all_reduce_named_params or ())
        self.parameters_to_ignore = torch_args.ignored_names(module) | {n for n, _ in delayed}
        self._module_parameters = [
            p for n, p in module.named_parameters() if n not in self.parameters_to_ignore
        ]
        torch_args.check_parameters(self._module_parameters, may_be_none=bool(delayed))
        everything = self._module_parameters or [p for _, p in delayed]
        devices = torch_args.choose_devices(everything, device_ids, output_device)
        self.device, self.device_type = devices.device, devices.device.type
        self.device_ids, self.output_device = devices.device_ids, devices.output_device
        self.is_multi_device_module = devices.several
        self.dim = dim
        self.module = module
        buffers = torch_args.choose_buffer_sync(broadcast_buffers, forward_sync_buffers)
        if check_reduction:
            torch_args.warn_of_check_reduction()
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.shards = torch_args.check_shards(shards, mixed_precision, delayed)
        self._require_manual_backward_finalization = False
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.static_graph = static_graph
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self.use_side_stream_for_tensor_copies = (
            os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
        )
        self._caps = BucketCaps.create(bucket_cap_mb, bucket_cap_mb_list)
        self._forward_sync_buffers = buffers.in_forward
        self._init_state()
        group = torch_args.wrapped_group(self.process_group, self.device)
        self._delayed = Delayed(delayed, param_to_hook_all_reduce, group) if delayed else None
        self._delayed_names = _names_of(module, delayed, param_to_hook_all_reduce)
        self._delay_all_reduce_all_params = not self._module_parameters
        self._build(group, init_sync=init_sync, init_buffers=buffers.at_init)
        if static_graph and find_unused_parameters:
            _warn_static()

    def _init_state(self) -> None:
        """Set what a copy does not inherit."""
        self._comm_hook_name = ""
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._ddp_sink_clone = True
        self._lazy_init_ran = False
        self._has_rebuilt_buckets = False
        self._torch_logger: Any = None
        self._scattered: ScatteredGradients | None = None

    def _build(self, group: Any, *, init_sync: bool, init_buffers: bool = True) -> None:
        """Create everything that belongs to this process: the replica, hooks on the module."""
        self.traced = Traced(number(self), self._pre_forward, self._post_forward, self._forward)
        foreign = not isinstance(self.process_group, type(group)) and (
            type(self.process_group) is not ProcessGroup
        )
        policy = torch_args.choose_policy(
            self._caps,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            dtype=_transfer_dtype(self.mixed_precision),
            strict=is_strict(),
            even_alone=foreign or os.environ.get("PACELINE_SKIP_ALONE") == "0",
            lazy=self.lazy_bucket_allocation,
            shards=self.shards,
        )
        strip(self.module)
        self._caster = None
        if self.mixed_precision is not None:
            precision = _MixedPrecision.of(self.mixed_precision)
            self._caster = Caster(self.module, precision, self.parameters_to_ignore)
        self.replica = self._make_replica(
            group,
            policy,
            ignored=self.parameters_to_ignore,
            init_sync=init_sync,
            init_buffers=init_buffers,
            forward_buffers=self._forward_sync_buffers,
            chunk_bytes=self.broadcast_bucket_size,
            in_join=self._in_join,
            companions=() if self._delayed is None else (self._delayed.reducer,),
        )
        self._reducer = TorchReducer(self.replica)
        self.replica.reducer.finalization.require(self._require_manual_backward_finalization)

    def _make_replica(self, group: Group, policy: Reduction, **options: Any) -> Replica:
        kind = Replica if policy.shards is None else ShardReplica
        return kind(self.module, group, policy, **options)

    # -- forward ------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Broadcast buffers, run the module's forward, and prepare for its backward."""
        if torch.compiler.is_compiling():
            return forward_in_graph(self, *inputs, **kwargs)
        if not is_profiling():
            return self._forward(*inputs, **kwargs)
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            return self._forward(*inputs, **kwargs)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        try:
            output = self._run_ddp_forward(*inputs, **kwargs)
        except BaseException as error:
            if self._caster is not None:
                self._caster.restore()
            self.replica.forward_failed(error)
            raise
        return self._post_forward(output)

    @untraced(recursive=True)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._lazy_init_ran:
            self._lazy_init()
        self.replica.refuse_unfinalized()
        if self._join_config.enable:
            announce_step(self)
        self.replica.before_forward()
        if self._delayed is not None:
            self._delayed.before_forward()
        if not self.device_ids or not (inputs or kwargs):
            return inputs, kwargs
        device = torch.device(self.device_type, self.device_ids[0])
        moved, moved_kwargs = move_inputs(
            inputs, kwargs, device, self.use_side_stream_for_tensor_copies
        )
        return moved[0], moved_kwargs[0]

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    @untraced(recursive=True)
    def _post_forward(self, output: Any) -> Any:
        if self.find_unused_parameters and is_profiling():
            with torch.autograd.profiler.record_function("search_unused_parameters"):
                self.replica.after_forward(output)
        else:
            self.replica.after_forward(output)
        self._has_rebuilt_buckets = self.replica.reducer.rebuilt
        return output

    def _lazy_init(self) -> None:
        """Adopt optimizers that were set to run in backward."""
        if self.shards is not None:
            self._sharded().refuse_in_backward(self._module_parameters)
        adopt_optimizers(self._module_parameters, self.replica.reducer)
        self._lazy_init_ran = True

    @contextlib.contextmanager
    @untraced(recursive=False)
    def _inside_ddp_forward(self) -> Iterator[None]:
        stack = _forwards.__dict__.setdefault("stack", [])
        before = active()
        if isinstance(before, TorchNames) and before not in stack:
            before = None  # of another rank that is a thread, and may have left by then
        set_active(self)
        stack.append(self)
        try:
            yield
        finally:
            stack.pop()
            set_active(before)

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return active()

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Split inputs over devices, as DataParallel does."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Move inputs to a device."""
        device = torch.device(self.device_type, device_id)
        return move_inputs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Collect outputs of several devices."""
        return gather(outputs, output_device, dim=self.dim)

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Set the module's mode; ``eval()`` raises a failure of the last pass on a GPU."""
        if not mode:
            self.replica.hear()
        nn.Module.train(self, mode)
        return self

    def scatter_gradients(self) -> ScatteredGradients:
        """Leave each rank only its part of the averages, for a sharded optimizer.

        Every rank calls it, between two steps. From then on buckets are reduce-scattered, which
        sends half the bytes of an all-reduce; ``.grad`` of the parameters stays None after a
        backward pass, and the result has this rank's part of the averages.
        ``paceline.optim.ZeroRedundancyOptimizer`` calls it if it gets ``ddp=``.
        """
        self._scattered = self.replica.scatter_gradients()
        return self._scattered

    @property
    def scattered_gradients(self) -> ScatteredGradients | None:
        """This rank's part of the averages after :meth:`scatter_gradients`, else None."""
        return self._scattered

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including this rank's part of scattered ones."""
        nn.Module.zero_grad(self, set_to_none)
        if self._scattered is not None:
            self._scattered.clear(in_place=not set_to_none)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward pass now would average gradients."""
        return self.replica.averaging.on

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.replica.averaging.on = value

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether buffers may differ between ranks since the last forward."""
        return self.replica.buffers.stale

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self.replica.buffers.stale = value

    def _set_static_graph(self) -> None:
        if self.static_graph:
            import warnings

            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        if self.replica.reducer.passes:
            self._log_and_throw(
                ModuleStateError,
                "_set_static_graph() should be called before training loop starts.",
            )
        self.static_graph = True
        self.replica.make_static()
        if self.find_unused_parameters:
            _warn_static()

    def _update_process_group(self, new_process_group: ProcessGroup) -> None:
        """Go on in another group; its ranks agree on buckets anew, whatever they had before.

        A communication hook and SyncBatchNorm layers that were given the old group follow.
        """
        self._has_rebuilt_buckets = False
        if has_left(new_process_group):
            self.replica.reducer.forget_plan()
            return
        self.replica.refuse_if_scattered("the group was changed")
        group = torch_args.wrapped_group(new_process_group, self.device)
        move = Move((self.process_group, self.replica.group), (new_process_group, group))
        hooks = [move.hook(hook) for hook in self._comm_hooks]
        self.process_group = new_process_group
        move.layers(self.module)
        self.replica.move_to(group)
        for (hook, state), (_, before) in zip(hooks, self._comm_hooks, strict=True):
            if state is not before:
                self.replica.set_hook(state, hook)
        self._comm_hooks[:] = hooks


def _names_of(
    module: nn.Module, delayed: Sequence[tuple[str, nn.Parameter]], hooked: nn.Parameter | None
) -> tuple[list[str], str]:
    """Delayed parameters, and the one that sets them off, as a copy can find them again."""
    found = (name for name, p in module.named_parameters() if p is hooked)
    return [name for name, _ in delayed], next(found, "")


def _transfer_dtype(mixed_precision: Any) -> torch.dtype | None:
    if mixed_precision is None:
        return None
    return _MixedPrecision.of(mixed_precision).transfer_dtype


def _warn_static() -> None:
    import warnings

    warnings.warn(
        "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` "
        "will detect unused parameters automatically, so you do not need to set "
        "find_unused_parameters=true, just be sure these unused parameters will not change during "
        "training loop while calling `_set_static_graph`.",
        stacklevel=3,
    )
