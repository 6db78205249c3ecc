"""What a graph does and in which order, read from the code that Inductor generated for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Does(Enum):
    """What an entry of a schedule does."""

    COMPUTE = "compute"  # a matrix product, a convolution, a kernel that was generated
    LAUNCH = "launch"  # hands gradients over, and sends off buckets that are complete
    SETTLE = "settle"  # waits for all averages


@dataclass(frozen=True)
class Entry:
    """One thing that runs."""

    does: Does
    what: str  # the kernel's name, or the indices of the parameters


_CALL = re.compile(r"(?:^|[\s=])((?:extern_kernels|torch\.ops|aten|triton\w*|cpp_\w+)[\w.]*)\(")
_INDICES = re.compile(r"\], \[([\d, ]*)\], ")


def read_code(code: str) -> list[Entry]:
    """The schedule of a graph, from what Inductor generated for it."""
    found = []
    for line in _body(code):
        called = _CALL.search(line)
        if called is not None:
            found.append(_entry(called[1], line))
    return found


def _body(code: str) -> Sequence[str]:
    """The lines of the function that runs the graph."""
    lines = code.splitlines()
    start = next((n for n, line in enumerate(lines) if "def call(" in line), len(lines))
    return [line for line in lines[start:] if not line.lstrip().startswith("#")]


def _entry(name: str, line: str) -> Entry:
    if "paceline.launch" in name or "paceline.hand_over" in name:
        indices = _INDICES.search(line)
        return Entry(Does.LAUNCH, indices[1] if indices else "")
    if "paceline.settle" in name or "paceline.average" in name:
        return Entry(Does.SETTLE, "all")
    return Entry(Does.COMPUTE, name)


def launches_between(schedule: Sequence[Entry]) -> int:
    """How many launches have something to compute behind them before everything is awaited."""
    done = [entry.does for entry in schedule]
    end = done.index(Does.SETTLE) if Does.SETTLE in done else len(done)
    computes = [at for at in range(end) if done[at] is Does.COMPUTE]
    last = computes[-1] if computes else -1
    return sum(done[at] is Does.LAUNCH for at in range(last))
