"""``torch.distributed``'s functions on our groups, inside a graph.

Dynamo turns some of them into functional collectives, which find the group by its registered
name: a group without a name is not found, and the name is a constant of the graph. Others it does
not know. On a group of ours they become calls of its methods, so the graph communicates over the
group that it is called with, whether it is registered or not. On any other group nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from .._torch import dynamo, dynamo_functions, functional, opaque
from ..groups import Group

_torch: dict[str, Any] = {}  # torch's own, for all other groups
_SEEN_AS_GROUPS = opaque.seen_as_itself(Group)  # not in 2.11


def offer_functions() -> None:
    """Have Dynamo trace these, until the changes to torch are taken back."""
    if not _SEEN_AS_GROUPS:
        _offer("traced_group_name", functional.resolver(), traced_group_name)
    rest = dynamo_functions.trace_for(Group, {**_COLLECTIVES, **_MESSAGES})
    for name, traced in {**rest, **_FACTS}.items():
        if hasattr(dist, name):  # some are new in 2.13
            _offer(name, getattr(dist, name), traced)


def _offer(name: str, function: Any, traced: Any) -> None:
    _torch[name] = dynamo.trace_torchs_instead(function, traced)


def traced_group_name(group: Any, tag: str = "") -> Any:
    """How functional collectives find a group; to 2.11's a traced Group is no ProcessGroup."""
    if isinstance(group, str | list | tuple | DeviceMesh | ProcessGroup):
        return _torch["traced_group_name"](group, tag)
    return group.group_name


# -- collectives ----------------------------------------------------------------------------------


def _sum_or(op: Any) -> Any:
    """The reduction that was asked for; as a default, Dynamo of torch 2.11 cannot wrap SUM."""
    return ReduceOp.SUM if op is None else op


