"""The plain hook, and what all hooks share.

A hook accepts any group: ours, torch's, or None for the default group of DDP. It returns a future
of one flat tensor. Annotations in these files are objects, not strings, because torch's DDP
compares them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from .._exchange import mean_later
from ..groups import group_or_default

Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]


def allreduce_hook(
    process_group: ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as DDP does without a hook; a starting point for your own hooks."""
    return mean_later(group_or_default(process_group), bucket.buffer())


allreduce_hook.prompt = True  # type: ignore[attr-defined]  # one collective, in its call
