"""The processes of a session: a rank, and all that it has started and that did not leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_PASSES = 100  # for who may not be killed may start others for ever


def members_of(sessions: Collection[int]) -> Iterator[int]:
    """The processes of these sessions: ranks, and all they have started that did not leave."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) in sessions:
                    yield int(entry.name)


def kill_sessions(leaders: Collection[int]) -> None:
    """Kill every process of these sessions, also one that another of them starts meanwhile."""
    killed: set[int] = set()
    for _ in range(_PASSES):
        found = set(members_of(leaders)) - killed
        if not found:  # and what was killed starts nothing any more
            return
        killed |= found
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