def traced_all_reduce(
    tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    """What ``all_reduce`` is inside a graph."""
    return _given_back(_chosen(group).all_reduce(tensor, _sum_or(op), async_op=async_op), async_op)


def traced_all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """What ``all_gather`` is inside a graph."""
    return _given_back(_chosen(group).all_gather(tensor_list, tensor, async_op=async_op), async_op)


def traced_all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """What ``all_gather_into_tensor`` and its other names are inside a graph."""
    work = _chosen(group).all_gather_single(output_tensor, input_tensor, async_op=async_op)
    return _given_back(work, async_op)


def traced_reduce_scatter_single(
    output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    """What ``reduce_scatter_tensor`` and its other names are inside a graph."""
    work = _chosen(group).reduce_scatter_single(output, input, _sum_or(op), async_op=async_op)
    return _given_back(work, async_op)


def traced_all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """What ``all_to_all_single`` is inside a graph."""
    work = _chosen(group).all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, async_op=async_op
    )
    return _given_back(work, async_op)


def traced_broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """What ``broadcast`` is inside a graph."""
    if not _is_ours(group):
        return _torch["broadcast"](tensor, src, group, async_op, group_src)
    group = _chosen(group)
    work = group.broadcast(tensor, _root(group, src, group_src), async_op=async_op)
    return _given_back(work, async_op)


def traced_reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """What ``reduce`` is inside a graph."""
    if not _is_ours(group):
        return _torch["reduce"](tensor, dst, _sum_or(op), group, async_op, group_dst)
    group = _chosen(group)
    work = group.reduce(tensor, _root(group, dst, group_dst), _sum_or(op), async_op=async_op)
    return _given_back(work, async_op)


def traced_gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """What ``gather`` is inside a graph."""
    if not _is_ours(group):
        return _torch["gather"](tensor, gather_list, dst, group, async_op, group_dst)
    group, dst = _chosen(group), _first_if_neither(dst, group_dst)
    root = _root(group, dst, group_dst)
    return _given_back(group.gather(gather_list or [], tensor, root, async_op=async_op), async_op)


def traced_scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """What ``scatter`` is inside a graph."""
    if not _is_ours(group):
        return _torch["scatter"](tensor, scatter_list, src, group, async_op, group_src)
    group, src = _chosen(group), _first_if_neither(src, group_src)
    root = _root(group, src, group_src)
    return _given_back(group.scatter(tensor, scatter_list or [], root, async_op=async_op), async_op)


def traced_reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """What ``reduce_scatter`` is inside a graph."""
    if not _is_ours(group):
        return _torch["reduce_scatter"](output, input_list, _sum_or(op), group, async_op)
    work = _chosen(group).reduce_scatter(output, input_list, _sum_or(op), async_op=async_op)
    return _given_back(work, async_op)


def traced_all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """What ``all_to_all`` is inside a graph."""
    if not _is_ours(group):
        return _torch["all_to_all"](output_tensor_list, input_tensor_list, group, async_op)
    work = _chosen(group).all_to_all(output_tensor_list, input_tensor_list, async_op=async_op)
    return _given_back(work, async_op)


def traced_barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """What ``barrier`` is inside a graph."""
    if not _is_ours(group):
        return _torch["barrier"](group, async_op, device_ids)
    return _given_back(_chosen(group).barrier(async_op=async_op), async_op)


_COLLECTIVES: dict[str, Any] = {
    "all_reduce": traced_all_reduce,
    "all_gather": traced_all_gather,
    "all_gather_into_tensor": traced_all_gather_single,
    "all_gather_single": traced_all_gather_single,
    "_all_gather_base": traced_all_gather_single,
    "reduce_scatter_tensor": traced_reduce_scatter_single,
    "reduce_scatter_single": traced_reduce_scatter_single,
    "_reduce_scatter_base": traced_reduce_scatter_single,
    "all_to_all_single": traced_all_to_all_single,
    "broadcast": traced_broadcast,
    "reduce": traced_reduce,
    "gather": traced_gather,
    "scatter": traced_scatter,
    "reduce_scatter": traced_reduce_scatter,
    "all_to_all": traced_all_to_all,
    "barrier": traced_barrier,
}


# -- messages -------------------------------------------------------------------------------------


def traced_send(
    tensor: Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Any:
    """What ``send`` is inside a graph."""
    if not _is_ours(group):
        return _torch["send"](tensor, dst, group, tag, group_dst)
    group = _chosen(group)
    group.send(tensor, _root(group, dst, group_dst), tag)
    return None


def traced_recv(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Any:
    """What ``recv`` is inside a graph. Who sent is only known in a graph if the call says so."""
    if not _is_ours(group) or (src is None and group_src is None):
        return _torch["recv"](tensor, src, group, tag, group_src)
    group = _chosen(group)
    root = _root(group, src, group_src)
    group.recv(tensor, root, tag)
    return group.members[root] if src is None else src


def traced_isend(
    tensor: Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Any:
    """What ``isend`` is inside a graph."""
    if not _is_ours(group):
        return _torch["isend"](tensor, dst, group, tag, group_dst)
    group = _chosen(group)
    return group.send(tensor, _root(group, dst, group_dst), tag, async_op=True)


def traced_irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Any:
    """What ``irecv`` is inside a graph."""
    if not _is_ours(group):
        return _torch["irecv"](tensor, src, group, tag, group_src)
    group = _chosen(group)
    anyone = src is None and group_src is None
    root = None if anyone else _root(group, src, group_src)
    return group.recv(tensor, root, tag, async_op=True)


def traced_batch(p2p_op_list: Sequence[Any]) -> Any:
    """What ``batch_isend_irecv`` is inside a graph; ``op.op`` is one of the two above."""
    return [op.op(op.tensor, None, op.group, op.tag, op.group_peer) for op in p2p_op_list]


_MESSAGES: dict[str, Any] = {
    "send": traced_send,
    "recv": traced_recv,
    "isend": traced_isend,
    "irecv": traced_irecv,
    "batch_isend_irecv": traced_batch,
}


# -- facts; every guard of a group covers what get_rank and get_world_size say --------------------


def traced_get_backend(group: Any = None) -> Any:
    """What ``get_backend`` is inside a graph."""
    return _torch["get_backend"](group) if not _is_given(group) else group.backend


def traced_get_process_group_ranks(group: Any) -> Any:
    """What ``get_process_group_ranks`` is inside a graph."""
    if not _is_given(group):
        return _torch["get_process_group_ranks"](group)
    return list(group.members)


def traced_get_global_rank(group: Any, group_rank: int) -> Any:
    """What ``get_global_rank`` is inside a graph."""
    if not _is_given(group):
        return _torch["get_global_rank"](group, group_rank)
    return group.members[group_rank]


def traced_get_group_rank(group: Any, global_rank: int) -> Any:
    """What ``get_group_rank`` is inside a graph."""
    if not _is_given(group):
        return _torch["get_group_rank"](group, global_rank)
    return group.members.index(global_rank)


_FACTS: dict[str, Any] = {
    "get_backend": traced_get_backend,
    "get_process_group_ranks": traced_get_process_group_ranks,
    "get_global_rank": traced_get_global_rank,
    "get_group_rank": traced_get_group_rank,
}


# -- which group, and which of its ranks ----------------------------------------------------------


def _is_given(group: Any) -> bool:
    if _SEEN_AS_GROUPS:
        return isinstance(group, Group)
    # In 2.11 a Group that a graph is given is no ProcessGroup there; one that comes out of a mesh
    # is, and has no methods to call.
    return group is not None and not isinstance(group, ProcessGroup)


def _is_ours(group: Any) -> bool:
    """Whether a call goes to a group of ours; without a group it goes to the default one."""
    return _is_given(dist.group.WORLD if group is None else group)


def _chosen(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def _first_if_neither(everywhere: int | None, in_group: int | None) -> int | None:
    return 0 if everywhere is None and in_group is None else everywhere


def _root(group: Group, everywhere: int | None, in_group: int | None) -> int:
    """A rank of ``group``; what is wrong here is a graph break, and torch says it outside."""
    if (everywhere is None) == (in_group is None):
        raise ValueError("one of the two ways to name a rank")
    return in_group if everywhere is None else group.members.index(everywhere)  # type: ignore[return-value]


def _given_back(work: Any, async_op: bool) -> Any:
    return work if async_op else None
