"""Gradients that are sent in 16 bits.

They are divided by the number of ranks before they are cast, so that the sum fits wherever the
mean does. A gradient that does not fit becomes infinite, which gradient scalers detect.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from .._exchange import one_tensor, sum_later
from .._torch.functional import all_reduce
from ..groups import group_or_default
from .allreduce import Hook


def fp16_compress_hook(
    process_group: ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in float16."""
    return _average_as(torch.float16, process_group, bucket)


def bf16_compress_hook(
    process_group: ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in bfloat16: the range of float32, less precision than float16."""
    return _average_as(torch.bfloat16, process_group, bucket)


for _hook in (fp16_compress_hook, bf16_compress_hook):
    _hook.prompt = True  # type: ignore[attr-defined]  # one collective, in its call


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that calls ``hook`` with the bucket in float16, and restores its dtype."""

    def fp16_compress_wrapper_hook(
        hook_state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return _wrapped(torch.float16, hook, hook_state, bucket)

    return fp16_compress_wrapper_hook


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return a hook that calls ``hook`` with the bucket in bfloat16, and restores its dtype."""

    def bf16_compress_wrapper_hook(
        hook_state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return _wrapped(torch.bfloat16, hook, hook_state, bucket)

    return bf16_compress_wrapper_hook


def _average_as(dtype: torch.dtype, process_group: Any, bucket: Any) -> Future[Tensor]:
    # torch's compiled reducer gives a pair, the gradient and its parameter
    buffer = bucket[0] if isinstance(bucket, tuple) else bucket.buffer()
    group = group_or_default(process_group)
    if torch.compiler.is_compiling():  # which takes the result itself
        return _average_compiled(dtype, group, buffer)  # type: ignore[return-value]
    small = buffer.div_(group.size()).to(dtype)
    return sum_later(group, small).then(lambda future: buffer.copy_(future.value()))


def _average_compiled(dtype: torch.dtype, group: ProcessGroup, buffer: Tensor) -> Tensor:
    total = all_reduce((buffer / group.size()).to(dtype), "sum", group)
    return buffer.copy_(total)


def _wrapped(dtype: torch.dtype, hook: Hook, state: Any, bucket: Any) -> Future[Tensor]:
    full = bucket.buffer()
    bucket.set_buffer(full.to(dtype))

    def restore(future: Future[Any]) -> Tensor:
        bucket.set_buffer(full)
        return full.copy_(one_tensor(future.value()))  # type: ignore[no-any-return]

    return hook(state, bucket).then(restore)
