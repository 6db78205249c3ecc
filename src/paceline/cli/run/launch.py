"""Carries a plan out: starts the ranks, shows what they write, and returns the exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..._doors import SIDE_DOOR
from ..._shown import shown_lines
from .. import say
from ..machine import allow_open_files, cores, loopback, threads_per_rank
from .folders import LaunchFolder
from .plan import Become, Launch
from .record import clear_record, tell_if_empty
from .signals import handling, heeded
from .survivors import tell_missing
from .verdict import LaunchVerdict, signal_name

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from .agent import Agent

BOOTSTRAP = Path(__file__).with_name("script.py")
_OPEN_FILES, _FILES_PER_RANK = 128, 6  # that a launcher has: its own, and two pipes by both ends


@dataclass(frozen=True)
class Script:
    """What every rank runs, and how."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False  # python -m
    backend: str = "auto"
    drop_in: bool = False
    keep_backend: bool = False  # of a script that asks for gloo
    record: str = ""  # a folder; the recorder reads PACELINE_RECORD
    threads: int | None = None
    metrics: str = ""  # PORT or HOST:PORT; the recorder reads PACELINE_METRICS

    def command(self) -> list[str]:
        """The arguments of the interpreter, in a rank."""
        mode = ["-m"] if self.module else []
        return [str(BOOTSTRAP), *mode, self.target, *self.arguments]

    def environment(self, nproc: int) -> dict[str, str]:
        """Variables for all ranks of this host, beside those that torch's agent sets."""
        found = {"PACELINE_BACKEND": self.backend} if self.backend != "auto" else {}
        found |= {"PACELINE_DROP_IN": self._mode} if self._mode else {}
        found |= {"PACELINE_RECORD": os.path.abspath(self.record)} if self.record else {}
        found |= {"PACELINE_METRICS": self.metrics} if self.metrics else {}
        if threads := threads_per_rank(self.threads, nproc, cores(), os.environ):
            found["OMP_NUM_THREADS"] = str(threads)
        if "PYTHONFAULTHANDLER" not in os.environ:
            found["PYTHONFAULTHANDLER"] = "1"  # a crash in C shall leave a Python stack
        return found

    @property
    def _mode(self) -> str:
        """What of torch ranks replace, as ``script.py`` reads it: names, the engine, or both."""
        if self.keep_backend:
            return "names" if self.drop_in else ""
        return "1" if self.drop_in else "engine" if self.backend != "auto" else ""


@dataclass(frozen=True)
class Conduct:
    """What the launcher does when ranks fail or have to end."""

    max_restarts: int = 0
    grace: float = 30.0  # seconds that a rank has to end; torchrun's number
    patience: float = 2.0  # seconds that ranks have to recover from another's failure, or to end


def become(plan: Become, script: Script) -> NoReturn:
    """Turn this process into its rank; srun and mpirun carry its output and its exit code."""
    os.environ.update(plan.environment())
    os.environ.update(script.environment(plan.local_world_size))
    os.execv(sys.executable, [sys.executable, *script.command()])


def launch(plan: Launch, script: Script, conduct: Conduct, show: Collection[int] = ()) -> int:
    """Start this host's ranks and wait for their end; returns what a shell is to see."""
    os.environ.update(script.environment(plan.nproc), PYTHONUNBUFFERED="1")
    os.environ.pop(SIDE_DOOR, None)  # of a launcher that this one was started under
    if plan.max_nodes == 1 and (name := loopback()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # gloo listens too
    allow_open_files(_OPEN_FILES + _FILES_PER_RANK * plan.nproc)
    # torch's agent takes these while ranks run, and would take what nohup has this process ignore.
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join(s.name for s in heeded()))
    try:  # a signal may come as soon as the first handler is set
        with handling(_stop):
            return _launch(plan, script, conduct, show)
    except _StoppedError as stop:
        say.complain(stop.reason)
        return stop.code


