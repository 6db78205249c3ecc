"""The keeper's process: started, and started again at the same path whenever it has ended.

A second one waits beside it with everything imported, so that the place is taken in milliseconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ...._members import RESIGNED, Over
from ....errors import LaunchError
from ..sessions import kill_sessions
from ..verdict import RankEnding, describe
from .process import is_stopped

_IN_A_ROW = 5  # keepers that ended within a second of their start: it is no accident
_SOON = 1.0  # seconds
_END = 2.0  # seconds that a keeper has to end when it is told to
_TAIL = 2000  # characters of what it wrote


class Keeping(Protocol):
    """What keeps the roster, here or on another host."""

    @property
    def serves_others(self) -> bool:
        """Whether members of other hosts need it as well."""

    @property
    def pause(self) -> float:
        """Seconds between two attempts to reach it."""

    @property
    def over(self) -> Over | None:
        """How the job has ended, where that is known without a word of the keeper."""

    def look(self, now: float) -> str:
        """See that it is there; returns what has become of the one before, if it is another."""

    def unheard(self, seconds: float) -> LaunchError:
        """Say why nothing was heard of it for so long."""

    def end(self) -> None:
        """Leave nothing of it."""


class KeeperProcess:
    """Keeps one process of ``command`` running; ``folder`` gets what it writes."""

    serves_others = False
    pause = 0.005
    over = None

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = [*command]
        self._log = folder / "keeper.log"
        self._short = 0  # lives in a row that were
        self._began = time.monotonic()
        self._process = self._start()
        self._spare = self._start()
        self._release(self._process)

    @property
    def pid(self) -> int:
        """Of the process that keeps now."""
        return self._process.pid

    def look(self, now: float) -> str:
        """Put another in its place if it has ended, or is stopped; returns how it ended, if so."""
        if is_stopped(self._process.pid):  # nothing that it does takes long enough to be stopped
            kill_sessions({self._process.pid})
        code = self._process.poll()
        if code is None:
            return ""
        self._short = self._short + 1 if now - self._began < _SOON else 0
        how = describe(RankEnding(code, now), None)
        if self._short >= _IN_A_ROW:
            raise LaunchError(
                f"the process that keeps the roster keeps failing: {how}\n{self._said()}",
                "The job cannot continue without it.",
            )
        self._process, self._began = self._spare, now
        self._release(self._process)
        self._spare = self._start()
        return f"the process that keeps the roster is replaced: {how}"

    @property
    def resigned(self) -> bool:
        """Whether it ended since another host's keeper was chosen."""
        return self._process.poll() == RESIGNED

    def unheard(self, seconds: float) -> LaunchError:
        """Say why nothing was heard of it for so long."""
        return keeper_unheard(seconds)

    def end(self) -> None:
        """Leave nothing of it."""
        for process in (self._process, self._spare):
            process.terminate()
        for process in (self._process, self._spare):
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END)
            kill_sessions({process.pid})
            process.wait()
            _close_input(process)

    def _start(self) -> subprocess.Popen[bytes]:
        """A keeper that waits for its input to end before it takes the place."""
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"PYTHONFAULTHANDLER": "1"},
            )

    def _release(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.write(b"\n")
        _close_input(process)

    def _said(self) -> str:
        with suppress(OSError):
            return self._log.read_text(errors="replace")[-_TAIL:]
        return ""


def _close_input(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()


def keeper_unheard(seconds: float) -> LaunchError:
    """That no keeper answers."""
    return LaunchError(
        f"the process that keeps the roster has not answered for {seconds:g} s; the members of "
        "this host are ended, since the others may have continued without them",
        "If it is on another host, look at the network between them.",
    )


def keeper_command(path: str, ranks: int, least: int, heartbeat: float) -> list[str]:
    """What starts a keeper for the members of a job."""
    words = ["--first", ranks, "--least", least, "--heartbeat", heartbeat]
    return [sys.executable, "-m", "paceline._members", path, "--standby", *map(str, words)]
