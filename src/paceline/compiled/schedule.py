"""When a compiled step sends what: the order of a graph, set and read.

A graph says what depends on what; when each thing runs is up to the compiler. A launch has to run
as soon as its last gradient is there, so that buckets travel while the backward pass goes on, and
all are awaited last. :func:`launch_early` puts the nodes of a graph in that order, and with
Inductor's own reordering for memory turned off they are generated in it. :func:`read_code` tells
from the generated code what really happens, in order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch.fx import Graph, Node


class Does(Enum):
    """What an entry of a schedule does."""

    COMPUTE = "compute"  # a matrix product, a convolution, a kernel that was generated
    LAUNCH = "launch"  # hands gradients over, and sends off buckets that are complete
    SETTLE = "settle"  # waits for all averages


@dataclass(frozen=True)
class Entry:
    """One thing that runs."""

    does: Does
    what: str  # the kernel's name, or the numbers of the parameters


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


# -- reading ----------------------------------------------------------------------------------

_CALL = re.compile(r"(?:^|[\s=])((?:extern_kernels|torch\.ops|aten|triton\w*|cpp_\w+)[\w.]*)\(")
_NUMBERS = re.compile(r"\], \[([\d, ]*)\], ")


def read_code(code: str) -> list[Entry]:
    """The schedule of a graph, from what Inductor generated for it."""
    found = []
    for line in _body(code):
        called = _CALL.search(line)
        if called is not None:
            found.append(_entry(called[1], line))
    return found


def _body(code: str) -> Sequence[str]:
    """The lines of the function that runs the graph."""
    lines = code.splitlines()
    start = next((n for n, line in enumerate(lines) if "def call(" in line), len(lines))
    return [line for line in lines[start:] if not line.lstrip().startswith("#")]


def _entry(name: str, line: str) -> Entry:
    if "paceline.launch" in name or "paceline.hand_over" in name:
        numbers = _NUMBERS.search(line)
        return Entry(Does.LAUNCH, numbers[1] if numbers else "")
    if "paceline.settle" in name or "paceline.average" in name:
        return Entry(Does.SETTLE, "all")
    return Entry(Does.COMPUTE, name)


def launches_between(schedule: Sequence[Entry]) -> int:
    """How many launches have something to compute behind them before everything is awaited."""
    done = [entry.does for entry in schedule]
    end = done.index(Does.SETTLE) if Does.SETTLE in done else len(done)
    computes = [at for at in range(end) if done[at] is Does.COMPUTE]
    last = computes[-1] if computes else -1
    return sum(done[at] is Does.LAUNCH for at in range(last))
