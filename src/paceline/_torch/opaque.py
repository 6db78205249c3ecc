# mypy: disable-error-code="attr-defined, arg-type, call-arg, method-assign, no-any-return"
# (torch gives these names other signatures in every version)
"""Objects that are inputs of graphs: torch's *opaque types*, and operators that take them.

Dynamo treats a class that is registered as an *opaque reference type* as an input of the graph: the
object is never looked into but for the members that were named, and a list of values decides
whether compiled code made for one object may run with another. :func:`name_as_input` says so of a
class. It costs nothing in eager mode, and Dynamo is not imported by it.

A torch that lacks one of these names gets a reason in :func:`missing`, and its groups are what they
are without us: a graph break at each use.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from enum import Enum, auto
from importlib import import_module
from typing import Any

import torch
from torch.library import Library

from . import patches

_watched: set[type] = set()  # classes whose objects are pinned when they are compared


def _base_classes() -> tuple[Any, Any]:
    """The class that such types inherit from, and its metaclass."""
    for module, name in (
        ("torch._custom_class_base", "CustomClassBase"),  # since 2.14
        ("torch._opaque_base", "OpaqueBase"),  # to 2.13; later ones warn when it is imported
    ):
        with contextlib.suppress(ImportError):
            found = import_module(module)
            return getattr(found, name), getattr(found, f"{name}Meta")
    return object, type


GraphInput, GraphInputMeta = _base_classes()


class Seen(Enum):
    """What Dynamo does with a member of an object."""

    FOLDED = auto()  # called when tracing, and its result is a constant: the guard must cover it
    TRACED = auto()  # its code is traced; what it reads of the object is guarded by that


@functools.cache
def missing() -> str:
    """Why this torch cannot have groups inside its graphs; empty when it can."""
    try:
        from torch._library import opaque_object
        from torch._library.effects import EffectType  # noqa: F401
    except ImportError as error:
        return f"torch {torch.__version__} has no {error.name}"
    for name in (_registers(), "MemberType", "get_opaque_type_name"):
        if not hasattr(opaque_object, name):
            return f"torch {torch.__version__} has no torch._library.opaque_object.{name}"
    return ""


def _registers() -> str:
    """The name of the function that registers a type."""
    from torch._library import opaque_object

    new = "register_custom_class"  # since 2.14, which logs a warning when it hears the old name
    return new if hasattr(opaque_object, new) else "register_opaque_type"


def name_as_input(
    cls: type, members: dict[str, Seen], guarded: Callable[[Any], Sequence[object]]
) -> str:
    """Make objects of ``cls`` inputs of graphs; returns the name of the type in operator schemas.

    Compiled code serves every object for which ``guarded`` gives the same values.
    """
    from torch._library import opaque_object as opaque

    kinds = {Seen.FOLDED: opaque.MemberType.USE_REAL, Seen.TRACED: opaque.MemberType.INLINED}
    seen = {name: kinds[how] for name, how in members.items()}

    def guard(value: Any) -> list[object]:
        shared = cls in _watched and _pin_what_is_compared()
        return [*guarded(value), None if shared else id(value)]

    kind = "symbolic" if _registers() == "register_custom_class" else "reference"
    try:
        getattr(opaque, _registers())(cls, typ=kind, guard_fn=guard, members=seen)
    except TypeError:  # 2.11 wants a metaclass that its own ProcessGroup does not have yet
        _enter_by_hand(cls, guard, seen)
    _watch(cls)
    return opaque.get_opaque_type_name(cls)


def seen_as_itself(cls: type) -> bool:
    """Whether traced objects of ``cls`` pass for its instances; to 2.11 a traced Group is none.

    2.12 gave ProcessGroup the metaclass that does it.
    """
    return isinstance(cls, GraphInputMeta)


def _enter_by_hand(cls: Any, guarded: Callable[[Any], Sequence[object]], members: Any) -> None:
    from torch._library import opaque_object as opaque

    name = f"{cls.__module__}.{cls.__qualname__}"
    info = opaque._OpaqueTypeInfo(name, "reference", guarded, members, False)
    opaque._OPAQUE_TYPES[cls] = info
    opaque._OPAQUE_TYPES_BY_NAME[name] = info
    torch._C._register_opaque_type(name)
    # It also copies the object to trace with, and warns when that fails. There is one connection.
    cls.__deepcopy__ = lambda self, memo: self


def keep_in_order(library: Library, operator: str) -> None:
    """Never drop a call of ``operator`` and never change the order of such calls.

    Ranks that make different calls wait for each other for ever, and a graph knows of one rank
    only: a result that nobody uses here may be what another rank waits for.
    """
    from torch._library.effects import EffectType

    library._register_effectful_op(operator, EffectType.ORDERED)


# -- comparisons ------------------------------------------------------------------------------
#
# Since 2.13 torch folds ``g == h``, ``g is h`` and ``{g: …}[h]`` to what they are for the objects
# that it traces with, and guards nothing. Where two objects of ours are compared, or one is hashed,
# each of them is pinned: that compiled code serves these very objects. torch 2.11 refuses all
# three. In 2.12, and wherever the names below are missing, every object is pinned: safe, and one
# compile for each.


def _watch(cls: type) -> None:
    """Prepare Dynamo when it first meets an object of ``cls``: importing it for that is slow."""
    from torch._library import opaque_object as opaque

    if not hasattr(opaque, "_OpaqueTypeInfo") or not hasattr(opaque, "_OPAQUE_TYPES"):
        return

    class Watched(opaque._OpaqueTypeInfo):
        def __getattribute__(self, name: str) -> Any:
            if name == "opaque_typ" and "torch._dynamo.variables.script_object" in sys.modules:
                _pin_what_is_compared()
            return super().__getattribute__(name)

    info = Watched(**vars(opaque._OPAQUE_TYPES[cls]))
    opaque._OPAQUE_TYPES[cls] = opaque._OPAQUE_TYPES_BY_NAME[info.class_name] = info
    _watched.add(cls)


@functools.cache
def _pin_what_is_compared() -> bool:
    """Whether comparisons are taken care of, so that compiled code may serve several objects."""
    from torch._dynamo.variables import distributed

    if hasattr(distributed, "ProcessGroupVariable"):  # 2.11
        return True
    try:
        _pin_each()
    except (ImportError, AttributeError):  # 2.12
        return False
    return True


def _pin_each() -> None:
    from torch._dynamo.variables import builtin, object_protocol

    variable, names = _variable()
    same = object_protocol.vt_identity_compare
    olds = {name: getattr(variable, name) for name in (*names, "hash_impl")}

    def is_same(left: Any, right: Any) -> Any:
        _pin(left, right)
        return same(left, right)

    def is_hashed(self: Any, tx: Any) -> Any:
        _pin(self)
        return olds["hash_impl"](self, tx)

    for module in (builtin, object_protocol):
        patches.put(module, "vt_identity_compare", is_same)
    for name, first in names.items():
        patches.put(variable, name, _pinning(olds[name], first))
    patches.put(variable, "hash_impl", is_hashed)
    _write_as_they_do(builtin.BuiltinVariable, variable)
    patches.after_take_back(_pin_what_is_compared.cache_clear)


def _variable() -> tuple[Any, dict[str, int]]:
    """What Dynamo has in the place of such an object, and the methods by which it compares two.

    With the place of the second one among the arguments.
    """
    from torch._dynamo.variables import script_object

    if hasattr(script_object, "CustomClassObjectVariable"):  # since 2.14
        return script_object.CustomClassObjectVariable, {"tp_richcompare_impl": 2}
    return script_object.TorchScriptObjectVariable, {"richcompare_impl": 2, "is_python_equal": 1}


def _pinning(compare: Callable[..., Any], second: int) -> Callable[..., Any]:
    def pins(*args: Any) -> Any:
        _pin(args[0], args[second])
        return compare(*args)

    return pins


def _pin(*variables: Any) -> None:
    """Guard the identity of each, if all of them are objects of a watched class."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    reals = [getattr(getattr(v.realize(), "value", None), "real_obj", None) for v in variables]
    if all(type(real) in _watched for real in reals):
        for variable in variables:
            if variable.source is not None:
                install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))


