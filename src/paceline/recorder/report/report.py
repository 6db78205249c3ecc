"""A recorded run as one HTML page that needs nothing else, and as a trace beside it.

``report_read`` reads the logs, ``report_facts`` and ``report_late`` say what is in them,
``report_words`` puts it in words, ``report_page`` and ``report_trace`` write it down.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..run import write_whole
from .facts import RunFacts, gather
from .page import page
from .read import Run, read
from .trace import trace
from .words import sentences

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Report:
    """What is known about a recorded run, ready to be written."""

    directory: Path
    run: Run
    facts: RunFacts

    @property
    def said(self) -> tuple[str, ...]:
        """What stands out, in sentences."""
        return sentences(self.facts)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing from the run, or does not fit together in it."""
        return self.run.notes

    def write(self, out: AnyPath | None = None) -> Path:
        """Write the page, and the trace beside it, and return the page's path.

        ``out`` is the page's file, or a folder for it (one that is there, or a name without an
        ending such as .html); without it the page is ``report.html`` among the logs. The trace is
        ``trace.json`` beside it, or NAME.trace.json beside NAME.html.
        """
        path = page_path(self.directory, out)
        beside = trace_path(path)
        self.write_trace(beside)
        write_whole(path, page(self.run, self.facts, beside.name).encode())
        return path

    def write_trace(self, out: AnyPath | None = None) -> Path:
        """Write only the trace, for ui.perfetto.dev, and return its path."""
        path = trace_path(page_path(self.directory, None)) if out is None else Path(out)
        write_whole(path, msgspec.json.encode(trace(self.run.logs, self.facts.began)))
        return path


def read_report(run_dir: AnyPath) -> Report:
    """Read the run recorded in ``run_dir``; nothing is written yet."""
    run = read(Path(run_dir))
    return Report(Path(run_dir), run, gather(run.logs))


def write_report(run_dir: AnyPath, out: AnyPath | None = None) -> Path:
    """Write the page of the run recorded in ``run_dir``, and its trace, as :meth:`Report.write`."""
    return read_report(run_dir).write(out)


def page_path(run_dir: Path, out: AnyPath | None) -> Path:
    """Where the page goes."""
    path = run_dir if out is None else Path(out)
    return path / "report.html" if path.is_dir() or not path.suffix else path


def trace_path(page: Path) -> Path:
    """Where the trace beside a page goes."""
    name = "trace.json" if page.name == "report.html" else f"{page.stem}.trace.json"
    return page.with_name(name)
