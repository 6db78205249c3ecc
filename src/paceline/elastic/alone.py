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
    """Return a group of this process alone, until :func:`job` moves it to the members of the job.

    It does not wait for other processes. A wrapped model, a loader or metrics that hold the group
    see the other ranks from then on, and their number may change between two steps. The arguments
    are those of :func:`paceline.new_group`, and must be the same on all members. ``timeout``
    applies to collectives, and to opening the group among new members.
    """
    return new_group(backend, timeout, device, store=HashStore(), rank=0, world_size=1, **options)
