"""Functional collectives, the only ones that a graph of torch's own may hold."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup


def all_reduce(tensor: Tensor, op: str, group: ProcessGroup) -> Tensor:
    """A new tensor, reduced over ``group``; in public the one in place, which Dynamo rewrites."""
    from torch.distributed._functional_collectives import all_reduce

    reduced: Tensor = all_reduce(tensor, op, group)
    return reduced


def resolver() -> Any:
    """The function by which functional collectives find the name of a group."""
    from torch.distributed import _functional_collectives

    return _functional_collectives._resolve_group_name
