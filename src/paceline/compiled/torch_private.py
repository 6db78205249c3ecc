# mypy: disable-error-code="attr-defined, arg-type, call-arg, method-assign, no-any-return"
# (torch gives these names other signatures in every version)
"""Everything that is private to torch in this folder, and only here. Holds for torch 2.11 to 2.13.

Dynamo treats a class that is registered as an *opaque reference type* as an input of the graph: the
object is never looked into but for the members that were named, and a list of values decides
whether compiled code made for one object may run with another. :func:`name_as_input` says so of a
class. A function with an attribute ``_torchdynamo_inline`` is traced as the function in that
attribute; :func:`trace_instead` sets it. Both cost nothing in eager mode and nothing at import:
Dynamo is not imported by any of this.

A torch that lacks one of these names gets a reason in :func:`missing`, and its groups are what they
are without us: a graph break at each use.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Sequence
from enum import Enum, auto
from types import FunctionType
from typing import Any

import torch
from torch.fx import GraphModule
from torch.library import Library

_watched: set[type] = set()  # classes whose objects are pinned when they are compared


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
    for name in ("register_opaque_type", "MemberType", "get_opaque_type_name"):
        if not hasattr(opaque_object, name):
            return f"torch {torch.__version__} has no torch._library.opaque_object.{name}"
    return ""


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

    try:
        opaque.register_opaque_type(cls, typ="reference", guard_fn=guard, members=seen)
    except TypeError:  # 2.11 wants a metaclass that its own ProcessGroup does not have yet
        _enter_by_hand(cls, guard, seen)
    _watch(cls)
    return opaque.get_opaque_type_name(cls)


def opaque_meta() -> type:
    """The metaclass of classes whose traced objects pass for their instances; 2.12 gave it to
    ProcessGroup.
    """
    from torch._opaque_base import OpaqueBaseMeta

    return OpaqueBaseMeta


def _enter_by_hand(cls: Any, guarded: Callable[[Any], Sequence[object]], members: Any) -> None:
    from torch._library import opaque_object as opaque

    name = f"{cls.__module__}.{cls.__qualname__}"
    info = opaque._OpaqueTypeInfo(name, "reference", guarded, members, False)
    opaque._OPAQUE_TYPES[cls] = info
    opaque._OPAQUE_TYPES_BY_NAME[name] = info
    torch._C._register_opaque_type(name)
    # It also copies the object to trace with, and warns when that fails. There is one connection.
    cls.__deepcopy__ = lambda self, memo: self


# -- comparisons ------------------------------------------------------------------------------
#
# torch 2.13 folds ``g == h``, ``g is h`` and ``{g: …}[h]`` to what they are for the objects it
# traces with, and guards nothing. Where two objects of ours are compared, or one is hashed, each of
# them is pinned: that compiled code serves these very objects. torch 2.11 refuses all three. In
# 2.12, and wherever the names below are missing, every object is pinned: safe, and one compile for
# each.


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
    from torch._dynamo.variables import builtin, object_protocol, script_object

    variable = script_object.TorchScriptObjectVariable
    same, equal = object_protocol.vt_identity_compare, variable.is_python_equal
    compare, hashed = variable.richcompare_impl, variable.hash_impl

    def is_same(left: Any, right: Any) -> Any:
        _pin(left, right)
        return same(left, right)

    def is_equal(self: Any, other: Any) -> Any:
        _pin(self, other)
        return equal(self, other)

    def is_compared(self: Any, tx: Any, other: Any, op: str) -> Any:
        _pin(self, other)
        return compare(self, tx, other, op)

    def is_hashed(self: Any, tx: Any) -> Any:
        _pin(self)
        return hashed(self, tx)

    if hasattr(variable, "repr_impl"):
        _write_as_they_do(builtin.BuiltinVariable, variable)
    builtin.vt_identity_compare = object_protocol.vt_identity_compare = is_same
    variable.is_python_equal, variable.richcompare_impl = is_equal, is_compared
    variable.hash_impl = is_hashed


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
    write, print_ = variable.repr_impl, builtin.call_str

    def written(self: Any, tx: Any) -> Any:
        from torch._dynamo.variables.functions import UserFunctionVariable

        real = getattr(self.value, "real_obj", None)
        if type(real) not in _watched:
            return write(self, tx)
        return UserFunctionVariable(type(real).__repr__).call_function(tx, [self], {})

    def printed(self: Any, tx: Any, arg: Any) -> Any:
        real = getattr(getattr(arg.realize(), "value", None), "real_obj", None)
        return written(arg, tx) if type(real) in _watched else print_(self, tx, arg)

    variable.repr_impl, builtin.call_str = written, printed


def trace_instead(function: Any, traced: Callable[..., Any]) -> None:
    """Have Dynamo trace ``traced`` wherever ``function`` is called."""
    function._torchdynamo_inline = traced


def copied(function: Any) -> Any:
    """The same function as another object, which :func:`trace_instead` has not touched."""
    twin = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def never_trace(function: Any) -> None:
    """Leave ``function`` and all it calls alone when it runs in eager mode between two graphs."""
    from torch._C._dynamo import eval_frame

    if not hasattr(eval_frame, "set_code_exec_strategy"):
        return
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def keep_in_order(library: Library, operator: str) -> None:
    """Never drop a call of ``operator`` and never change the order of such calls.

    Ranks that make different calls wait for each other for ever, and a graph knows of one rank
    only: a result that nobody uses here may be what another rank waits for.
    """
    from torch._library.effects import EffectType

    library._register_effectful_op(operator, EffectType.ORDERED)


# -- compilations ---------------------------------------------------------------------------------


def this_compilation() -> str:
    """Torch's name of the compilation that runs now; the backward pass of a graph has the same."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def uses_inductor() -> bool:
    """Whether what is traced now will be compiled by Inductor, which keeps its code on disk."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
    while compiler is not None:
        if type(compiler).__name__ == "_TorchCompileInductorWrapper":
            return True
        inner = getattr(compiler, "_torchdynamo_orig_backend", None)
        compiler = inner or getattr(compiler, "_torchdynamo_orig_callable", None)
    return False


def hear_of_compilations(begins: Callable[[str], None], ends: Callable[[str], None]) -> None:
    """Call ``begins`` and ``ends`` with the name of every compilation, failed ones included.

    To be called during each: torch forgets it when Dynamo is reset.
    """
    from torch._dynamo.callback import callback_handler as handler

    if not any(getattr(heard, "is_for", None) == begins for heard in handler.start_callbacks):
        handler.register_start_callback(_Heard(begins))
        handler.register_end_callback(_Heard(ends))


class _Heard:
    """A callback of ours, to be told from others."""

    def __init__(self, is_for: Callable[[str], None]) -> None:
        self.is_for = is_for

    def __call__(self, told: Any) -> None:
        self.is_for(told.compile_id)


# -- graphs -----------------------------------------------------------------------------------


class Traced(Exception):
    """Raised in the place of running a graph."""


def graphs_of(function: Callable[..., Any], args: Any, kwargs: Any) -> list[GraphModule]:
    """The forward graph of a call, and the backward graph if there is one, without running them.

    The function must be one graph. What Dynamo would do after it (side effects in Python) is not
    done either.
    """
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(_stop)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    with contextlib.suppress(Traced), _whole_steps():
        compiled(*args, **kwargs)
    return graphs


@contextlib.contextmanager
def _whole_steps() -> Generator[None, None, None]:
    """Trace calls of autograd, and lower a backward graph together with its forward graph."""
    import torch._dynamo.config
    import torch._functorch.config

    with contextlib.ExitStack() as stack:
        for config, name in (
            (torch._dynamo.config, "trace_autograd_ops"),
            (torch._functorch.config, "force_non_lazy_backward_lowering"),
        ):
            if hasattr(config, name):
                stack.enter_context(config.patch(name, True))
        yield


def in_compiled_autograd() -> bool:
    """Whether a backward pass that Dynamo compiled as a whole runs now: no callback follows it."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


def _stop(*inputs: Any) -> Any:
    raise Traced
