"""One member's process: in a session of its own, its output in pipes, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ..sessions import kill_sessions
from ..verdict import RankEnding

_FLAGS, _EXIT_CODE = 9 - 3, 52 - 3  # places in /proc/PID/stat, behind the name; see proc(5)
_LONGEST = 1024  # bytes of that file
_EXITING = 0x4  # the kernel's PF_EXITING
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
        self.told = False  # that it is lost, be it before it has ended
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

    def dying_of(self) -> int:
        """The signal that it is being ended by; 0 if there is none.

        A process has ended when its memory is free, which takes a second for each few gigabytes.
        That it will never run again is known long before.
        """
        leader = _read_stat(f"/proc/{self.pid}/stat")
        if leader is None or not leader.exits or not leader.signal:
            return 0
        try:
            threads = os.listdir(f"/proc/{self.pid}/task")
        except OSError:
            return 0
        stats = (_read_stat(f"/proc/{self.pid}/task/{thread}/stat") for thread in threads)
        return leader.signal if all(one is None or one.exits for one in stats) else 0

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
        kill_sessions({self.pid})

    def close(self) -> None:
        """Give back what it takes to watch it."""
        os.close(self.ended)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; one that a debugger holds is not."""
    found = _read_stat(f"/proc/{pid}/stat")
    return found is not None and found.state == b"T"


@dataclass(frozen=True)
class _TaskStat:
    """What the kernel tells of a thread."""

    state: bytes
    exits: bool  # it is in the kernel on its way out, and never comes back
    signal: int  # that it is ended by, once it exits; 0 also where that may not be known


def _read_stat(path: str) -> _TaskStat | None:
    """What is to be known of a thread; None if it is no more."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(file, _LONGEST)
        finally:
            os.close(file)
    except OSError:
        return None
    words = text.rpartition(b")")[2].split()
    exits = bool(int(words[_FLAGS]) & _EXITING)
    return _TaskStat(words[0], exits, int(words[_EXIT_CODE]) & 0x7F if exits else 0)
