"""Do all tests pass with each torch that paceline is made for?

    make versions                              2.13.0 and 2.15.0, in .venv-2.13.0 and .venv-2.15.0
    make versions VERSIONS="2.11.0 2.12.0"     with others
    make versions SAVE=docs/versions.md        and put the table into that page
    make versions TESTS=tests/groups           some of the tests

The environments are made by ``make setup``, as .venv is: each has torch and everything that the
tests need. The suite runs in one after the other; a table says what came of it. Needs nothing but
Python's standard library. Ends with 1 when a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- make versions begins -->", "<!-- make versions ends -->"
SHOWN = 90  # characters of a reason


@dataclass
class Outcome:
    """What became of the tests with one torch."""

    version: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    seconds: float = 0.0

    def take(self, report: str) -> None:
        """Count the tests of a report in JUnit's XML, as pytest writes it."""
        for case in ElementTree.fromstring(report).iter("testcase"):
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed.append(f"{case.get('classname')}::{case.get('name')}")
            elif skip is not None:
                self.skipped[_short(skip.get("message") or "no reason given")] += 1
            else:
                self.passed += 1


def _short(reason: str) -> str:
    """A reason in a cell of a table; reasons that differ in numbers alone are one."""
    words = " ".join(reason.split()).replace("|", "/")
    words = re.sub(r"\btorch \d[\w.+]*", "this torch", words)
    return words if len(words) <= SHOWN else words[: SHOWN - 1] + "…"


def run(version: str, jobs: int, chosen: Sequence[str]) -> Outcome:
    """Run the tests in the environment of ``version``; what they say goes to this terminal."""
    outcome = Outcome(version)
    python = ROOT / f".venv-{version}" / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        files = ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
        command = [str(python), "-m", "pytest", "-q", *files, f"--junitxml={report}", *chosen]
        began = time.monotonic()
        ended = subprocess.run(command, cwd=ROOT).returncode
        outcome.seconds = time.monotonic() - began
        if report.exists():
            outcome.take(report.read_text())
    if ended not in (0, 1) or (ended == 1 and not outcome.failed):
        outcome.failed.append(f"pytest itself ended with {ended}")
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """In Markdown, with the reasons of what was skipped below."""
    lines = ["| torch | passed | failed | skipped | minutes |", "|---|--:|--:|--:|--:|"]
    for one in outcomes:
        counts = f"{one.passed} | {len(one.failed)} | {one.skipped.total()}"
        lines.append(f"| {one.version} | {counts} | {one.seconds / 60:.0f} |")
    reasons = sorted({reason for one in outcomes for reason in one.skipped})
    if reasons:
        heads = " | ".join(one.version for one in outcomes)
        lines += ["", f"| skipped, since | {heads} |", "|---|" + "--:|" * len(outcomes)]
        for reason in reasons:
            counts = " | ".join(str(one.skipped[reason]) for one in outcomes)
            lines.append(f"| {reason} | {counts} |")
    failed = [f"- {one.version}: `{name}`" for one in outcomes for name in one.failed]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])])


def saved(page: str, text: str) -> str:
    """``page`` with ``text`` between the marks."""
    before, mark, rest = page.partition(BEGIN)
    if not mark or END not in rest:
        raise SystemExit(f"the page has no lines {BEGIN} and {END}, between which the table goes")
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Run, print and save what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of torch, such as 2.15.0")
    parser.add_argument("--jobs", type=int, default=2, help="files of tests at a time (2)")
    parser.add_argument("--save", type=Path, help="a page with marks between which the table goes")
    own, _, chosen = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(own.split())
    for version in args.versions:
        if not (ROOT / f".venv-{version}" / "bin" / "python").exists():
            parser.error(f"there is no .venv-{version}: make versions VERSIONS={version} makes it")
    outcomes = [run(version, args.jobs, chosen.split()) for version in args.versions]
    cores = len(os.sched_getaffinity(0))
    here = f"{datetime.date.today()}, {platform.machine()}, {cores} cores, {args.jobs} at a time:"
    text = f"{here}\n\n{table(outcomes)}"
    print(f"\n{text}")
    if args.save:
        args.save.write_text(saved(args.save.read_text(), text))
    return 1 if any(one.failed for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
