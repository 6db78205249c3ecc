"""torch's hook for mixed precision, for code that registers it.

Paceline's DDP does not need it: parameters stay in full precision, and with ``mixed_precision=``
buckets are sent in ``reduce_dtype``. The hook only averages the bucket.
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
    """Holds the wrapper of a bucket; torch's other fields are not used."""

    ddp_weakref: Any
    upcast_stream: Any = None
    wait_for_stream_enqueued: bool = False


def _reducer_allreduce_and_upcast_hook(
    hook_state: _AllreduceUpcastHookState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in the wrapper's ``reduce_dtype``, and restore its dtype."""
    ddp, buffer = hook_state.ddp_weakref(), bucket.buffer()
    precision = ddp.mixed_precision
    dtype = (precision and (precision.reduce_dtype or precision.param_dtype)) or buffer.dtype
    if buffer.is_complex():  # nobody casts what is complex
        dtype = buffer.dtype

    def restore(future: Future[Tensor]) -> Tensor:
        return buffer if dtype == buffer.dtype else buffer.copy_(future.value())

    return mean_later(ddp.process_group, buffer.to(dtype)).then(restore)
