"""``paceline demo``: trains a small model on all cores, and shows how that goes.

This file is the command: it checks what was asked, starts the ranks, and tells how it went. What a
rank does is in ``rank.py``, what is trained in ``tasks.py``, the page in ``live.py``.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .. import say
from ..machine import cores, loopback

if TYPE_CHECKING:
    from ...errors import RanksFailedError
    from .rank import DemoPlan, TrainingOutcome
    from .tasks import DemoTask

MOST_RANKS = 16  # that it starts by itself; more would mostly import torch
LIMIT = 64  # ranks of shm
LONGEST = 86_400.0  # seconds; then its ranks are ended in any case
WIDEST = 100  # columns of what it says in the end
PAGE, TRACE, FAILURE = "report.html", "trace.json", "failure.txt"  # what it writes, besides logs


class Model(str, Enum):
    """What can be trained."""

    gpt = "gpt"
    digits = "digits"


class Backend(str, Enum):
    """What the ranks can talk over."""

    auto = "auto"
    shm = "shm"
    gloo = "gloo"
    hybrid = "hybrid"


def demo(
    model: Annotated[Model, typer.Option(help="What to train.")] = Model.gpt,
    nproc: Annotated[
        str, typer.Option(help="Number of ranks; auto: one per core.", metavar="N|auto")
    ] = "auto",
    backend: Annotated[Backend, typer.Option(help="The backend of the ranks.")] = Backend.auto,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to train; by default what the model needs.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds to train at most.")] = None,
    compare: Annotated[
        bool, typer.Option(help="Time some steps against torch's DistributedDataParallel.")
    ] = True,
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Train twice, the second time with ranks being killed.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for report.html and the recorded run.")] = Path(
        "paceline-demo"
    ),
) -> None:
    """Train a small model on all cores and watch it; about a minute.

    A character-level GPT trains on the source of Python's standard library, or a convolutional net
    on digits. At the end it shows a sample, compares a step with torch's DistributedDataParallel
    over gloo, and says where the report of the run is.
    """
    ranks = _count(nproc)
    if chaos:
        _be_chaotic(ranks, steps, out)
    _check(model.value, backend.value, seconds)
    _make_folder(out)
    _tell_what_auto_picks(backend.value)
    plan = _plan(model.value, backend.value, ranks, steps, seconds, compare, out)
    with _polite_ends():
        ending = _run(plan, ranks)
    _tell(plan, ending, ranks, out)


def _be_chaotic(ranks: int, steps: int | None, out: Path) -> NoReturn:
    """Run ``--chaos``: the GPT as an elastic job on at least two ranks."""
    from .chaos import STEPS, chaos

    _make_folder(out)
    with _polite_ends():
        try:
            code = chaos(max(2, ranks), steps or STEPS, out)
        except KeyboardInterrupt:
            say.complain("stopped; all ranks are ended.")
            code = 130
    raise typer.Exit(code)


def _count(nproc: str) -> int:
    if nproc == "auto":
        return min(cores(), MOST_RANKS)
    if not nproc.isdecimal() or not 0 < int(nproc) <= LIMIT:
        say.fail(f"demo --nproc {nproc}: give a number of ranks from 1 to {LIMIT}, or auto.")
    return int(nproc)


def _check(model: str, backend: str, seconds: float | None) -> None:
    from ...groups import capabilities
    from .tasks import missing

    if lack := missing(model):
        say.fail(f"demo --model {model}: {lack}.")
    found = capabilities()[backend]
    if not found.available:
        say.fail(f"demo --backend {backend}: not available here: {found.reason}.")
    if seconds is not None and not 0 < seconds <= LONGEST:
        say.fail(f"demo --seconds {seconds:g}: give a number above 0, up to a day.")


def _tell_what_auto_picks(backend: str) -> None:
    from ...groups import capabilities

    if reason := capabilities()[backend].reason:  # gloo then
        say.note(f"{backend} {reason}.")


def _make_folder(out: Path) -> None:
    """Have a folder in which files can be written; better to fail now than in a minute."""
    if out.exists() and not out.is_dir():
        say.fail(f"demo --out {out}: this is a file; give a folder for the report.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for old in (*out.glob("rank-*.json"), out / FAILURE):  # of a run before
            old.unlink(missing_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        say.fail(f"demo --out {out}: {error.strerror or error}; give another folder.")
    if taken := [name for name in (PAGE, TRACE) if (out / name).is_dir()]:
        say.fail(f"demo --out {out}: {taken[0]} in it is a folder; give another folder.")


def _plan(
    model: str,
    backend: str,
    ranks: int,
    steps: int | None,
    seconds: float | None,
    compare: bool,
    out: Path,
) -> DemoPlan:
    from .pace import Pace
    from .rank import DemoPlan
    from .tasks import TASKS

    task = TASKS[model]
    if steps or seconds:
        pace = Pace(steps or math.inf, seconds or math.inf)
    else:
        pace = Pace(task.steps, task.seconds)
    threads = max(1, cores() // ranks)
    return DemoPlan(model, backend, threads, pace, compare, str(out), "")


def _run(plan: DemoPlan, ranks: int) -> TrainingOutcome:
    """Train on so many ranks; what goes wrong is told in one line."""
    from ...errors import RanksFailedError

    try:
        return _watch(plan, ranks)
    except KeyboardInterrupt:
        say.complain("stopped; all ranks are ended.")
        raise typer.Exit(130) from None
    except RanksFailedError as error:
        _tell_failure(error, Path(plan.folder))


def _watch(plan: DemoPlan, ranks: int) -> TrainingOutcome:
    """Start the ranks, show what they tell, and wait for their end."""
    from ...testing import spawn_ranks
    from .live import Scoreboard, open_view
    from .rank import run_rank
    from .talk import TalkListener
    from .tasks import TASKS

    task = TASKS[plan.task]
    view = open_view(Scoreboard(f"paceline demo: {task.title}", task.measure, ranks))
    try:
        with TalkListener(view.hear) as listener:
            plan = replace(plan, address=listener.address)
            endings = spawn_ranks(ranks, run_rank, plan, deadline=LONGEST, env=_environment())
    finally:
        view.close()
    return endings[0]


def _environment() -> dict[str, str]:
    """All ranks are on this machine: gloo need not ask what the machine is called."""
    within = loopback()
    if within is None or "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    return {"GLOO_SOCKET_IFNAME": within}


@contextmanager
def _polite_ends() -> Iterator[None]:
    """Clean up when this process gets SIGTERM or SIGHUP."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)


