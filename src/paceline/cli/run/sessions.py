"""The processes of a session: a rank, and all that it has started and that did not leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path


def members_of(sessions: Collection[int]) -> Iterator[int]:
    """The processes of these sessions: ranks, and all they have started that did not leave."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) in sessions:
                    yield int(entry.name)


def kill_session(leader: int) -> None:
    """Kill every process of a session."""
    for pid in members_of({leader}):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