def _write_as_they_do(builtin: Any, variable: Any) -> None:
    """Let ``repr`` and ``str`` of an object trace its own ``__repr__``, not that of a stand-in."""
    if hasattr(variable, "tp_repr_impl"):  # since 2.14
        for name in ("tp_repr_impl", "tp_str_impl"):
            patches.put(variable, name, _writing(getattr(variable, name)))
    elif hasattr(variable, "repr_impl"):
        patches.put(variable, "repr_impl", _writing(variable.repr_impl))
        patches.put(builtin, "call_str", _printing(builtin.call_str, variable.repr_impl))


def _writing(write: Callable[..., Any]) -> Callable[..., Any]:
    def written(self: Any, tx: Any) -> Any:
        from torch._dynamo.variables.functions import UserFunctionVariable

        real = getattr(self.value, "real_obj", None)
        if type(real) not in _watched:
            return write(self, tx)
        return UserFunctionVariable(type(real).__repr__).call_function(tx, [self], {})

    return written


def _printing(print_: Callable[..., Any], written: Callable[..., Any]) -> Callable[..., Any]:
    def printed(self: Any, tx: Any, arg: Any) -> Any:
        real = getattr(getattr(arg.realize(), "value", None), "real_obj", None)
        return written(arg, tx) if type(real) in _watched else print_(self, tx, arg)

    return printed
