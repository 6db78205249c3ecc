# mypy: disable-error-code="attr-defined, method-assign, assignment, misc, arg-type"
# (torch gives these names other signatures in every version)
"""How Dynamo is told to trace our functions in the place of torch.distributed's.

Dynamo has a table of functions that it replaces by functional collectives, and refuses what those
cannot do (``async_op=True``) before anybody can look at the group. So the table is replaced by one
that prepares Dynamo when it is first used: from then on a call with a group of a class of ours is
traced as the function of ours. A call with any other group is what it was.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d as c10d

from . import patches
from .opaque import seen_as_itself

_instead: dict[Any, Callable[..., Any]] = {}  # by the function that users call
_classes: set[type] = set()


class _Remaps(dict[Any, Any]):
    """Dynamo's table; importing Dynamo in order to prepare it is slow, and reading it is late."""

    def __getitem__(self, function: Any) -> Any:
        _prepare()
        return super().__getitem__(function)


def trace_for(cls: type, functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Have Dynamo trace these when the group in the call is a ``cls``, until it is taken back.

    The keys are names in ``torch.distributed``. Returns those that are not in Dynamo's table.
    """
    from torch.distributed import _functional_collectives as functional

    table = functional.traceable_collective_remaps
    known = {function.__name__: function for function in table}
    _instead.update({known[name]: ours for name, ours in functions.items() if name in known})
    _classes.add(cls)
    patches.put(functional, "traceable_collective_remaps", _Remaps(table))
    return {name: ours for name, ours in functions.items() if name not in known}


@functools.cache
def _prepare() -> None:
    from torch._dynamo.variables.functions import (
        CollectiveFunctionRewriteVariable,
        UserFunctionVariable,
    )

    usual = CollectiveFunctionRewriteVariable.call_function

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        ours = _instead.get(self.fn)
        if ours is None or not _is_for_us(tx, self.fn, args, kwargs):
            return usual(self, tx, args, kwargs)
        return UserFunctionVariable(ours).call_function(tx, list(args), kwargs)

    patches.put(CollectiveFunctionRewriteVariable, "call_function", call)
    patches.after_take_back(_prepare.cache_clear)


def _is_for_us(tx: Any, function: Any, args: Any, kwargs: Any) -> bool:
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # torch will say what is wrong with the call
        return False
    if "p2p_op_list" in given:
        items = getattr(given["p2p_op_list"].realize(), "items", [])
        return bool(items) and _is_ours(_traced_group(tx, items[0]))
    return _is_ours(given.get("group"))


def _traced_group(tx: Any, operation: Any) -> Any:
    """The group of a traced P2POp; as a function, since reading has another name in each torch."""
    from torch._dynamo.variables.functions import UserFunctionVariable

    return UserFunctionVariable(_group_of).call_function(tx, [operation], {})


def _group_of(operation: Any) -> Any:
    return operation.group


def _is_ours(variable: Any) -> bool:
    """Whether a traced value is a group of ours; none at all is the default group."""
    if variable is not None:
        variable = variable.realize()
    if variable is None or (variable.is_python_constant() and not variable.as_python_constant()):
        # Dynamo of 2.11 sees any default group as torch's own, and makes functional calls of it.
        sees = all(map(seen_as_itself, _classes))
        return sees and isinstance(c10d.GroupMember.WORLD, tuple(_classes))
    real = getattr(getattr(variable, "value", None), "real_obj", None)
    return isinstance(real, tuple(_classes))
