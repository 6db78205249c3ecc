"""The current group of a thread, inside a graph.

Dynamo cannot express a value that belongs to a thread. It can express an attribute of a module,
which it reads again before every call of the compiled code to check its guards, and to hand the
value to the graph. ``of_this_thread`` is such an attribute of this module, made on demand.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed import ProcessGroup

from .._torch.c10d import current_group

_this: Any = sys.modules[__name__]
_entered: list[ProcessGroup] = []  # within one trace; empty before and after it


def __getattr__(name: str) -> Any:
    if name == "of_this_thread":
        return current_group()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def traced_current_process_group() -> ProcessGroup:
    """What ``current_process_group`` is inside a graph."""
    return _entered[-1] if _entered else _this.of_this_thread


@contextmanager
def traced_process_group(pg: ProcessGroup) -> Generator[None, None, None]:
    """What ``process_group`` is inside a graph."""
    _entered.append(pg)
    try:
        yield
    finally:
        _entered.pop()
