"""Rows of a test file, run on two processes one after the other.

Starting processes and importing torch's compiler costs more than a row does, so there is one launch
for many rows; a test then looks at what became of its row.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import paceline
from paceline.groups import Group
from paceline.testing import Meeting, spawn_ranks
from tests.marks import USUAL

Open = Callable[[], Group]
Row = Callable[[Open], Any]
Results = list[dict[str, str]]


class Opener:
    """Opens a new group of all ranks with every call."""

    def __init__(self, meeting: Meeting) -> None:
        self.engine = USUAL
        self._meeting, self._opened = meeting, 0

    def __call__(self) -> Group:
        self._opened += 1
        return paceline.new_group(
            self.engine,
            store=dist.PrefixStore(f"group{self._opened}", self._meeting.store()),
            rank=self._meeting.rank,
            world_size=self._meeting.size,
        )


def run_rows(meeting: Meeting, module: str, names: Sequence[str]) -> dict[str, str]:
    """What each row of ``module`` raised, or nothing. ``name@engine`` chooses another engine."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows: dict[str, Row] = importlib.import_module(module).ROWS
    results: dict[str, str] = {}
    open_ = Opener(meeting)
    for name in names:
        torch._dynamo.reset()
        counters.clear()
        row, _, engine = name.partition("@")
        open_.engine = engine or USUAL
        try:
            rows[row](open_)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
            break  # the other rank may wait for this one
    dist.destroy_process_group()
    return results


def launch(module: str, names: Sequence[str]) -> Results:
    """The results of both ranks."""
    return spawn_ranks(2, run_rows, module, list(names))


def check(results: Results, name: str) -> None:
    """Fail with the traceback of whoever failed in this row."""
    for rank, found in enumerate(results):
        assert found.get(name, "not reached") == "", f"rank {rank}: {found.get(name)}"
