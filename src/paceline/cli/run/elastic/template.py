"""The launcher's side of a process of which members are forked (``template_process.py``).

It is started for the first spare, or else when a member is lost for the first time: that one waits
for the same imports that it would do itself, and all later ones are there at once. Where it cannot
be, or does not answer, members are started as the first ones were.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from ... import say
from ..sessions import kill_sessions
from .process import is_stopped
from .template_process import GO, LONGEST, READY

_WITHIN = 60.0  # seconds that members wait for its imports; then they are started as before
_ANSWER = 10.0  # seconds that a fork may take, while the launcher does nothing else
_TIMES = 3  # that it is started in vain, until that is given up
_PROGRAM = Path(__file__).with_name("template_process.py")


class TemplatePhase(Enum):
    """How far it has come."""

    ABSENT = auto()
    IMPORTING = auto()
    READY = auto()
    GIVEN_UP = auto()


@dataclass(frozen=True)
class ForkedMember:
    """A member that was forked; as :class:`subprocess.Popen`, as far as a launcher needs it."""

    pid: int

    def wait(self) -> int:
        """Give back what is left of it, once it has ended."""
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        return 0


class Template:
    """A process that has what members run (``command``) imported; ``log`` gets what it says."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._command, self._environment, self._log = [*command], dict(environment), log
        self.phase = TemplatePhase.ABSENT
        self._times, self._since = 0, 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._door: socket.socket | None = None

    def prepare(self, now: float) -> bool:
        """Whether a member may be started now, be it in another way; starts what is missing.

        One that was stopped is of no use, and replaced.
        """
        if self.phase is TemplatePhase.READY and self._has_ended():
            self._drop()
        if self.phase is TemplatePhase.IMPORTING and self._is_stopped():
            self._drop()
        if self.phase is TemplatePhase.ABSENT:
            self._begin(now)
        if self.phase is TemplatePhase.IMPORTING:
            self._look()
        if self.phase is TemplatePhase.IMPORTING:
            return now - self._since > _WITHIN
        return self.phase is not TemplatePhase.ABSENT

    def fork(self, own: Mapping[str, str], out: int, errors: int) -> ForkedMember:
        """Start a member with these variables and this output; OSError if that cannot be."""
        assert self._door is not None
        hears, says = os.pipe()
        try:
            message = json.dumps(dict(own)).encode()
            socket.send_fds(self._door, [message], [out, errors, hears])
            pid = int(self._door.recv(LONGEST) or -1)
            if pid <= 0:
                raise OSError("it could not fork")
            os.write(says, GO)  # a member that nobody waits for ends by itself
            self._times = 1  # it was of use, so that another would be
            return ForkedMember(pid)
        except (OSError, ValueError) as error:
            say.note(f"members are not forked: the process to fork them from failed ({error})")
            self._drop()
            raise OSError(str(error)) from error
        finally:
            os.close(hears)
            os.close(says)

    def end(self) -> None:
        """Leave nothing of it."""
        self._drop()
        self.phase = TemplatePhase.GIVEN_UP

    def _begin(self, now: float) -> None:
        self._times += 1
        if self._times > _TIMES:
            self.phase = TemplatePhase.GIVEN_UP
            return
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(_PROGRAM), str(there.fileno()), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        here.setblocking(False)
        self._door, self._since, self.phase = here, now, TemplatePhase.IMPORTING

    def _look(self) -> None:
        """Hear whether the imports are done."""
        assert self._door is not None
        try:
            said = self._door.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said == READY:
            self._door.settimeout(_ANSWER)
            self.phase = TemplatePhase.READY
            return
        self._drop()
        if said:  # it would say so again
            say.note(f"members are not forked: {said.decode(errors='replace')}")
            self.phase = TemplatePhase.GIVEN_UP

    def _has_ended(self) -> bool:
        process = self._process
        return process is None or process.poll() is not None or self._is_stopped()

    def _is_stopped(self) -> bool:
        return self._process is not None and is_stopped(self._process.pid)

    def _drop(self) -> None:
        if self._door is not None:
            self._door.close()
        if self._process is not None:
            kill_sessions({self._process.pid})
            self._process.wait()
        self._door = self._process = None
        self.phase = TemplatePhase.ABSENT
