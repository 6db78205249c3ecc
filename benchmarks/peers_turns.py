"""Lets libraries take turns: one runs its ranks, all others stand still.

Every library has processes of its own, all of them alive at once, and is asked over a socket to
prepare a model or to take some steps. In between they are stopped (SIGSTOP), children and all, so
that a thread which looks for work every millisecond, as some libraries have one, slows its own
library's steps and no other's.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

DEADLINE = 300.0  # seconds for the answer to one request

PATIENCE = 20.0  # seconds for a library to end by itself
BECOME_REAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl

Command = tuple[list[str], dict[str, str]]  # what to run, in which environment


class Failed(Exception):
    """A library did not do what it was asked for; the text says why."""


class Party:
    """The ranks of one library, as processes that do what they are asked."""

    def __init__(self, commands: Sequence[Command], folder: Path, ranks: int) -> None:
        self.folder = folder
        self.ranks: list[TextIO] = []
        self.started: list[subprocess.Popen[bytes]] = []
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(folder / "door"))
            door.listen(ranks)
            try:
                self._start(commands)
                self._admit(door, ranks)
            except BaseException:
                self.kill()
                raise
        send(self._family(), signal.SIGSTOP)

    def ask(self, **request: Any) -> list[Any]:
        """Give what each rank answered; everything of theirs is stopped before and after."""
        send(self._family(), signal.SIGCONT)
        try:
            for rank in self.ranks:
                rank.write(json.dumps(request) + "\n")
                rank.flush()
            return [self._answer(rank) for rank in self.ranks]
        except OSError as lost:
            raise Failed(self._last_words()) from lost
        finally:
            send(self._family(), signal.SIGSTOP)

    def dismiss(self) -> None:
        """Let the ranks end by themselves, so that their libraries can clean up."""
        send(self._family(), signal.SIGCONT)
        for rank in self.ranks:
            rank.close()
        until = time.monotonic() + PATIENCE
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every process of theirs."""
        send(list(self._family()), signal.SIGKILL)
        for process in self.started:
            process.wait()

    def _start(self, commands: Sequence[Command]) -> None:
        for number, (command, env) in enumerate(commands):
            with (self.folder / f"log-{number}").open("w") as log:
                self.started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))

    def _admit(self, door: socket.socket, ranks: int) -> None:
        """Wait until every rank has come, or one has ended."""
        door.settimeout(0.2)
        until = time.monotonic() + DEADLINE
        while len(self.ranks) < ranks:
            if time.monotonic() > until or any(process.poll() for process in self.started):
                raise Failed(self._last_words())
            with contextlib.suppress(TimeoutError):
                rank, _ = door.accept()
                rank.settimeout(DEADLINE)
                self.ranks.append(rank.makefile("rw"))

    def _answer(self, rank: TextIO) -> Any:
        line = rank.readline()
        if not line:
            raise ConnectionError
        told = json.loads(line)
        if "error" in told:
            raise Failed(told["error"])
        return told["answer"]

    def _family(self) -> Iterator[int]:
        return family(process.pid for process in self.started if process.returncode is None)

    def _last_words(self) -> str:
        """The last error that a rank has printed, or else its last line."""
        said = [log.read_text(errors="replace") for log in sorted(self.folder.glob("log-*"))]
        lines = [line.strip() for text in said for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it ended or went silent"])[-1][:120]


def family(pids: Iterable[int]) -> Iterator[int]:
    """Give these processes, their children, and so on."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        yield pid


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def no_one_left() -> Iterator[None]:
    """End all that was started inside, also what its own parents have left behind."""
    ctypes.CDLL(None).prctl(BECOME_REAPER, 1, 0, 0, 0)  # orphans become children of this process
    try:
        yield
    finally:
        send([pid for pid in family([os.getpid()]) if pid != os.getpid()], signal.SIGKILL)
