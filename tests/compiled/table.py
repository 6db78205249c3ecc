"""Prints the tables of docs/compile.md: ``python -m tests.compiled.table``. Takes minutes."""

from __future__ import annotations

import logging
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from paceline.testing import Meeting, spawn_ranks

from . import rows, step_rows
from .ranks import Opener

OBJECTS = ("shm", "gloo", "torch")
DEADLINE = 1800.0


def objects(meeting: Meeting, way: str) -> dict[str, str]:
    """Verdicts about objects: over paceline's groups by their backend, or over torch's own."""
    warnings.simplefilter("ignore")
    world = rows.of_torch(meeting) if way == "torch" else rows.of_paceline(meeting, way)
    measures = (rows.measure_groups, rows.measure_meshes, rows.measure_across)
    return {title: found for measure in measures for title, found in measure(world).items()}


def steps(meeting: Meeting, way: str) -> dict[str, str]:
    """Verdicts about training, over shm."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    if way == step_rows.WAYS[2]:
        rows.as_shipped()
    dist.init_process_group("gloo")
    return step_rows.measure(way, Opener(meeting))


def worse(*verdicts: str) -> str:
    """Ranks may differ: what is wrong on one of them is wrong."""
    order = (rows.ONE_GRAPH, rows.BREAKS, rows.FAILS, rows.WRONG, step_rows.WRONG)
    return max(verdicts, key=lambda v: max([n for n, word in enumerate(order) if word in v] or [0]))


def measured(
    measure: Callable[[Meeting, str], dict[str, str]], ways: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Verdicts by way and title."""
    found = {}
    for way in ways:
        first, second = spawn_ranks(2, measure, way, deadline=DEADLINE)
        found[way] = {title: worse(first[title], second[title]) for title in first}
    return found


def show(heads: Sequence[str], found: Mapping[str, Mapping[str, str]]) -> None:
    """One table, a row for each title."""
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    columns = list(found.values())
    for title in columns[0]:
        print(f"| {title} | {' | '.join(column[title] for column in columns)} |", flush=True)


def main() -> None:
    print(f"torch {torch.__version__}, {platform.machine()}, 2 processes", flush=True)
    heads = ("in compiled code", "paceline, shm", "paceline, gloo", "torch's own groups")
    show(heads, measured(objects, OBJECTS))
    ways = [f"`{way}`" if "'" not in way else way for way in step_rows.WAYS]
    show(("in a training loop", *ways), measured(steps, step_rows.WAYS))


if __name__ == "__main__":
    main()
