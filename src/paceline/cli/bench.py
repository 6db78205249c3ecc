"""``paceline bench``: lists the project's benchmarks, runs some, and keeps what they say.

The benchmarks are scripts in the folder ``benchmarks`` of a checkout, one question each; they are
not part of an installed package. A script is one of them if it takes ``--save FILE``.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import say

if TYPE_CHECKING:
    from rich.table import Table

ALL = "all"
_HOW_LONG = re.compile(r"--save \S+ {2,}(.+)")
_PYTHON = re.compile(r"^ +(\.venv-\w+)/bin/python \S+ --save", re.MULTILINE)


@dataclass(frozen=True)
class Benchmark:
    """One script, and what it says of itself."""

    name: str
    path: Path
    question: str  # the first sentence of its docstring
    how_long: str  # in its own words; empty if it does not say
    has_quick: bool
    python: Path  # what runs it: this Python, or that of an environment of its own

    @property
    def lacks(self) -> str:
        """The environment that it needs and that is not there; empty if nothing is missing."""
        return "" if self.python.exists() else self.python.parents[1].name


@dataclass(frozen=True)
class Ran:
    """How a run of one ended."""

    name: str
    seconds: float
    code: int
    saved: Path | None


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Benchmarks to run, or 'all'; none: list them.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure roughly, in less time.")] = False,
    save: Annotated[
        bool, typer.Option("--save", help="Save their output in benchmarks/results/.")
    ] = False,
) -> None:
    """List the project's benchmarks, or run some of them.

    They are part of a checkout, not of an installed package. With --save, each writes a file that
    begins with the machine it ran on. Ends with 1 if one of them fails.
    """
    folder = find_folder()
    if folder is None:
        say.fail(
            "bench: there is no folder 'benchmarks' here. The benchmarks are not part of the "
            "installed package: clone the repository, run `make setup` there, and then "
            "`.venv/bin/paceline bench` in that checkout."
        )
    known = {one.name: one for one in find_benchmarks(folder)}
    if not names:
        _show_list(list(known.values()))
        return
    chosen = _choose(known, names)
    ran = [_run(one, quick, _target(folder, one.name, quick) if save else None) for one in chosen]
    _show_runs(ran)
    if any(one.code for one in ran):
        raise typer.Exit(1)


def _choose(known: Mapping[str, Benchmark], names: Sequence[str]) -> list[Benchmark]:
    """Those of the names; of all, those that can run here."""
    if unknown := [name for name in names if name not in (*known, ALL)]:
        say.fail(f"bench: no benchmark is called {unknown[0]!r}; there is {', '.join(known)}.")
    asked = known if ALL in names else dict.fromkeys(names)
    chosen = [known[name] for name in asked]
    for one in [one for one in chosen if one.lacks]:
        text = f"bench: {one.name} needs {one.lacks}, which `make bench-{one.name}` makes and uses"
        if ALL not in names:
            say.fail(f"{text}.")
        say.note(f"{text}; it is left out.")
        chosen.remove(one)
    return chosen


def find_folder() -> Path | None:
    """The checkout's benchmarks: of this package, or of the folder this runs in."""
    for root in (Path(__file__).parents[3], Path.cwd()):
        folder = root / "benchmarks"
        if (folder / "report.py").is_file() and (root / "pyproject.toml").is_file():
            return folder
    return None


def find_benchmarks(folder: Path) -> Iterator[Benchmark]:
    """Every script of the folder that takes ``--save``, by name."""
    for path in sorted(folder.glob("*.py")):
        one = read_benchmark(path)
        if one is not None:
            yield one


def read_benchmark(path: Path) -> Benchmark | None:
    """What a script says of itself; None if it is no benchmark."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    options = set(_options(tree))
    if "--save" not in options:
        return None
    about = ast.get_docstring(tree) or ""
    how_long = _HOW_LONG.search(about)
    takes = how_long.group(1) if how_long else ""
    own = _PYTHON.search(about)
    python = path.parents[1] / own.group(1) / "bin" / "python" if own else Path(sys.executable)
    return Benchmark(path.stem, path, question_in(about), takes, "--quick" in options, python)


def question_in(about: str) -> str:
    """The first sentence, on one line."""
    first = " ".join(about.split("\n\n")[0].split())
    return first[: first.find("?") + 1] or first


def _options(tree: ast.Module) -> Iterator[str]:
    """The names that the script gives to ``add_argument``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def _target(folder: Path, name: str, quick: bool) -> Path:
    """Where its result belongs: named by the machine, and apart from full ones if rough."""
    where = f"{_gpu()}" if name.endswith("gpu") else _cpu()
    return folder / "results" / f"{name}-{where}{'-quick' * quick}.md"


def _cpu() -> str:
    return f"{platform.machine()}-{len(os.sched_getaffinity(0))}-cores"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no-gpu"
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name().lower())
    return "-".join(word for word in words if word != "nvidia")


def _run(one: Benchmark, quick: bool, target: Path | None) -> Ran:
    """Run it with its output on this terminal."""
    options = ["--quick"] if quick and one.has_quick else []
    if target is not None:
        target.parent.mkdir(exist_ok=True)
        options += ["--save", str(target)]
    print(f"\n{one.name}: {one.question}\n", flush=True)
    began = time.monotonic()
    try:
        code = subprocess.run([str(one.python), str(one.path), *options], check=False).returncode
    except KeyboardInterrupt:  # it has got the signal too
        say.complain(f"bench: {one.name} was stopped.")
        raise typer.Exit(130) from None
    saved = target if code == 0 and target is not None and target.exists() else None
    return Ran(one.name, time.monotonic() - began, code, saved)


def _show_list(known: Sequence[Benchmark]) -> None:
    table = _table("benchmark", "question", "takes")
    for one in known:
        table.add_row(one.name, one.question, one.how_long)
    _print(table)
    print("\nRun some with: paceline bench NAME... [--quick] [--save]")


def _show_runs(ran: Sequence[Ran]) -> None:
    table = _table("benchmark", "took", "ended", "saved in")
    for one in ran:
        ended = "well" if one.code == 0 else f"with code {one.code}"
        saved = os.path.relpath(one.saved) if one.saved else ""
        table.add_row(one.name, f"{one.seconds:.0f} s", ended, saved)
    print()
    _print(table)


def _table(*heads: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console().print(table)
