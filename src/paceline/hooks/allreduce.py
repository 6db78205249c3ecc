"""The plain hook, and what all hooks share.

Hooks take any group: ours, torch's, or None for the one that DDP itself would take. They return a
future of one flat tensor. Annotations are real objects in these files, not texts: torch's own DDP
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
    """Average a bucket as DDP does without any hook; one to start from."""
    return mean_later(group_or_default(process_group), bucket.buffer())


allreduce_hook.prompt = True  # type: ignore[attr-defined]  # one collective, in its call
