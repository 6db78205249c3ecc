"""Groups inside graphs: what Dynamo may read of them, and what it traces when they are called.

A group is an input of the graph, so the graph communicates over the group that it is called with.
Its rank and its size are constants in the graph; a group with others makes Dynamo compile again.
Everything else that traced code reads of a group is guarded when it is read. So one compile serves
all groups of the same rank and size, and a group never gets what was made for another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from types import FunctionType

from torch.distributed import HashStore

from .._torch import dynamo, opaque, patches
from .._torch.first_use import before_next_group
from .._torch.opaque import Seen
from ..groups import Group, current_process_group, new_group, process_group
from . import current, functions, traced


def _guarded(group: Group) -> Sequence[object]:
    return [group.rank(), group.size()]


def members() -> dict[str, Seen]:
    """Every member of a Group, and what Dynamo does with it.

    All of them are named: Dynamo refuses code that touches another one, where a member that cannot
    be traced is only a graph break.
    """
    group = new_group("fake", store=HashStore(), rank=0, world_size=1)
    names = [n for c in _classes() for n in vars(c) if not n.startswith("__")]
    names += [*vars(group), "group_name", "group_desc"]
    folded = ("rank", "size", "getRank", "getSize", "__eq__", "__ne__")
    return {**dict.fromkeys(names, Seen.TRACED), **dict.fromkeys(folded, Seen.FOLDED)}


def _classes() -> list[type]:
    return [c for c in Group.__mro__ if c.__module__.startswith("paceline.")]


def _functions() -> Iterator[FunctionType]:
    """All methods of a Group. Called between two graphs, each runs in eager mode, whole.

    Torch's C++ calls them there too, that of its own wrapper for instance, and must get a work that
    it knows: Dynamo would take such a call for a frame to compile.
    """
    for found in (value for c in _classes() for value in vars(c).values()):
        if isinstance(found, FunctionType):
            yield found


@cache
def _name_groups() -> None:
    """What concerns our own classes and functions alone, and stays."""
    traced.define_operators(opaque.name_as_input(Group, members(), _guarded))
    for name, instead in (("make_call", traced.traced_call), ("make_calls", traced.traced_calls)):
        dynamo.trace_instead(getattr(Group, name), instead)
    for function in _functions():
        dynamo.never_trace(function)
    dynamo.trace_instead(current_process_group, current.traced_current_process_group)
    dynamo.trace_instead(process_group, current.traced_process_group)


def offer_groups() -> None:
    """Let ``torch.compile`` take groups, if this torch can.

    What is changed in torch for it is taken back by ``uninstall()``, and done again with the next
    group.
    """
    if not opaque.missing():
        _name_groups()
        functions.offer_functions()
        patches.after_take_back(partial(before_next_group, offer_groups))
