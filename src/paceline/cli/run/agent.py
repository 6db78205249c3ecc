"""Starts this host's ranks through torch's elastic agent, watches them, and ends them.

The agent sets the environment, restarts and talks to the other hosts' agents. What is ours:
output through pipes that ``screen.py`` reads, how a failure is told (``verdict.py``), and
that nothing is left running: every rank has a session of its own, which is ended as a whole.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from ..._torch.elastic import OpenAgent, log_folder, pipes_of
from ...errors import LaunchError
from .. import say
from .meeting import MachineMeeting
from .plan import check_shown
from .screen import OutputReader
from .sessions import kill_sessions
from .signals import deferred, heeded, signals_noted
from .survivors import Losses, Outlook, read_survivors, tell_lost, without
from .verdict import (
    LaunchVerdict,
    RankEnding,
    describe,
    judge,
    named,
    read_reports,
    tell_lone,
    why_again,
)

_KILLED = 2.0  # seconds that the kernel has to end a process that was killed
_PAUSE = 0.02
_INSISTED = 5.0  # seconds after SIGTERM for ranks that have not ended after SIGINT


class Pipes(LogsSpecs):
    """Named pipes for the ranks' output, and a folder for their notes; one set for each attempt."""

    def __init__(
        self,
        folder: Path,
        reader: OutputReader,
        patience: float,
        seats: Sequence[Mapping[str, str]] = (),
    ) -> None:
        super().__init__(str(folder))
        self.seats = seats
        self.reader = reader
        self.patience = patience
        self.attempt = Attempt(folder)

    @property
    def root_log_dir(self) -> str:
        """The folder that holds everything."""
        return log_folder(self)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the pipes of one attempt; torch calls it right before the ranks start."""
        number = envs[0].get("TORCHELASTIC_RESTART_COUNT", "0")
        folder = Path(self.root_log_dir, f"attempt-{number}-{time.monotonic_ns()}")
        folder.mkdir()
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        self.attempt = Attempt(folder, ranks, int(envs[0]["WORLD_SIZE"]), int(number))
        self.attempt.losses = Losses(self.patience)
        self._tell_if_hidden()
        for local, env in envs.items():
            env["PACELINE_NOTES"] = str(folder)
            env["PACELINE_LAUNCHER"] = str(os.getpid())
            env["PACELINE_MASTER"] = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
            env["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error-{local}.json")
            env.update(self.seats[local] if self.seats else {})
        return LogsDest(
            stdouts={local: self._pipe(folder, rank, 1) for local, rank in ranks.items()},
            stderrs={local: self._pipe(folder, rank, 2) for local, rank in ranks.items()},
            error_files={local: env["TORCHELASTIC_ERROR_FILE"] for local, env in envs.items()},
        )

    def _tell_if_hidden(self) -> None:
        """Say which of the ranks that are to be shown there are none of, on several hosts."""
        try:
            check_shown(self.reader.shown or (), self.attempt.size)
        except LaunchError as error:
            say.note(str(error))

    def _pipe(self, folder: Path, rank: int, number: int) -> str:
        path = str(folder / f"pipe-{rank}-{number}")
        os.mkfifo(path, 0o600)
        self.reader.add(path, rank, number)
        return path


@dataclass
class Attempt:
    """One start of this host's ranks."""

    notes: Path
    ranks: dict[int, int] = field(default_factory=dict)  # by local rank
    size: int = 0
    number: int = 0
    endings: dict[int, RankEnding] = field(default_factory=dict)  # by rank
    pids: dict[int, int] = field(default_factory=dict)  # by rank
    failing_since: dict[int, float] = field(default_factory=dict)  # by rank: its script has failed
    losses: Losses = field(default_factory=lambda: Losses(0.0))
    told_lone: bool = False

    @property
    def failed(self) -> list[int]:
        """The ranks that have ended badly, of themselves."""
        return sorted(rank for rank, end in self.endings.items() if end.code and not end.stopped)

    @property
    def running(self) -> list[int]:
        """The ranks whose processes have not ended."""
        return sorted(self.pids.keys() - self.endings.keys())

    def verdict(self) -> LaunchVerdict | None:
        """Who failed first of those that the run needs; None while nobody has."""
        lost = self.losses.lost
        needed = {rank: end for rank, end in self.endings.items() if rank not in lost}
        return judge(needed, read_reports(self.notes), self.size)

    def why(self, rank: int) -> str:
        """How a rank that has ended did so."""
        return describe(self.endings[rank], read_reports(self.notes).get(rank))


