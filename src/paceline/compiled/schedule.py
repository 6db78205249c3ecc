"""When a compiled step sends what: the order of a graph.

A graph says what depends on what; when each thing runs is up to the compiler. A launch has to run
as soon as its last gradient is there, so that buckets travel while the backward pass goes on, and
all are awaited last. :func:`launch_early` puts each launch right behind the last gradient that it
needs. That gradient has to be computed early itself: it is where autograd put it, as long as
Inductor does not move it (``graph_passes.AS_WRITTEN``).
``tests/compiled/test_schedule.py`` reads the order from generated code.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node


def launch_early(graph: Graph) -> None:
    """Move each launch to right behind the last thing that it needs."""
    places = {node: at for at, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is torch.ops.paceline.launch.default:
            move_up(node, places)


def move_up(node: Node, places: dict[Node, int]) -> None:
    """Put ``node`` behind the last of its inputs, ``places`` being where nodes stand."""
    last = max(node.all_input_nodes, key=places.__getitem__)
    if last.op != "placeholder":
        last.append(node)
