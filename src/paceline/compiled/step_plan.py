"""What a compiled step will send: its buckets, read from its graph, which is never run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from .._reducer import Bucket, Reducer
from .._torch import dynamo, graphs
from ..errors import NotPlannedError
from ..groups import Traffic
from .binding import Binding
from .explain import Planned, Schedule
from .schedule import launch_early


def plan(
    binding: Binding, reducer: Reducer, batch: Sequence[Any], world_size: int | None
) -> Schedule:
    """The collectives of a step on ``batch``, in the order in which every rank starts them.

    With ``world_size``, as if the group had so many ranks.
    """
    if not reducer.averages:
        raise NotPlannedError(
            "A group of one rank averages nothing.",
            'Wrap the model in a group of new_group("fake", world_size=...) to plan for more.',
        )
    graph = _graph_of(binding, batch)
    launch_early(graph)
    walk = _Walk(graph)
    ranks = world_size or reducer.group.size()
    planned = tuple(walk.planned(bucket, reducer, ranks) for bucket in reducer.buckets)
    for bucket in reducer.buckets:
        bucket.let_go()
    return Schedule(planned)


def _graph_of(binding: Binding, batch: Sequence[Any]) -> Graph:
    binding.settle()
    with torch.no_grad():
        arguments = (*binding.arguments(), *batch)
        (graph,) = dynamo.graphs_of(binding.write(), arguments, {})
    return graph.graph


class _Walk:
    """A step's graph, node by node, in the order in which it runs."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = [node for node in graph.nodes if node.op == "call_function"]
        self._end = next(n for n, node in enumerate(self._nodes) if "settle" in str(node.args))
        self._launches = {
            frozenset(node.args[1]): at
            for at, node in enumerate(self._nodes)
            if node.target is torch.ops.paceline.launch.default
        }
        self._latest = 0  # buckets leave in the order of their index

    def planned(self, bucket: Bucket, reducer: Reducer, ranks: int) -> Planned:
        """One bucket's collective."""
        last = bucket is reducer.buckets[-1]  # it waits for the end of every pass
        at = self._end if last else self._place(bucket)
        self._latest = max(self._latest, at)
        nbytes = bucket.buffer.nbytes
        if last and bucket.buffer.numel() > bucket.payload.numel():  # the header rides there
            nbytes += (ranks - reducer.group.size()) * bucket.buffer.element_size()
        traffic = Traffic(ranks)
        traffic.note("all_reduce", nbytes)
        return Planned(
            index=bucket.index,
            phase="backward",
            kind="all_reduce",
            reduction="avg" if reducer.hook is None else "hook",
            dtype=str(bucket.buffer.dtype).removeprefix("torch."),
            nbytes=nbytes,
            wire_bytes=traffic.bytes_sent,
            ranks=ranks,
            after=self._before(self._latest),
            waits_for=(),
            meanwhile=sum(map(_computes, self._nodes[self._latest : self._end])),
            line=", ".join(reducer.names[number] for number in bucket.numbers[:2]),
        )

    def _place(self, bucket: Bucket) -> int:
        """Where its last gradient is handed over; at the end if some never come."""
        mine = set(bucket.numbers)
        found = [at for indices, at in self._launches.items() if indices & mine]
        handed = set().union(*(n for n in self._launches if n & mine))
        return max(found) if mine <= handed else self._end

    def _before(self, at: int) -> str:
        """The last computation before it."""
        return next((node.name for node in self._nodes[at::-1] if _computes(node)), "")


def _computes(node: Node) -> bool:
    target = node.target
    return graphs.operator_name(target)[0] == "aten" and not graphs.names_anew(target)
