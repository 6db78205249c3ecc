"""What averages the buckets of a wrapper in the place of an all-reduce: hooks and optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._reducer import GradBucket
from ..errors import ModuleArgumentError, ModuleStateError, ModuleTypeError
from ..hooks import allreduce_hook, fp16_compress_hook
from .in_backward import check_fused, step_with_buckets
from .replica import Replica
from .shard_replica import ShardReplica

_FUTURE_TEXT = "torch.futures.Future[torch.Tensor]"
_BUCKET_ANNOTATIONS = (
    inspect.Parameter.empty,
    dist.GradBucket,
    GradBucket,
    "dist.GradBucket",
    "GradBucket",
    "torch.distributed.GradBucket",
)


class CommHooks:
    """How a hook, or an optimizer in backward, is registered; a part of the wrapper."""

    replica: Replica
    shards: int | None
    _comm_hooks: list[tuple[Callable[..., Any], object]]
    _comm_hook_name: str
    _module_parameters: list[nn.Parameter]
    _log_and_throw: Callable[..., Any]
    _sharded: Callable[[], ShardReplica]

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
        if bucket is not None and bucket.annotation not in _BUCKET_ANNOTATIONS:
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
