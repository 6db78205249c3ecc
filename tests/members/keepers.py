"""Keepers as processes of their own, and members of them in this one."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline._members import HowFar
from paceline._members.client import SocketMember

WITHIN = 120.0  # seconds for what may include the start of a keeper's process


class KeeperAt:
    """A keeper's process at a path of its own; killed and started again by whoever asks."""

    def __init__(self, *options: str):
        self.folder = tempfile.TemporaryDirectory(prefix="pk-")
        self.path = str(Path(self.folder.name) / "job" / "keeper.socket")
        self._options = options
        self._members: list[SocketMember] = []
        self._standby: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it; a member or an agent waits until it listens."""
        self.process = self._standby or self._prepared()
        self._standby = None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def prepare(self) -> None:
        """Have the next one ready."""
        self._standby = self._prepared()

    def _prepared(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "paceline._members", self.path, "--standby"]
        return subprocess.Popen([*command, *self._options], stdin=subprocess.PIPE)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def replace(self) -> None:
        self.kill()
        self.start()

    def join(self, within: float = WITHIN) -> SocketMember:
        member = SocketMember(self.path, keeper_within=within)
        self._members.append(member)
        return member

    def begin(self, n: int) -> list[SocketMember]:
        """Members that use a roster."""
        members = [self.join() for _ in range(n)]
        roster = meet(members)
        assert ready(members, roster.number) == [True] * n
        return members

    def __enter__(self) -> "KeeperAt":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for member in self._members:
            member.close()
        for process in filter(None, (self.process, self._standby)):
            process.kill()
            process.wait(60)
            if process.stdin and not process.stdin.closed:
                process.stdin.close()
        self.folder.cleanup()


def on_threads(*calls: Callable[[], Any], within: float = 2 * WITHIN) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(within) for one in [pool.submit(call) for call in calls]]


def meet(
    members: list[SocketMember], steps: int = -1, why: str = "", within: float = WITHIN
) -> Any:
    """Let all meet; the roster that they all got."""
    calls = [lambda m=m: m.meet(HowFar(steps, why=why), within) for m in members]
    rosters = on_threads(*calls)
    assert all(roster == rosters[0] for roster in rosters)
    return rosters[0]


def ready(members: list[SocketMember], number: int) -> list[bool]:
    return on_threads(*(lambda m=m: m.ready(number) for m in members))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
