"""What a compiled step needs of torch beyond its public interface. Holds for torch 2.11 to 2.13."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.fx import Graph
from torch.optim import Optimizer

from . import channels_last, schedule

F = TypeVar("F", bound=Callable[..., Any])


def tracing_backward() -> AbstractContextManager[object]:
    """While it is entered, Dynamo takes ``torch.autograd.grad`` into its graphs; to be kept."""
    from torch._dynamo import config

    return config.patch(trace_autograd_ops=True)  # type: ignore[no-any-return]


def folded(function: F) -> F:
    """Have Dynamo call ``function`` when it traces, and take the result for a constant.

    ``torch.compiler.assume_constant_result`` does the same and imports Dynamo, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def missing() -> str:
    """Why this torch cannot compile a step; empty when it can."""
    from torch._dynamo import config

    if not hasattr(config, "trace_autograd_ops"):
        return f"torch {torch.__version__} cannot trace a backward pass"
    return ""


def missing_tools() -> str:
    """What Inductor needs to build code for the CPU and does not find; empty if all is there."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "Inductor finds no C++ compiler (Debian: apt install g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Inductor finds no Python.h (Debian: apt install python3-dev)"
    return ""


def reason_of(error: Exception) -> str:
    """Why Dynamo or its backend could not compile, in one line; empty for any other error."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def inductor_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options for Inductor under which the order that ``schedule.py`` sets is the one that runs."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class InOrder(CustomGraphPass):
        """Inductor finds graphs in its cache by :meth:`uuid` too."""

        def __call__(self, graph: Graph) -> None:
            channels_last.order_convolutions(graph)
            schedule.launch_early(graph)

        def uuid(self) -> str:
            return _fingerprint()

    return {"post_grad_custom_post_pass": InOrder(), **given}


@cache
def _fingerprint() -> str:
    """Another one when the code of the passes is another."""
    files = [Path(str(module.__file__)) for module in (channels_last, schedule)]
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def note_step(optimizer: Optimizer) -> None:
    """Let schedulers of the learning rate know that the optimizer has stepped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
