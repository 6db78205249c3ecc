# mypy: disable-error-code="attr-defined, arg-type, no-any-return"
# (torch gives these names other signatures in every version)
"""What Dynamo is told of our functions, and what it tells of its compilations.

A function with an attribute ``_torchdynamo_inline`` is traced as the function in that attribute;
:func:`trace_instead` sets it. Dynamo takes seconds to import: nothing here does so before it is
called.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from . import patches

_F = TypeVar("_F", bound=Callable[..., Any])


untraced = torch._disable_dynamo
"""A decorator that leaves a function out of graphs. ``torch.compiler.disable`` does the same, and
imports Dynamo when the function is defined, which takes seconds."""


def trace_instead(function: Any, traced: Callable[..., Any]) -> None:
    """Have Dynamo trace ``traced`` wherever ``function`` is called."""
    function._torchdynamo_inline = traced


def trace_torchs_instead(function: Any, traced: Callable[..., Any]) -> Any:
    """Have Dynamo trace ``traced`` wherever torch's ``function`` is called, until it is taken back.

    Returns a copy of ``function`` that is traced as ever.
    """
    twin = copied(function)
    patches.put(function, "_torchdynamo_inline", traced)
    return twin


def copied(function: Any) -> Any:
    """A copy of ``function``, which :func:`trace_instead` has not touched."""
    twin = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def never_trace(function: Any, *, callees: bool = True) -> None:
    """Leave ``function`` alone when it runs in eager mode between two graphs, and all it calls."""
    from torch._C._dynamo import eval_frame

    if not hasattr(eval_frame, "set_code_exec_strategy"):
        return
    skip = eval_frame._FrameAction.SKIP
    rest = skip if callees else eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(skip, rest)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def folded(function: _F) -> _F:
    """Have Dynamo call ``function`` when it traces, and take the result for a constant.

    ``torch.compiler.assume_constant_result`` does the same and imports Dynamo, which takes seconds.
    """
    function._dynamo_marked_constant = True
    return function


# -- compilations ---------------------------------------------------------------------------------


def this_compilation() -> str:
    """Torch's name of the compilation that runs now; the backward pass of a graph has the same."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def wants_averages_in_graphs() -> bool:
    """Whether the program asked torch for a wrapper that is traced whole, averages included."""
    from torch._dynamo import config

    return config.optimize_ddp == "python_reducer"


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


def compiler_of(backend: Any, options: dict[str, Any] | None) -> Callable[[Any, Any], Any]:
    """What ``torch.compile(backend=..., options=...)`` would build code with."""
    from torch._dynamo.backends.registry import lookup_backend

    compiler: Any = lookup_backend(backend)  # also of one that is a function already
    return compiler if options is None else partial(compiler, config_patches=options)  # Inductor


def hear_of_compilations(begins: Callable[[str], None], ends: Callable[[str], None]) -> None:
    """Call ``begins`` and ``ends`` with the name of every compilation, failed ones included.

    To be called during each: torch forgets it when Dynamo is reset.
    """
    from torch._dynamo.callback import callback_handler as handler

    if not any(getattr(heard, "is_for", None) == begins for heard in handler.start_callbacks):
        handler.register_start_callback(_Heard(begins))
        handler.register_end_callback(_Heard(ends))


class _Heard:
    """A callback, recognizable as one of ours."""

    def __init__(self, is_for: Callable[[str], None]) -> None:
        self.is_for = is_for

    def __call__(self, told: Any) -> None:
        self.is_for(told.compile_id)


def before_compile(function: Any) -> Any:
    """What ``torch.compile`` was given when it returned ``function``; else ``function`` itself."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def reason_of(error: Exception) -> str:
    """Why Dynamo or its backend could not compile, in one line; empty for any other error."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# -- graphs -----------------------------------------------------------------------------------


class GraphTraced(Exception):
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
    with contextlib.suppress(GraphTraced), _whole_steps():
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
    raise GraphTraced


def tracing_backward() -> AbstractContextManager[object]:
    """While it is entered, Dynamo takes ``torch.autograd.grad`` into its graphs; to be kept."""
    from torch._dynamo import config

    return config.patch(trace_autograd_ops=True)


def missing_for_steps() -> str:
    """Why this torch cannot compile a step; empty when it can."""
    from torch._dynamo import config

    if not hasattr(config, "trace_autograd_ops"):
        return f"torch {torch.__version__} cannot trace a backward pass"
    return ""
