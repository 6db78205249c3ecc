"""Prints the table of docs/compile.md: ``python -m tests.compiled.table``. Takes minutes."""

from __future__ import annotations

import platform
import warnings

import torch

from paceline.testing import Meeting, spawn_ranks

from . import rows

WAYS = ("shm", "gloo", "torch")


def measured(meeting: Meeting, way: str) -> dict[str, str]:
    """All verdicts on this rank: over paceline's groups by their backend, or over torch's own."""
    warnings.simplefilter("ignore")
    world = rows.of_torch(meeting) if way == "torch" else rows.of_paceline(meeting, way)
    return {**rows.measure_groups(world), **rows.measure_meshes(world)}


def worse(*verdicts: str) -> str:
    """Ranks may differ: what is wrong on one of them is wrong."""
    order = (rows.ONE_GRAPH, rows.BREAKS, rows.FAILS, rows.WRONG)
    return max(verdicts, key=lambda v: [v.startswith(word) for word in order].index(True))


def main() -> None:
    found = {}
    for way in WAYS:
        first, second = spawn_ranks(2, measured, way, deadline=900)
        found[way] = {title: worse(first[title], second[title]) for title in first}
    print(f"torch {torch.__version__}, {platform.machine()}, 2 processes\n")
    print("| in compiled code | paceline, shm | paceline, gloo | torch's own groups |")
    print("|---|---|---|---|")
    for title in found["shm"]:
        print(f"| {title} | {' | '.join(found[way][title] for way in WAYS)} |")


if __name__ == "__main__":
    main()
