"""How the operators ``torch.ops.paceline.…`` are made: when they are first needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch.library import Library, register_fake

from .._torch import opaque


@cache
def _library() -> Library:
    return Library("paceline", "FRAGMENT")


def define(
    name: str,
    schema: str,
    kernel: Callable[..., object],
    shapes: Callable[..., object],
    *,
    in_order: bool = False,
) -> None:
    """Make an operator; ``shapes`` is what the compiler knows of its results.

    ``in_order``: calls are neither dropped nor changed in order, whoever uses the results.
    """
    library = _library()
    library.define(name + schema)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    register_fake(f"paceline::{name}", shapes, lib=library)
    if in_order:
        opaque.keep_in_order(library, f"paceline::{name}")
