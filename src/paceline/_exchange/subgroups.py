"""Parts of a group, ours or torch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..groups import Group


def part_of(group: ProcessGroup, parts: Sequence[Sequence[int]]) -> ProcessGroup:
    """This rank's part, when all ranks of ``group`` are split so; every rank calls it.

    torch's groups come from its world: all of that makes the call.
    """
    if isinstance(group, Group):
        mine = group.split([list(ranks) for ranks in parts])
        assert mine is not None  # the parts cover all ranks
        return mine
    world = [[dist.get_global_rank(group, rank) for rank in ranks] for ranks in parts]
    found: ProcessGroup = dist.new_subgroups_by_enumeration(world)[0]
    return found