def _tell_failure(error: RanksFailedError, out: Path) -> NoReturn:
    from ..failures import reason_of

    rank, path = error.failures[0][0], out / FAILURE
    text = f"demo: rank {rank} failed: {reason_of(error)}"
    with suppress(OSError):  # where nothing can be written, what it failed with is enough
        path.write_text(f"{error}\n")
        text += f" Tracebacks of all: {path}"
    say.fail(text, code=1)


def _tell(plan: DemoPlan, ending: TrainingOutcome, ranks: int, out: Path) -> None:
    from ... import recorder
    from .tasks import TASKS

    print(f"\n{ending.shown}\n")
    _print(summary(TASKS[plan.task], ending, ranks))
    if ending.comparison is not None:
        _print(ending.comparison.sentence(ending.backend))
    if busy := busy_note(os.getloadavg()[0], ranks, cores()):
        _print(busy)
    try:
        page = recorder.write_report(out)
    except OSError as error:
        say.fail(f"demo: the report could not be written: {error.strerror or error}.", code=1)
    print(f"The report of the run: {page.resolve()}")


def _print(text: str) -> None:
    """Print ``text``, wrapped between words to the width of the terminal."""
    if sys.stdout.isatty():
        text = textwrap.fill(text, min(WIDEST, shutil.get_terminal_size().columns))
    print(text)


def summary(task: type[DemoTask], ending: TrainingOutcome, ranks: int) -> str:
    """What was trained, how fast, and what it came to, in two sentences."""
    unit = f" {task.unit}" if task.unit else ""
    return (
        f"{ending.parameters:,} parameters, {ending.steps} steps on {ranks} "
        f"rank{'s' * (ranks != 1)} over {ending.backend} in {ending.seconds:.1f} s: "
        f"{ending.samples / ending.seconds:,.0f} samples/s, {ending.waiting:.1%} of the time spent "
        f"waiting. The {task.measure} was {ending.first:.3f}{unit} before the first step, and is "
        f"{ending.last:.3f} now."
    )


def busy_note(load: float, ranks: int, cores: int) -> str:
    """A warning not to trust the times, where other programs want the cores as well."""
    others = load - ranks
    if others < 0.5 * cores:
        return ""
    return f"The machine is busy with other work (load {load:.1f}): the times mean little."
