"""Groups that begin with one rank, and may have others later."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore

from ..groups import Group, new_group

TIMEOUT = timedelta(minutes=10)


def group(
    backend: str = "auto",
    timeout: timedelta = TIMEOUT,
    device: str | torch.device = "cpu",
    **options: Any,
) -> Group:
    """A group of this process alone, until a :func:`job` moves it to the members of the job.

    Nobody is waited for. Whatever holds the group (a wrapped model, a loader, metrics) sees other
    ranks from then on; how many there are may change between any two steps. The arguments are those
    of :func:`paceline.new_group`, the same on all members; ``timeout`` is for collectives, and for
    opening the group among new members.
    """
    return new_group(backend, timeout, device, store=HashStore(), rank=0, world_size=1, **options)