class FailedElsewhereError(Exception):
    """Another host has given up, for the reason that it has sent."""


class Agent(OpenAgent):
    """torch's agent for the ranks of one host, with our way of watching and ending them."""

    def __init__(self, spec: WorkerSpec, pipes: Pipes, grace: float) -> None:
        super().__init__(spec, pipes)
        self.pipes = pipes
        self.grace = grace
        self.meeting = spec.rdzv_handler
        self._signals: Sequence[int] = ()  # that have come while handlers had to wait

    @property
    def attempt(self) -> Attempt:
        """The latest start of the ranks."""
        return self.pipes.attempt

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks, and note their processes."""
        started = super().start_workers(worker_group)
        self.attempt.pids = {self.attempt.ranks[local]: pid for local, pid in started.items()}
        return started

    def restart_workers(self, worker_group: WorkerGroup) -> None:
        """Start the ranks again, and say why."""
        why = why_again(self.attempt.verdict(), worker_group.group_world_size or 1)
        say.note(f"{why}; all ranks start again ({self.restarts_left} more tries after this)")
        super().restart_workers(worker_group)

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look after the ranks; torch calls it ten times a second."""
        with deferred() as self._signals:
            return self._monitor(worker_group)

    def _monitor(self, worker_group: WorkerGroup) -> RunResult:
        self._note_endings()
        attempt = self.attempt
        outlook = self._look()
        if outlook is Outlook.HOPELESS:
            self._end_for_good(attempt.pids)
        elif outlook is Outlook.GOOD and attempt.endings:
            self._tell_of_lone_ranks()
        self._end_lingerers()
        if attempt.running:  # torch's own look would end them all without asking why
            return RunResult(state=WorkerState.HEALTHY)
        if outlook is Outlook.GOOD and attempt.losses.lost:
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(attempt.ranks.values()))
        return super().monitor_workers(worker_group)

    def _look(self) -> Outlook:
        """See what becomes of the ranks that have failed, here and on other hosts."""
        now = time.monotonic()  # what was written by now has been read when it is judged
        attempt, survivors = self.attempt, read_survivors(self.attempt.notes)
        known = set(attempt.losses.lost)
        failed, reason = attempt.failed, ""
        if isinstance(self.meeting, MachineMeeting) and (reason := self.meeting.failure()):
            gone = self.meeting.lost()
            if not gone:
                raise FailedElsewhereError(reason)
            failed = sorted({*failed, *gone})
        outlook = attempt.losses.look(failed, attempt.running, survivors, now)
        for rank in sorted(attempt.losses.lost.keys() - known):
            self._go_on_without(rank)
        if reason and not attempt.failed and outlook is Outlook.HOPELESS:
            raise FailedElsewhereError(reason)
        if behind := attempt.losses.left_behind(attempt.running, survivors):
            self._end_those_left_behind(behind)
        return outlook

    def _go_on_without(self, rank: int) -> None:
        """Report that a rank is lost, and kill what is left of it."""
        attempt = self.attempt
        why = attempt.why(rank) if rank in attempt.endings else ""
        say.complain(tell_lost(rank, attempt.size, why, attempt.losses.lost[rank]))
        self._kill([rank])
        (attempt.notes / "first").unlink(missing_ok=True)  # the next to fail prints its traceback

    def _end_those_left_behind(self, ranks: Collection[int]) -> None:
        it = "it is" if len(ranks) == 1 else "they are"
        say.note(
            f"the others went on without {named(sorted(ranks))} and have ended; {it} ended too"
        )
        self._end_for_good(ranks)

    def _end_for_good(self, ranks: Collection[int]) -> None:
        """Ask all ranks to end, and kill what is left of ``ranks``; a signal may shorten this."""
        self._end_ranks(ways_to_end(False, self.grace))
        if not self._signals:
            self._kill(ranks)

    def exit_barrier(self) -> None:
        """Wait for the other hosts; torch calls it when all ranks of this one have ended."""
        if not isinstance(self.meeting, MachineMeeting):
            super().exit_barrier()
        else:
            limit = timedelta(seconds=self.exit_seconds)
            left = without(read_survivors(self.attempt.notes))
            if reason := self.meeting.finish(limit, left):
                raise FailedElsewhereError(reason)

    def _tell_of_lone_ranks(self) -> None:
        attempt = self.attempt
        if attempt.told_lone or not attempt.running:
            return
        left = without(read_survivors(attempt.notes))
        words = tell_lone(attempt.endings, attempt.running, left, time.monotonic())
        if words:
            attempt.told_lone = True
            say.note(words)

    def _end_lingerers(self) -> None:
        """End ranks whose script has failed and whose process goes on, such as in a lock."""
        attempt, now = self.attempt, time.monotonic()
        for rank in read_reports(attempt.notes):
            since = attempt.failing_since.setdefault(rank, now)
            if now - since > self.grace and rank in attempt.running:
                _signal([attempt.pids[rank]], signal.SIGKILL)

    # -- the end ------------------------------------------------------------------------------

    def shutdown(self, death_sig: signal.Signals | None) -> None:
        """End every rank; torch calls it however the run ends, with the signal if there was one."""
        by_hand = death_sig is signal.SIGINT
        with signals_noted() as noted:  # none may raise in the middle of it (signals.deferred)
            self._signals = noted
            if by_hand and self.attempt.running:
                say.note(f"the ranks have {self.grace:g} s to end; Ctrl-C again ends them at once")
            self._end_ranks(ways_to_end(by_hand, self.grace))
            if noted:
                say.note("ending all ranks at once")
            # What a good run has started in the background may stay.
            failed = set(self.attempt.failed) - self.attempt.losses.lost.keys()
            if noted or failed or death_sig is not None or self.attempt.running:
                self._kill(self.attempt.pids)
            super().shutdown(death_sig)
            self._close_pipes()
        if noted:
            for number in heeded():
                signal.signal(number, signal.SIG_IGN)  # another one has nothing left to do
        if noted and death_sig is None:  # between two attempts: there shall be no other
            raise SignalException("while ranks were ended", signal.Signals(noted[0]))

    def _end_ranks(self, steps: Collection[tuple[signal.Signals, float]]) -> None:
        """Send ranks these signals, with a wait after each; stop if this process gets a signal."""
        for number, seconds in steps:
            self._note_endings()
            running = self.attempt.running
            _signal([self.attempt.pids[rank] for rank in running], number)
            self._wait_for_ends(running, seconds, unless=self._signals)
            if self._signals:
                return

    def _kill(self, ranks: Collection[int]) -> None:
        """Kill every process of these ranks' sessions."""
        sessions = {
            pid
            for rank, pid in self.attempt.pids.items()
            # While anybody is left of a session its number is given to no other process.
            if rank in ranks
            and not (rank in self.attempt.endings and Path(f"/proc/{pid}").exists())
        }
        kill_sessions(sessions)
        self._wait_for_ends(ranks, _KILLED)

    def _close_pipes(self) -> None:
        """Close our ends of what ranks write to: torch does so only for ranks that it ended."""
        for process in self.processes.values():
            for pipe in pipes_of(process):
                pipe.close()

    def _wait_for_ends(
        self, ranks: Collection[int], seconds: float, unless: Sequence[int] = ()
    ) -> None:
        until = time.monotonic() + seconds
        while set(ranks) & set(self.attempt.running) and time.monotonic() < until and not unless:
            time.sleep(_PAUSE)
            self._note_endings(stopped=True)

    def _note_endings(self, stopped: bool = False) -> None:
        for local, process in self.processes.items():
            code = process.proc.poll()
            rank = self.attempt.ranks[local]
            if code is not None and rank not in self.attempt.endings:
                self.attempt.endings[rank] = RankEnding(code, time.monotonic(), stopped)


def ways_to_end(by_hand: bool, grace: float) -> tuple[tuple[signal.Signals, float], ...]:
    """What a rank is sent when it has to end, and the seconds it has after each."""
    if by_hand:
        return (signal.SIGINT, grace), (signal.SIGTERM, min(grace, _INSISTED))
    return ((signal.SIGTERM, grace),)


def _signal(leaders: Collection[int], number: signal.Signals) -> None:
    for pid in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
            os.killpg(pid, signal.SIGCONT)  # a stopped one would not notice
