# mypy: disable-error-code="override, misc"
# (torch's class has no annotations worth inheriting, and other ones in every version)
"""The names that code written for torch's wrapper asks of ours, beside those that users know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from .._torch.ddp import ignore, ignore_tensor, is_ignored, logged_error
from ..errors import ModuleArgumentError, ModuleTypeError
from ..policies import BucketCaps
from .buffers import _BufferCommHook, _BufferCommHookLocation
from .delayed import Delayed
from .logging_data import logging_data
from .models import broadcast
from .replica import Replica
from .torch_reducer import TorchReducer, torch_logger
from .trained import sparse_parameters


class TorchNames(TorchDDP):
    """Attributes of torch's wrapper that other libraries use."""

    replica: Replica
    _comm_hook_name: str
    _reducer: TorchReducer
    _caps: BucketCaps
    _delayed: Delayed | None
    _module_parameters: list[nn.Parameter]
    _torch_logger: Any
    _error: str

    # -- buffers ------------------------------------------------------------------------------

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether forward passes synchronize buffers."""
        return self.replica.buffers.in_forward

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._forward_sync_buffers = self.replica.buffers.in_forward = value

    @property
    def broadcast_buffers(self) -> bool:
        """The old name of :attr:`forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are synchronized."""
        return list(self.replica.buffers.named().values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are synchronized, by name."""
        return self.replica.buffers.named()

    def _assign_modules_buffers(self) -> None:
        """torch's way to look where the buffers are now; ours always does."""

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward synchronizes buffers."""
        return self.replica.syncs_buffers

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self.will_sync_module_buffers() and not self.replica.buffers.hooked_after

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self.replica.buffers.hooked_after

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        if not callable(hook):
            raise ModuleTypeError(f"hook must be callable, got {type(hook).__name__}.")
        self.replica.buffers.hook = _BufferCommHook(hook, state, comm_hook_location)

    @property
    def buffer_hook(self) -> _BufferCommHook:
        """The hook that replaces the broadcast of buffers."""
        hook = self.replica.buffers.hook
        if hook is None:
            raise AttributeError("no buffer hook was registered")
        return hook

    def _sync_buffers(self) -> None:
        self.replica.sync_buffers()

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        self.replica.buffers.sync(self.replica.group, authoritative_rank)

    def _check_and_sync_module_buffers(self) -> None:
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else bufs,
            self.broadcast_bucket_size if bucket_size is None else bucket_size,
            authoritative_rank,
        )

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast(self.replica.group, tensors, authoritative_rank, buffer_size)

    # -- the reducer, its settings and what it reports ----------------------------------------

    @property
    def reducer(self) -> TorchReducer:
        """An object with the names of torch's reducer."""
        return self._reducer

    @property
    def logger(self) -> Any:
        """A logger of torch's class, for functions of torch that need one."""
        if self._torch_logger is None:
            self._torch_logger = torch_logger(self.replica.group)
        return self._torch_logger[0]

    @property
    def _bucket_config(self) -> BucketCaps:
        return self._caps

    @property
    def bucket_bytes_cap(self) -> int:
        """The maximum size of a bucket in bytes."""
        return self._caps.bucket_bytes_cap

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The maximum size of each bucket, if a list was given."""
        return list(self._caps.per_bucket_bytes_caps)

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether the size of buckets is the default."""
        return self._caps.first_bucket_bytes_cap < self.bucket_bytes_cap

    @property
    def _use_python_reducer(self) -> bool:
        return False

    @property
    def _delay_all_reduce_params(self) -> list[nn.Parameter]:
        return [] if self._delayed is None else list(self._delayed.params)

    def _log_and_throw(self, kind: type[Exception], message: str) -> None:
        self._error = f"{kind}: {message}"
        raise kind(message)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        trained = [p for p in self._module_parameters if p.requires_grad]
        sparse = sparse_parameters(self.module)
        return trained, [p in sparse for p in trained]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[Tensor]) -> dict[int, str]:
        number = {p: i for i, p in enumerate(parameters)}
        names: dict[int, str] = {}
        for name, param in self.module.named_parameters():
            if name in self.parameters_to_ignore or not param.requires_grad:
                continue
            if param not in number:
                self._log_and_throw(
                    ModuleArgumentError,
                    f"Param with name {name} found in module parameters, but not DDP parameters.",
                )
            names[number[param]] = name
        if len(names) != len(number):
            self._log_and_throw(
                ModuleArgumentError,
                "Expected param to name mapping to cover all parameters, but got conflicting "
                f"lengths: {len(number)} vs {len(names)}.",
            )
        return names

    def _get_parameters(self, m: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        for module in m.modules() if recurse else [m]:
            yield from module.parameters(recurse=False)

    @property
    def _distributed_rank(self) -> int:
        return self.replica.group.rank()

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, param in module.named_parameters():
            if not is_ignored(param):
                yield (name, param) if named_params else param

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        ignore(module, params_and_buffers_to_ignore)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                ignore_tensor(tensor)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        said = "" if self._torch_logger is None else logged_error(self._torch_logger[0])
        error = said or self.replica.reducer.error or self._error
        return logging_data(self.replica, self, error=error, comm_hook=self._comm_hook_name)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(
                ModuleArgumentError,
                "DDP runtime logging sample rate should be equal or greater than 1",
            )
        self.replica.times.sample_rate = sample_rate

    def _remove_autograd_hooks(self) -> None:
        self.replica.reducer.retire()

    def _check_reducer_finalized(self) -> None:
        self.replica.refuse_unfinished()

    def _set_sparse_metadata(self, global_unique_ids: dict[str, Tensor]) -> None:
        self._reducer._set_sparse_metadata(global_unique_ids)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """torch clones outputs unless told not to; ours are watched, not touched."""
        self._ddp_sink_clone = val
