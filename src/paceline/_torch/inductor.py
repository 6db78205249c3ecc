"""Inductor: what it needs to build code, and how a pass of ours over its graphs is run."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.fx import Graph


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


def with_pass_over_graphs(
    given: Mapping[str, Any], change: Callable[[Graph], None], fingerprint: str
) -> dict[str, Any]:
    """Options for Inductor: those ``given``, and ``change`` made to every graph before it is built.

    Inductor keeps what it built on disk; ``fingerprint`` is another one when ``change`` is.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class OurPass(CustomGraphPass):
        """Inductor finds graphs in its cache by :meth:`uuid` too."""

        def __call__(self, graph: Graph) -> None:
            change(graph)

        def uuid(self) -> str:
            return fingerprint

    return {"post_grad_custom_post_pass": OurPass(), **given}
