"""Gradients in 8 bits: every rank's are gathered, and added up in full precision.

A stretch of gradients is cut into 255 steps between its least and its greatest value, zero always
among them. Values, step and zero travel together in one collective. A stretch that holds anything
not finite has no finite step: all of it arrives as NaN, on every rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from .._exchange import gather_later, mean_later
from ..groups import group_or_default

_HEAD = 2  # numbers before the values of a stretch: its step, and the value that stands for zero


def quantization_pertensor_hook(
    process_group: ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in 8 bits, with one scale for the whole bucket."""
    return _average(process_group, bucket.buffer(), 0)


def quantization_perchannel_hook(
    process_group: ProcessGroup, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in 8 bits, with one scale for every ``bucket_size`` elements."""
    return _average(process_group, bucket.buffer(), bucket_size)


def _average(process_group: ProcessGroup, buffer: Tensor, width: int) -> Future[Tensor]:
    group = group_or_default(process_group)
    if buffer.is_sparse or not buffer.numel():
        return mean_later(group, buffer)
    rows = _in_rows(buffer, width or buffer.numel())

    def add_up(future: Future[Tensor]) -> Tensor:
        total = torch.zeros_like(rows)
        for packed in future.value():  # in the order of ranks: the same sum on each of them
            total += unpack(packed, *rows.shape)
        mean = total.div_(group.size()).view(-1)[: buffer.numel()]
        return buffer.copy_(mean)

    return gather_later(group, pack(rows)).then(add_up)


def _in_rows(buffer: Tensor, width: int) -> Tensor:
    """The elements in rows of ``width``, the last one filled up with zeros."""
    short = -buffer.numel() % width
    return torch.nn.functional.pad(buffer.float(), (0, short)).view(-1, width)


def pack(rows: Tensor) -> Tensor:
    """Each row in 8 bits, all in one tensor of bytes."""
    low = rows.amin(1, keepdim=True).clamp_(max=0)
    high = rows.amax(1, keepdim=True).clamp_(min=0)
    step = high / 255 - low / 255  # not their difference by 255: that may be infinite
    step.masked_fill_(step == 0, 1.0)
    zero = (-low / step).round_()
    values = (rows / step).round_().add_(zero).nan_to_num_(0.0).clamp_(0, 255).to(torch.uint8)
    head = torch.cat([step, zero]).view(-1).view(torch.uint8)
    return torch.cat([head, values.view(-1)])


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """The rows that :func:`pack` was given, to half a step."""
    cut = _HEAD * 4 * count
    step, zero = packed[:cut].clone().view(torch.float32).view(_HEAD, count, 1)
    values = packed[cut:].view(count, width)
    found: Tensor = (values - zero).mul_(step)
    return found
