"""Graphs that Dynamo traced: which operator a node calls, and tensors inside its arguments.

``torch.utils._pytree`` is what torch.func and torch.compile take structures apart with; there is no
public module for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

map_only = _pytree.tree_map_only
"""Apply a function to what is of a type in a structure of lists, dicts, ...; Dynamo traces it."""

leaves_of = _pytree.arg_tree_leaves
"""What is inside such structures, in order, not taken for structures themselves."""


def is_operator(target: Any) -> bool:
    """Whether a node's target is an operator, rather than a function of Python's."""
    return isinstance(target, torch._ops.OpOverload)


def operator_name(target: Any) -> tuple[str, str]:
    """(namespace, name) of an operator, without the overload; empty for what is none."""
    if not is_operator(target):
        return "", ""
    namespace, _, name = target._schema.name.partition("::")
    return namespace, name


def names_anew(target: Any) -> bool:
    """Whether an operator returns memory that it was given, under a new name or changed."""
    return any(result.alias_info for result in target._schema.returns)