def _launch(plan: Launch, script: Script, conduct: Conduct, show: Collection[int]) -> int:
    from .agent import Agent, Pipes
    from .screen import OutputReader

    _hush()
    meeting = _meeting(plan)
    if plan.max_nodes == 1:
        clear_record(script.record)
    try:
        with LaunchFolder("paceline-run-") as folder:
            pipes = Pipes(folder.path, OutputReader(show), conduct.patience, plan.seats)
            agent = Agent(_spec(plan, script, conduct, meeting), pipes, conduct.grace)
            try:
                _run(agent)
            finally:
                pipes.reader.close()  # what is said now comes after all that ranks have written
            code = _tell(agent)
        if not code and plan.max_nodes == 1:
            tell_if_empty(script.record)
        return code
    finally:
        meeting.shutdown()


def _hush() -> None:
    """Keep torch's agent from telling in its own way what is told here."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _meeting(plan: Launch) -> RendezvousHandler:
    """Where the hosts meet, or the ranks of a single one."""
    from .meeting import MachineMeeting
    from .one_machine import LocalMeeting, ranks_find_sockets

    if plan.max_nodes == 1 and not plan.port and ranks_find_sockets():
        return LocalMeeting(plan)
    return MachineMeeting(plan)


def _spec(plan: Launch, script: Script, conduct: Conduct, meeting: RendezvousHandler) -> WorkerSpec:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    return WorkerSpec(
        role="default",
        local_world_size=plan.nproc,
        entrypoint=sys.executable,
        args=("-u", *(_keep_dollars(word) for word in script.command())),
        rdzv_handler=meeting,
        max_restarts=conduct.max_restarts,
        monitor_interval=0.1,
    )


def _keep_dollars(word: str) -> str:
    """Guard an argument's dollars: torch's agent fills in ``${local_rank}``, and nothing else."""
    return word.replace("$", "$$").replace("$${local_rank}", "${local_rank}")


@dataclass
class _StoppedError(Exception):
    """The run ended for a reason outside the ranks of this host."""

    reason: str
    code: int


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End this launcher for a signal that came while no rank ran."""
    raise _StoppedError(f"stopped by {signal_name(number)}; no rank runs", 128 + number)


def _run(agent: Agent) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    from .agent import FailedElsewhereError

    try:
        with handling(_stop):  # and so again once torch's agent has put its own there
            agent.run()
    except FailedElsewhereError as failure:
        raise _StoppedError(str(failure), 1) from None
    except (SignalException, KeyboardInterrupt) as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end has begun
        number = getattr(stop, "sigval", signal.SIGINT)
        reason = f"stopped by {signal_name(number)}; all ranks have ended"
        raise _StoppedError(reason, 128 + number) from None


def _tell(agent: Agent) -> int:
    attempt = agent.attempt
    verdict = attempt.verdict()
    if lost := sorted(attempt.losses.lost):
        say.note(tell_missing(lost, attempt.size, verdict is None))
    if verdict is None:
        return _check_count(len(attempt.endings), len(attempt.ranks))
    return tell(replace(verdict, headline=_cause(agent, verdict)), attempt.size)


def _cause(agent: Agent, verdict: LaunchVerdict) -> str:
    """Tell the other hosts, or hear from them, what came first."""
    from .meeting import MachineMeeting

    if isinstance(agent.meeting, MachineMeeting):
        ranks = agent.attempt.ranks.values()
        return agent.meeting.settle(verdict.headline, not verdict.consequence, ranks)
    return verdict.headline


def _check_count(ended: int, asked: int) -> int:
    if ended == asked:
        return 0
    say.complain(f"{asked} ranks were asked for, and {ended} have run")
    return 1


def tell(verdict: LaunchVerdict | None, size: int) -> int:
    """Say which rank failed first, what the others made of it, and its traceback once more.

    Returns the exit code. The traceback has been shown when it happened, and is found again at the
    end of the output; where no rank printed it, since it looked like another's fault, it is new.
    """
    if verdict is None:
        return 0
    say.complain(verdict.headline)
    for line in verdict.others:
        print(f"  {shown_lines(line)}", file=sys.stderr)
    if size > 1 or verdict.consequence:
        for line in shown_lines(verdict.traceback).splitlines():
            print(f"[{verdict.rank}] {line}", file=sys.stderr)
    sys.stderr.flush()
    return verdict.code
