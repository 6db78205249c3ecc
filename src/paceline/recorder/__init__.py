"""The recorder: what every rank did recently, why one waits for another, and reports of runs.

It is always on; ``PACELINE_RECORDER=0`` turns it off. Other packages write to ``events.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from . import events
from .export import MetricsServer, serve_metrics, to_tensorboard
from .run import RankLog, read_run
from .saving import rank_log, save, save_all
from .threads import frames as frames  # for testing.py
from .totals import Summary, Totals, summary, totals
from .watch import configure, finish_explaining, install

if TYPE_CHECKING:
    from .report import Report

install()

__all__ = [
    "MetricsServer",
    "RankLog",
    "Summary",
    "Totals",
    "configure",
    "events",
    "finish_explaining",
    "rank_log",
    "read_report",
    "read_run",
    "save",
    "save_all",
    "serve_metrics",
    "summary",
    "to_tensorboard",
    "totals",
    "write_report",
]


def read_report(run_dir: str | Path) -> Report:
    """Read a recorded run; ``write`` of the result writes the HTML page."""
    from .report import read_report as read

    return read(run_dir)


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the timeline of a recorded run as one HTML page and return its path."""
    from .report import write_report as write

    return write(run_dir, out)
