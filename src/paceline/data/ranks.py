"""Who shares the data: this rank and the others."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["rank_and_size"]


def rank_and_size(group: Any) -> tuple[int, int]:
    """This rank and the number of ranks, in ``group``, that of a wrapped model, or the default."""
    group = getattr(group, "process_group", group)
    if group is None:
        return dist.get_rank(), dist.get_world_size()  # which say what to do if there is no group
    return group.rank(), group.size()
