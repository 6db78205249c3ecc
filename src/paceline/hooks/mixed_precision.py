"""torch's hook for mixed precision, for code that registers it by hand.

Our DDP needs none: its parameters never leave full precision, and with ``mixed_precision=`` its
buckets travel in ``reduce_dtype`` by themselves. What is left to do is the travelling.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .._exchange import mean_later


@dataclass
class _AllreduceUpcastHookState:
    """Which wrapper a bucket comes from. The rest is torch's, and is left alone."""

    ddp_weakref: Any
    upcast_stream: Any = None
    wait_for_stream_enqueued: bool = False


def _reducer_allreduce_and_upcast_hook(
    hook_state: _AllreduceUpcastHookState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in the wrapper's ``reduce_dtype``; the result is as the bucket was."""
    ddp, buffer = hook_state.ddp_weakref(), bucket.buffer()
    precision = ddp.mixed_precision
    dtype = (precision and (precision.reduce_dtype or precision.param_dtype)) or buffer.dtype

    def restore(future: Future[Tensor]) -> Tensor:
        return buffer if dtype == buffer.dtype else buffer.copy_(future.value())

    return mean_later(ddp.process_group, buffer.to(dtype)).then(restore)
