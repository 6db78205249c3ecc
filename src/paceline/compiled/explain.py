"""explain: which collectives a step will make, read from its graph and never run.

The step is traced with groups that have no peers, so the world may have any size. What comes out is
the order in which a rank makes its calls, what each needs before it can start, and how much is
computed between its start and the moment somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore
from torch.fx import Graph, Node

from .._torch import c10d, dynamo, graphs
from ..errors import NotPlannedError
from ..groups import Group, Traffic, new_group, process_group

# torch's functional collectives, by the names of ours
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather_single",
    "all_gather_into_tensor_out": "all_gather_single",
    "all_gather_into_tensor_coalesced": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "reduce_scatter_tensor_out": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
    "all_to_all_single": "all_to_all_single",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
_HANDED = ("launch", "hand_over")  # gradients go to the reducer, which averages them by buckets
_WAITS = {  # and which argument holds what is awaited
    ("paceline", "finish"): 0,
    ("paceline", "average"): 0,
    ("paceline", "settle"): 1,
    ("_c10d_functional", "wait_tensor"): 0,
}
_MOVES = frozenset(
    {"copy", "copy_", "clone", "empty", "empty_like", "new_empty", "zeros", "new_zeros", "full"}
)


@dataclass(frozen=True)
class Planned:
    """One collective of a step."""

    index: int
    phase: str  # forward or backward
    kind: str  # gradients: those that the reducer is given here, to be averaged by buckets
    reduction: str
    dtype: str
    nbytes: int  # what this rank gives
    wire_bytes: float  # what it sends, at least
    ranks: int  # 0: the graph does not say
    after: str  # the last computation whose result it needs
    waits_for: tuple[int, ...]  # earlier collectives whose results it needs
    meanwhile: int  # computations between its start and the wait for it
    line: str  # of the user's code

    def __str__(self) -> str:
        needs = [self.after] * bool(self.after) + [f"#{i}" for i in self.waits_for]
        return (
            f"#{self.index:<3} {self.phase:<8} {self.kind:<21} {self.reduction:<7} "
            f"{self.dtype:<9} {self.nbytes:>12,} B over {self.ranks} ranks, needs "
            f"{', '.join(needs) or 'nothing'}; {self.meanwhile} computations meanwhile  {self.line}"
        )


@dataclass(frozen=True)
class Schedule:
    """The collectives of a step, in the order in which every rank starts them."""

    collectives: tuple[Planned, ...]

    @property
    def nbytes(self) -> int:
        """The total number of bytes that a rank contributes."""
        return sum(c.nbytes for c in self.collectives)

    @property
    def wire_bytes(self) -> float:
        """The least total number of bytes that a rank sends."""
        return sum(c.wire_bytes for c in self.collectives)

    def __str__(self) -> str:
        total = f"{len(self.collectives)} collectives, {self.nbytes:,} bytes given"
        return "\n".join([*map(str, self.collectives), f"{total}, {self.wire_bytes:,.0f} sent"])


def explain(
    step: Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    rank: int = 0,
    **kwargs: Any,
) -> Schedule:
    """Return the collectives of ``step(*args, **kwargs)``, without running anything.

    With ``world_size``, the current group and every Group among the arguments are replaced by
    groups of that many ranks that do not communicate. The step must be one graph, or made by
    ``train_step``.
    """
    if hasattr(step, "plan"):
        own: Schedule = step.plan(*args, world_size=world_size)
        return own
    if world_size is None:
        return _read_all(_graphs(step, args, kwargs), 0)
    fake = new_group("fake", store=HashStore(), rank=rank, world_size=world_size)
    args, kwargs = graphs.map_only(Group, lambda _: fake, (args, kwargs))
    with process_group(fake):
        schedule = _read_all(_graphs(step, args, kwargs), world_size)
    for planned in schedule.collectives:
        if planned.ranks != world_size:
            raise NotPlannedError(
                f"The step's {planned.kind} goes over {planned.ranks} ranks, not {world_size}: "
                f"the step refers to that group directly ({planned.line}).",
                "Pass the group to the step as an argument, or use current_process_group() in it.",
            )
    return schedule


def _graphs(step: Any, args: Any, kwargs: Any) -> list[Graph]:
    step = dynamo.before_compile(step)
    try:
        return [g.graph for g in dynamo.graphs_of(step, args, kwargs)]
    except Exception as error:
        if not (reason := dynamo.reason_of(error)):
            raise
        raise NotPlannedError(
            f"The step is not one graph: {reason}.",
            "torch.compile(step, fullgraph=True) says where; the cause is below this error.",
        ) from error


def _read_all(graphs: Sequence[Graph], ranks: int) -> Schedule:
    found: list[Planned] = []
    for graph, phase in zip(graphs, ("forward", "backward"), strict=False):
        reader = _Reader(graph, phase, len(found), ranks)
        found += reader.read()
    return Schedule(tuple(found))


# -- one graph ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OperatorCall:
    """A call of an operator, with or without the token that keeps it in order."""

    node: Node
    target: Any
    args: tuple[Any, ...]

    @classmethod
    def of(cls, node: Node) -> _OperatorCall:
        if "with_effects" in str(node.target):
            return cls(node, node.args[1], tuple(node.args[2:]))
        return cls(node, node.target, tuple(node.args))

    @property
    def name(self) -> tuple[str, str]:
        """(namespace, name) of the operator; empty for what is none."""
        return graphs.operator_name(self.target)

    @property
    def starts(self) -> bool:
        """Whether a collective begins here."""
        namespace, name = self.name
        ours = namespace == "paceline" and name in ("run", "start", *_HANDED)
        return ours or (namespace == "_c10d_functional" and name in _FUNCTIONAL)

    @property
    def waits(self) -> bool:
        """Whether a collective that was started is awaited here."""
        return self.name in _WAITS

    @property
    def computes(self) -> bool:
        """Whether it does arithmetic, rather than move a tensor or name it anew."""
        if self.starts or self.waits or self.name[0] in ("", "paceline"):
            return False
        moved = self.name[1] in _MOVES or graphs.names_anew(self.target)
        return not moved

    def needed(self) -> Iterator[Node]:
        """Where its arguments come from; the token is no argument."""
        for argument in graphs.leaves_of(*self.args):
            if isinstance(argument, Node):
                yield argument


class _Reader:
    """Walks one graph in order."""

    def __init__(self, graph: Graph, phase: str, first: int, ranks: int) -> None:
        self._nodes = [n for n in graph.nodes if n.op == "call_function"]
        self._place = {node: i for i, node in enumerate(self._nodes)}
        self._phase = phase
        self._first = first
        self._ranks = ranks
        self._found: list[Planned] = []
        self._starts: list[Node] = []  # of each in _found
        self._needs: dict[Node, frozenset[int]] = {}  # collectives that a node depends on
        self._last: dict[Node, Node | None] = {}  # the last computation that it depends on

    def read(self) -> list[Planned]:
        for node in self._nodes:
            operation = _OperatorCall.of(node)
            self._trace_back(operation)
            if operation.starts:
                self._found.append(self._plan(operation))
                self._starts.append(node)
                self._needs[node] = frozenset({self._found[-1].index})
            elif operation.waits:
                self._await(operation)
        return self._found

    def _await(self, operation: _OperatorCall) -> None:
        """Count what was computed since the start of what is awaited here."""
        for awaited in graphs.leaves_of(operation.args[_WAITS[operation.name]]):
            for index in self._needs.get(awaited, ()):
                at = index - self._first
                between = self._nodes[self._place[self._starts[at]] : self._place[operation.node]]
                count = sum(_OperatorCall.of(node).computes for node in between)
                self._found[at] = replace(self._found[at], meanwhile=count)

    def _trace_back(self, operation: _OperatorCall) -> None:
        """Note what the node depends on: collectives, and the last computation."""
        needed = list(operation.needed())
        self._needs[operation.node] = frozenset().union(
            *(self._needs.get(node, ()) for node in needed)
        )
        lasts = [n for n in map(self._last.get, needed) if n is not None]
        latest = max(lasts, key=self._place.__getitem__, default=None)
        self._last[operation.node] = operation.node if operation.computes else latest

    def _plan(self, operation: _OperatorCall) -> Planned:
        node = operation.node
        kind, reduction, given, ranks = _call_of(operation, self._ranks)
        nbytes = sum(t.numel() * t.element_size() for t in given) if kind != "barrier" else 0
        traffic = Traffic(max(ranks, 1))
        traffic.note("all_reduce" if kind == "gradients" else kind, nbytes)
        last = self._last[node]
        return Planned(
            index=self._first + len(self._found),
            phase=self._phase,
            kind=kind,
            reduction=reduction,
            dtype=str(given[0].dtype).removeprefix("torch.") if given and nbytes else "",
            nbytes=nbytes,
            wire_bytes=traffic.bytes_sent,
            ranks=ranks,
            after="" if last is None else f"{_OperatorCall.of(last).name[1]} ({last.name})",
            waits_for=tuple(sorted(self._needs[node])),
            meanwhile=0,
            line=_line(node),
        )


def _call_of(operation: _OperatorCall, ranks: int) -> tuple[str, str, list[Tensor], int]:
    """(kind, reduction, tensors given, number of ranks)."""
    namespace, name = operation.name
    args = operation.args
    if namespace == "paceline" and name in _HANDED:
        return "gradients", "avg", [_value(n) for n in args[0]], ranks
    if namespace == "paceline":
        return args[2], args[3].lower(), [_value(n) for n in args[0]], _value(args[9]).size()
    given = [_value(n) for n in args[0]] if isinstance(args[0], list) else [_value(args[0])]
    words = [a for a in args[1:] if isinstance(a, str)]
    reduces = "reduce" in name
    group = next(a for a in reversed(args) if isinstance(a, str | Node))
    return _FUNCTIONAL[name], words[0] if reduces else "", given, _ranks_of(group)


def _ranks_of(group: Any) -> int:
    if isinstance(group, str):
        return int(c10d.named_group(group).size())  # type: ignore[arg-type]
    return int(_value(group).size())


def _value(node: Node) -> Any:
    value = node.meta["val"]
    return getattr(value, "real_obj", value)


# Folders, not words: a user's own may be called torch too.
_NOT_THE_USERS = tuple(
    f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


def _line(node: Node) -> str:
    """The line of the user's code; empty for what autograd made by itself."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    for place in lines:
        place = place.strip()
        if place.startswith("File "):
            file, line = place.split('"')[1], place.split(", line ")[1].split(",")[0]
            if file.startswith(_NOT_THE_USERS):
                continue
            return f"{file.rpartition('/')[2]}:{line}"
    return ""
