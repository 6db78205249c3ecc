"""``paceline report RUN``: a recorded run as one HTML page, with a trace beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._shown import shown_lines
from . import say


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder with the logs of the ranks.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file or folder to write to. Default: RUN.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """Turn a recorded run into one HTML page, with a trace for ui.perfetto.dev.

    Record a run with `paceline run --record RUN script.py`. The page needs no
    network and no other file. It shows when ranks computed, sent and waited,
    and says which rank made the others wait.
    """
    page = _write(run, out)
    if open_it:
        _show(page)


def _write(run: Path, out: Path | None) -> Path:
    from ..errors import PacelineError
    from ..recorder import read_report

    try:
        found = read_report(run)
    except PacelineError as problem:
        say.fail(str(problem))
    except OSError as problem:
        say.fail(f"{problem.filename or run}: {problem.strerror or problem}.")
    try:
        page = found.write(out)
    except OSError as problem:
        reason = problem.strerror or problem
        say.fail(f"the page cannot be written to {out or run}: {reason}. Give another --out.")
    for line in found.notes:
        say.note(line)
    for line in found.said:
        print(line)
    print(f"The page is {shown_lines(str(page))}; a trace for ui.perfetto.dev lies beside it.")
    return page


def _show(page: Path) -> None:
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        say.note(f"no browser could be started here; open {page.resolve()} yourself.")
