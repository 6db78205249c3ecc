# mypy: disable-error-code="override, misc"
# (torch's class has no annotations worth inheriting, and other ones in every version)
"""DistributedDataParallel: torch's interface around a Replica.

It is a subclass of torch's class, so that ``isinstance`` checks for torch's class succeed, but it
uses none of its methods (``tests/ddp/test_wrapper.py`` checks that). Names that only torch's own
code uses are in ``torch_names.py``.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs
from torch.utils.hooks import RemovableHandle

from .._reducer import ScatteredGradients
from .._torch.autograd import is_profiling
from .._torch.c10d import default_group, has_left
from .._torch.ddp import active, move_inputs, set_active
from .._torch.dynamo import untraced
from ..data import Shard
from ..errors import ModuleArgumentError, ModuleStateError, ModuleTypeError
from ..groups import Group
from ..hooks import allreduce_hook, fp16_compress_hook
from ..join import Join, Joinable
from ..policies import BucketCaps, Reduction
from . import same_bits, torch_args
from .delayed import Delayed
from .finalization import ManualFinalization
from .in_backward import adopt_optimizers, check_fused, step_with_buckets
from .in_graph import Traced, forward_in_graph, number
from .joining import (
    DDPJoinHook,
    announce_step,
    any_averages,
    common_rank,
    sync_final_model,
)
from .mixed_precision import Caster, _MixedPrecision, strip
from .moving import Move
from .replica import Replica, SampleCount
from .shard_replica import ShardReplica
from .stand_in import StandsForTorchs
from .torch_names import TorchNames
from .torch_reducer import TorchReducer

log = logging.getLogger(__name__)
Item = TypeVar("Item")
_forwards = threading.local()  # the wrappers in whose forward this thread is


class DistributedDataParallel(ManualFinalization, TorchNames, Joinable, metaclass=StandsForTorchs):
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

    # -- which passes are averaged ------------------------------------------------------------

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients on this rank; the first pass outside averages them.

        It takes effect if the backward pass, or its forward, runs inside the context.
        """
        return self.replica.averaging.no_sync()

    def accumulate(self, steps: int) -> contextlib.AbstractContextManager[bool]:
        """Run one of ``steps`` micro-steps; the last one averages, and its value is True::

        for batch in loader:
            with ddp.accumulate(4) as last:
                loss(ddp(batch)).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        """
        return self.replica.averaging.accumulate(steps)

    def samples(self, count: float) -> SampleCount:
        """Let the next backward pass, or those inside the context, count as ``count`` samples::

            with ddp.samples(len(batch)):
                loss(ddp(batch)).backward()  # a mean over the batch

        The gradient is then the mean over all samples of all ranks, whatever the batch sizes.
        """
        return self.replica.samples(count)

    def shard(self, shard: Shard) -> contextlib.AbstractContextManager[None]:
        """Compute one of the ``shards=`` of a step, on this rank only::

            for step in loader:
                for shard, (x, y) in ddp.shards_of(step):
                    with ddp.shard(shard):
                        loss(ddp(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        Inside, random numbers are those of the shard, buffers are as they were when the step began,
        and operations without a deterministic form are refused. What ``backward`` leaves in
        ``.grad`` is taken when it ends. A shard counts as ``shard.samples`` samples, unless
        :meth:`samples` is called inside.
        """
        return self._sharded().shard(shard)

    def shards_of(self, step: Iterable[Item]) -> Iterator[Item]:
        """Iterate over this rank's shards of ``step``, then average the gradients.

        After the loop ``.grad`` holds the means over the shards of all ranks, bitwise the same
        however shards are divided. Every rank has to run the loop, even one without shards.
        """
        return self._sharded().each(step)

    def conditions(self) -> dict[str, str]:
        """Return what the bits of a run with ``shards=`` depend on besides code, data and seed.

        Save it with a checkpoint; :meth:`require_conditions` compares it when the run resumes.
        """
        return same_bits.conditions(self._sharded().shards, self.replica.group.device)

    def require_conditions(self, saved: Mapping[str, str]) -> None:
        """Raise an error if :meth:`conditions` differ from ``saved``."""
        found = same_bits.differences(saved, self.conditions())
        if found:
            raise ModuleStateError(
                f"rank {self.replica.group.rank()}: the run resumes under other conditions: "
                f"{'; '.join(found)}. Its bits would differ from an uninterrupted run.",
                "Resume under the same conditions, or do not call require_conditions().",
            )

    def _sharded(self) -> ShardReplica:
        if not isinstance(self.replica, ShardReplica):
            raise ModuleStateError(
                f"rank {self.replica.group.rank()}: the model is not wrapped with shards=.",
                "Say how many shards a step has: DistributedDataParallel(model, shards=8).",
            )
        return self.replica

    def sync_grads(self) -> None:
        """Average what ``.grad`` holds now, without a backward pass; every rank has to call it.

        With ``shards=`` it ends the step, as a loop over :meth:`shards_of` does.
        """
        self.replica.sync_grads()

    def after_backward(self, callback: Callable[[], None]) -> RemovableHandle:
        """Call ``callback`` after each backward pass that has averaged gradients.

        It runs in the thread of the backward pass, before ``backward()`` returns, and not for
        passes inside :meth:`no_sync`. Call ``remove()`` of the result to remove it.
        """
        return self.replica.reducer.observers.on_average(callback)

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
            self._scattered.clear()

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

    # -- hooks and optimizers -----------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` average the buckets; it returns a future of the result.

        Call it once, before the first backward pass. The hook gets gradients undivided.
        """
        self._check_comm_hook(hook)
        self._set_comm_hook(state, hook, getattr(hook, "__qualname__", type(hook).__name__))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        compressed = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        builtin = fp16_compress_hook if compressed else allreduce_hook
        self._set_comm_hook(self.replica.group, builtin, str(comm_hook_type))

    def _set_comm_hook(self, state: object, hook: Callable[..., Any], name: str) -> None:
        if self._comm_hooks:
            self._log_and_throw(
                ModuleStateError,
                "register_comm_hook or register_builtin_comm_hook can only be called once.",
            )
        if self.replica.reducer.passes:
            self._log_and_throw(
                ModuleStateError,
                "Communication hook registration should be called before training loop starts, "
                "that is before the first backward pass.",
            )
        self.replica.reducer.finalization.refuse_pending("a communication hook")
        self._comm_hooks.append((hook, state))
        self._comm_hook_name = name
        self.replica.set_hook(state, hook)

    def _check_comm_hook(self, hook: Any) -> None:
        if not callable(hook):
            self._log_and_throw(ModuleTypeError, "Communication hook must be callable.")
        signature = inspect.signature(hook)
        empty = inspect.Signature.empty
        bucket = signature.parameters.get("bucket")
        if bucket is not None and bucket.annotation not in _bucket_annotations():
            self._log_and_throw(
                ModuleArgumentError,
                "Communication hook: bucket annotation should be dist.GradBucket.",
            )
        result = signature.return_annotation
        if result not in (empty, torch.futures.Future[Tensor], _FUTURE_TEXT):
            self._log_and_throw(
                ModuleArgumentError,
                "Communication hook: return annotation should be "
                "torch.futures.Future[torch.Tensor].",
            )

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        check_fused(optim, hooked=bool(self._comm_hooks))
        if self.shards is not None:
            self._sharded().refuse_in_backward(self._module_parameters, all_of_them=True)
        chosen = self._module_parameters if optim_params is None else list(optim_params)
        fused = {p: optim([p], *args, **kwargs) for p in chosen if p.requires_grad}
        step_with_buckets(fused, self.replica.reducer)

    # -- join ---------------------------------------------------------------------------------

    def _in_join(self) -> bool:
        return bool(self._join_config.enable)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have unequal numbers of inputs.

        A rank that has run out takes part in the others' steps with weight 0, without additional
        collectives. ``divide_by_initial_world_size=False`` divides by the number of ranks that
        still have inputs; it has no effect with :meth:`samples`, where the mean is over samples.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """Return the hook that takes this rank's part once it has run out of inputs."""
        return DDPJoinHook(self, by_active=not kwargs.get("divide_by_initial_world_size", True))

    @property
    def _authoritative_rank(self) -> int:
        return self.replica.buffers.root

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        sync_final_model(self, is_last_joiner)

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool:
        return any_averages(self, not is_joined_rank and self.require_backward_grad_sync)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.replica.reducer.stand_in()

    def _match_unused_params_allreduce(self) -> None:
        """Who used what rides in the buckets' header; no collective has to be matched."""

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        return common_rank(self, rank_cond)

    @property
    def join_device(self) -> torch.device:
        """The device for Join's tensors."""
        return torch.device(self.device)

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group for Join's all-reduces."""
        return self.process_group

    # -- copies -------------------------------------------------------------------------------

    def _check_default_group(self) -> None:
        try:
            default = self.process_group == default_group()
        except (RuntimeError, ValueError):
            default = False
        if not default:
            self._log_and_throw(
                ModuleStateError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor.",
            )

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        return self._portable_state()

    def _portable_state(self) -> dict[str, Any]:
        parts = ("replica", "_reducer", "traced", "_torch_logger", "_caster", "_delayed")
        local = ("process_group", *parts)
        state = {key: value for key, value in self.__dict__.items() if key not in local}
        state["broadcast_buffers"] = self.forward_sync_buffers
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(dict(state), default_group())

    def _restore(self, state: dict[str, Any], process_group: ProcessGroup) -> None:
        state.pop("broadcast_buffers", None)
        for name in ("lazy_bucket_allocation", "_require_manual_backward_finalization"):
            state.setdefault(name, False)  # pickled before there was such a thing
        state.setdefault("shards", None)
        self.process_group = process_group
        nn.Module.__setstate__(self, state)
        self._module_parameters = [
            p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore
        ]
        self._init_state()
        group = torch_args.wrapped_group(process_group, self.device)
        params = dict(self.module.named_parameters(remove_duplicate=False))
        names, hooked = self._delayed_names
        named = [(name, params[name]) for name in names]
        self._delayed = Delayed(named, params[hooked], group) if named else None
        self._build(group, init_sync=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """A wrapper of its own around a copy of the module, in the same group."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._restore(copy.deepcopy(self._portable_state(), memo), self.process_group)
        return twin

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


_FUTURE_TEXT = "torch.futures.Future[torch.Tensor]"
_strict = [False]


def is_strict() -> bool:
    """Return whether new wrappers raise where torch's would."""
    return _strict[0]


def set_strict(value: bool) -> None:
    """Set whether new wrappers raise where torch's would."""
    _strict[0] = value


def _bucket_annotations() -> tuple[Any, ...]:
    from .._reducer import GradBucket

    names = ("dist.GradBucket", "GradBucket", "torch.distributed.GradBucket")
    return (inspect.Parameter.empty, dist.GradBucket, GradBucket, *names)


def _warn_static() -> None:
    import warnings

    warnings.warn(
        "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` "
        "will detect unused parameters automatically, so you do not need to set "
        "find_unused_parameters=true, just be sure these unused parameters will not change during "
        "training loop while calling `_set_static_graph`.",
        stacklevel=3,
    )
