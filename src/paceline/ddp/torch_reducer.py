"""What code written for torch asks of ``ddp.reducer`` and ``ddp.logger``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .._reducer import GradBucket
from ..errors import ModuleStateError
from ..hooks import allreduce_hook

if TYPE_CHECKING:
    from .replica import Replica


class TorchReducer:
    """torch's names for what a Replica does."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def _get_local_used_map(self) -> Tensor:
        """For each parameter, how many ranks' graphs reached it in the last pass."""
        return torch.tensor(self._replica.reducer.summary().used, dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        """Whether every pass so far reached the same parameters."""
        return self._replica.reducer.summary().steady

    def _rebuild_buckets(self) -> bool:
        """Lay the buckets out as planned; whether that changed anything."""
        return self._replica.reducer.settle_plan()

    def _remove_autograd_hooks(self) -> None:
        self._replica.reducer.retire()

    def _check_reducer_finalized(self) -> None:
        self._replica.refuse_unfinished()

    def _install_post_backward_futures(self, futures: Sequence[Future[Any]]) -> None:
        self._replica.buffers.futures.extend(futures)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._replica.times.sample_rate = sample_rate

    def _set_static_graph(self) -> None:
        self._replica.make_static()

    def _set_sparse_metadata(self, global_unique_ids: dict[str, Tensor]) -> None:
        """torch needs to be told the rows in use; entries of any number travel here."""

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Tensor]:
        return allreduce_hook(self._replica.group, bucket)  # type: ignore[arg-type]

    def _run_comm_hook(self, bucket: GradBucket) -> Future[Tensor]:
        hook = self._replica.reducer.hook
        return self._run_allreduce_hook(bucket) if hook is None else hook(bucket)

    def _reset_state(self) -> None:
        self._replica.reducer.forget_plan()

    def prepare_for_forward(self) -> None:
        """Nothing is left to do before a forward pass."""

    def prepare_for_backward(self, outputs: Tensor | Sequence[Tensor]) -> None:
        """Watch ``outputs``, and average the next backward pass, with what is trained now."""
        self._replica.expect_backward(outputs)


def torch_logger(group: Any) -> Any:
    """One of torch's own loggers, for functions of torch's that must be given one.

    It can only be had with one of torch's own reducers, so there is one, of nothing.
    """
    alone = dist.ProcessGroup(dist.HashStore(), 0, 1)
    nothing = [torch.zeros(1, requires_grad=True)]
    try:
        reducer = dist.Reducer(nothing, [[0]], [2**20], alone)
        logger = dist.Logger(reducer)
        logger.set_construction_data_and_log("", [], -1, False, False, False)
    except RuntimeError as error:
        raise ModuleStateError(f"torch's logger cannot be made here: {error}") from error
    return logger, reducer
