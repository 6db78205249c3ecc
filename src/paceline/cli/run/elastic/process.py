"""One member's process: in a session of its own, its output in pipes, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ..sessions import kill_session
from ..verdict import RankEnding

_LOOKS = 3  # that have to find a process stopped, for an agent that was itself stopped meanwhile


class Begun(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its number."""

    def wait(self) -> int:
        """Give back what is left of it, once it has ended."""


class MemberProcess:
    """A process that was started for a member; ``number`` is the member's.

    ``begin`` starts it with two pipes for its output.
    """

    def __init__(self, number: int, seat: int, begin: Callable[[int, int], Begun]) -> None:
        self.number, self.seat = number, seat
        self.asked_to_end = False
        self.fenced = ""  # why it was killed by its agent
        self._stopped_since, self._looks = 0.0, 0
        outs, errs = os.pipe(), os.pipe()
        try:
            self._process = begin(outs[1], errs[1])
            self.pid = self._process.pid
            self.ended = os.pidfd_open(self.pid)  # readable when it has
        except BaseException:
            for end in (outs[0], errs[0]):
                os.close(end)
            raise
        finally:
            for end in (outs[1], errs[1]):
                os.close(end)
        self.pipes = {1: outs[0], 2: errs[0]}  # the caller closes them

    def ending(self) -> RankEnding | None:
        """How it has ended; None while it runs. Of one that failed, nothing is left."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if found is None else self._take(found)

    def wait(self) -> RankEnding | None:
        """How it has ended, once it has; for one that was killed."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return None if found is None else self._take(found)

    def _take(self, found: os.waitid_result) -> RankEnding:
        """Note how it ended; its number cannot be another session's until it is waited for."""
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        if code:
            self.kill()
        self._process.wait()
        return RankEnding(code, time.monotonic(), self.asked_to_end)

    def stopped_for(self, now: float) -> float:
        """Seconds for which every look has found it stopped, as by SIGSTOP."""
        if not is_stopped(self.pid):
            self._looks = 0
            return 0.0
        self._looks += 1
        if self._looks == 1:
            self._stopped_since = now
        return now - self._stopped_since if self._looks >= _LOOKS else 0.0

    def ask_to_end(self) -> None:
        """Have it finish its step and leave."""
        self.asked_to_end = True
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGTERM)
            os.killpg(self.pid, signal.SIGCONT)  # a stopped one would not notice

    def kill(self) -> None:
        """Leave nothing of its session: what it writes later shall reach nobody."""
        kill_session(self.pid)

    def close(self) -> None:
        """Give back what it takes to watch it."""
        os.close(self.ended)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; one that a debugger holds is not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"
