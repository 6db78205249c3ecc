"""``torch.distributed``'s functions on our groups, inside a graph.

Dynamo turns some of them into functional collectives, which find the group by its registered
name: a group without a name is not found, and the name is a constant of the graph. On a group of
ours they become calls of its methods, so the graph communicates over the group that it is called
with. On any other group nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from ..groups import Group
from . import torch_private

_torch: dict[str, Any] = {}  # torch's own, for all other groups
_SEEN_AS_GROUPS = isinstance(Group, torch_private.opaque_meta())  # not in 2.11


def offer_functions() -> None:
    """Have Dynamo trace these; called once."""
    for function, replacement in functional.traceable_collective_remaps.items():
        if function.__name__ in _REPLACED:
            ours = _REPLACED[function.__name__]
            _torch.setdefault(ours.__name__, torch_private.copied(replacement))
            torch_private.trace_instead(replacement, ours)
    if not _SEEN_AS_GROUPS:
        _torch["traced_group_name"] = torch_private.copied(functional._resolve_group_name)
        torch_private.trace_instead(functional._resolve_group_name, traced_group_name)
    for name, traced in _TRACED.items():
        _torch[traced.__name__] = torch_private.copied(getattr(dist, name))
        torch_private.trace_instead(getattr(dist, name), traced)


def traced_group_name(group: Any, tag: str = "") -> Any:
    """How functional collectives find a group; to 2.11's a traced Group is no ProcessGroup."""
    if isinstance(group, str | list | tuple | DeviceMesh | ProcessGroup):
        return _torch["traced_group_name"](group, tag)
    return group.group_name


# -- those that Dynamo replaces: it passes all arguments by name, and reductions as words ---------


def traced_all_reduce(**given: Any) -> Any:
    """What ``all_reduce`` is inside a graph."""
    group: Any = given.get("group")
    if not _is_ours(group):
        return _torch["traced_all_reduce"](**given)
    group.all_reduce(given["tensor"], _reduction(given))
    return None


def traced_all_gather(**given: Any) -> Any:
    """What ``all_gather`` is inside a graph."""
    group: Any = given.get("group")
    if not _is_ours(group):
        return _torch["traced_all_gather"](**given)
    group.all_gather(given["tensor_list"], given["tensor"])
    return None


def traced_all_gather_single(**given: Any) -> Any:
    """What ``all_gather_into_tensor`` and its other names are inside a graph."""
    group: Any = given.get("group")
    if not _is_ours(group):
        return _torch["traced_all_gather_single"](**given)
    output = given["output_tensor"] if "output_tensor" in given else given["output"]
    tensor = given["input_tensor"] if "input_tensor" in given else given["input"]
    group.all_gather_single(output, tensor)
    return None


def traced_reduce_scatter_single(**given: Any) -> Any:
    """What ``reduce_scatter_tensor`` and its other names are inside a graph."""
    group: Any = given.get("group")
    if not _is_ours(group):
        return _torch["traced_reduce_scatter_single"](**given)
    group.reduce_scatter_single(given["output"], given["input"], _reduction(given))
    return None


def traced_all_to_all_single(**given: Any) -> Any:
    """What ``all_to_all_single`` is inside a graph."""
    group: Any = given.get("group")
    if not _is_ours(group):
        return _torch["traced_all_to_all_single"](**given)
    group.all_to_all_single(
        given["output"],
        given["input"],
        given.get("output_split_sizes"),
        given.get("input_split_sizes"),
    )
    return None


def _is_ours(group: Any) -> bool:
    if _SEEN_AS_GROUPS:
        return isinstance(group, Group)
    # In 2.11 a Group that a graph is given is no ProcessGroup there; one that comes out of a mesh
    # is, and has no methods to call.
    return group is not None and not isinstance(group, ProcessGroup)


def _reduction(given: dict[str, Any]) -> Any:
    return getattr(ReduceOp, given["op"].upper()) if "op" in given else ReduceOp.SUM


_REPLACED: dict[str, Any] = {
    "all_reduce": traced_all_reduce,
    "all_gather": traced_all_gather,
    "all_gather_into_tensor": traced_all_gather_single,
    "all_gather_single": traced_all_gather_single,
    "_all_gather_base": traced_all_gather_single,
    "reduce_scatter_tensor": traced_reduce_scatter_single,
    "reduce_scatter_single": traced_reduce_scatter_single,
    "_reduce_scatter_base": traced_reduce_scatter_single,
    "all_to_all_single": traced_all_to_all_single,
}


# -- those that it does not know ------------------------------------------------------------------


def traced_broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """What ``broadcast`` is inside a graph."""
    if not _is_ours(group):
        return _torch["traced_broadcast"](tensor, src, group, async_op, group_src)
    work = group.broadcast(tensor, _root(group, src, group_src), async_op=async_op)
    return work if async_op else None


def traced_reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """What ``reduce`` is inside a graph."""
    if not _is_ours(group):
        return _torch["traced_reduce"](tensor, dst, op, group, async_op, group_dst)
    work = group.reduce(tensor, _root(group, dst, group_dst), op, async_op=async_op)
    return work if async_op else None


def traced_barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """What ``barrier`` is inside a graph."""
    if not _is_ours(group):
        return _torch["traced_barrier"](group, async_op, device_ids)
    work = group.barrier(async_op=async_op)
    return work if async_op else None


def _root(group: Group, everywhere: Any, in_group: int | None) -> int:
    return group.members.index(everywhere) if in_group is None else in_group


_TRACED: dict[str, Any] = {
    "broadcast": traced_broadcast,
    "reduce": traced_reduce,
    "barrier": traced_barrier,
}
