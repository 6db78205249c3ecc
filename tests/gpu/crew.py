"""Ranks that stay from test to test: a process that uses CUDA takes seconds to start.

The test process sends each rank the name of a test; the rank runs it and answers. A rank that does
not come back in time writes its stack and ends itself, and one that fails ends all: the others may
wait for it. The next test then starts new ranks, so that no test can spoil another.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RanksFailedError
from paceline.testing import Meeting, spawn_ranks

from .machine import Machine
from .scene import Scene

LIFE = 3600.0  # seconds that ranks may live, all tests together
START = 180.0  # seconds until all ranks have opened their groups
LOST = 15.0  # seconds for the other ranks, once one has failed
SPARE = 5.0  # seconds: a rank is to end itself before anybody else gives it up


@dataclass(frozen=True)
class Task:
    """A test to run in the ranks, by name, and how many seconds it has."""

    module: str
    name: str
    params: Mapping[str, Any]
    deadline: float


@dataclass(frozen=True)
class Outcome:
    """How a test ended on one rank: ``passed``, ``skipped``, ``failed`` or ``lost``."""

    how: str
    text: str = ""


class CrewFailed(Exception):
    """Ranks could not be started."""


# -- in a rank ------------------------------------------------------------------------------------


def serve(meeting: Meeting, address: str, folder: str, machine: Machine) -> None:
    """Run what comes from ``address`` until there is nothing more, or something failed."""
    with Client(address) as connection, Path(folder, f"hung-{meeting.rank}").open("w") as stacks:
        connection.send((meeting.rank, os.getpid()))
        with Scene.opened(meeting, machine) as scene:
            connection.send("ready")
            while (task := _next(connection)) is not None:
                importlib.import_module(task.module)  # which may take a while
                faulthandler.dump_traceback_later(task.deadline, exit=True, file=stacks)
                outcome = perform(task, scene)
                faulthandler.cancel_dump_traceback_later()
                connection.send(outcome)
                if outcome.how == "failed":
                    os._exit(1)  # which ends the others too; groups that hang cannot be closed


def _next(connection: Connection) -> Task | None:
    try:
        return connection.recv()
    except EOFError:  # whoever asks has gone
        return None


def perform(task: Task, scene: Scene) -> Outcome:
    """Run one test, and see that nothing of it is left for the next."""
    try:
        getattr(importlib.import_module(task.module), task.name).scenario(scene, **task.params)
        scene.clean_up()
    except pytest.skip.Exception as skipped:
        return Outcome("skipped", str(skipped))
    except BaseException:
        return Outcome("failed", traceback.format_exc())
    return Outcome("passed")


# -- in the process of the tests ------------------------------------------------------------------


@dataclass(eq=False)
class Ranks:
    """Processes that wait for tests, until one of them fails."""

    connections: dict[int, Connection]
    processes: list[int]
    thread: threading.Thread
    failure: list[RanksFailedError]
    folder: Path

    def ask(self, task: Task) -> list[Outcome]:
        """Let all run ``task``, and collect what became of it on each."""
        outcomes: dict[int, Outcome] = {}
        for rank, connection in self.connections.items():
            try:
                connection.send(task)
            except OSError:
                outcomes[rank] = Outcome("lost")
        until = time.monotonic() + task.deadline + SPARE
        while waiting := {c: r for r, c in self.connections.items() if r not in outcomes}:
            ready = wait(list(waiting), max(until - time.monotonic(), 0.0))
            for connection in ready or waiting:
                outcomes[waiting[connection]] = _hear(connection) if ready else Outcome("lost")
            if any(outcome.how in ("failed", "lost") for outcome in outcomes.values()):
                until = min(until, time.monotonic() + LOST)
        return self._explain([outcomes[rank] for rank in sorted(outcomes)], task)

    def _explain(self, outcomes: Sequence[Outcome], task: Task) -> list[Outcome]:
        if all(outcome.how != "lost" for outcome in outcomes):
            return list(outcomes)
        self.end()
        told = dict(self.failure[0].failures) if self.failure else {}
        return [
            Outcome("lost", self._last_words(rank, task, told)) if o.how == "lost" else o
            for rank, o in enumerate(outcomes)
        ]

    def _last_words(self, rank: int, task: Task, told: Mapping[int, str]) -> str:
        path = self.folder / f"hung-{rank}"
        stack = path.read_text() if path.exists() else ""
        if stack:
            return f"still ran after {task.deadline:g} s. Its stack:\n{stack}"
        return told.get(rank, "ended without a word")

    def end(self) -> None:
        """Let those that wait go home, and kill those that do not."""
        for connection in self.connections.values():
            connection.close()
        self.thread.join(LOST)
        if self.thread.is_alive():
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.thread.join(SPARE)


def _hear(connection: Connection) -> Outcome:
    try:
        return connection.recv()
    except (EOFError, OSError):
        return Outcome("lost")


@dataclass(eq=False)
class Crew:
    """A number of ranks on a machine, started when a test needs them and again after a failure."""

    machine: Machine
    size: int
    starts: int = 0
    _ranks: Ranks | None = None
    _broken: str = ""
    _folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="paceline-gpu-")
    )

    def run(self, task: Task) -> list[Outcome]:
        """What became of ``task``, by rank."""
        if self._broken:
            raise CrewFailed(self._broken)
        if self._ranks is None:
            self._ranks = self._start()
        outcomes = self._ranks.ask(task)
        if any(outcome.how in ("failed", "lost") for outcome in outcomes):
            self._ranks.end()
            self._ranks = None
        return outcomes

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = None
        self._folder.cleanup()

    def _start(self) -> Ranks:
        self.starts += 1
        folder = Path(self._folder.name, str(self.starts))
        folder.mkdir()
        failure: list[RanksFailedError] = []
        with Listener(str(folder / "socket"), "AF_UNIX", backlog=self.size) as listener:
            thread = threading.Thread(target=self._spawn, args=(folder, failure), daemon=True)
            thread.start()
            ranks = Ranks({}, [], thread, failure, folder)
            try:
                self._welcome(listener, ranks)
            except Exception as error:
                ranks.end()
                words = str(failure[0]) if failure else f"{type(error).__name__}: {error}"
                self._broken = f"{self.size} ranks could not be started: {words}"
                raise CrewFailed(self._broken) from error
        return ranks

    def _spawn(self, folder: Path, failure: list[RanksFailedError]) -> None:
        environment = self.machine.environment(self.size)
        address = str(folder / "socket")
        try:
            spawn_ranks(
                self.size,
                serve,
                address,
                str(folder),
                self.machine,
                deadline=LIFE,
                env=environment,
            )
        except RanksFailedError as error:
            failure.append(error)

    def _welcome(self, listener: Listener, ranks: Ranks) -> None:
        listener._listener._socket.settimeout(START)  # type: ignore[attr-defined]
        for _ in range(self.size):
            connection = listener.accept()
            rank, process = connection.recv()
            ranks.connections[rank] = connection
            ranks.processes.append(process)
        until = time.monotonic() + START
        for connection in ranks.connections.values():
            if not connection.poll(max(until - time.monotonic(), 0.0)):
                raise TimeoutError(f"not ready after {START:g} s")
            connection.recv()
