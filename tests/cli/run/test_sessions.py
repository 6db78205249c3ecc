"""Killing a session leaves nothing of it, whatever its processes do meanwhile."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from paceline.cli.run.sessions import kill_sessions

FORKS_WHEN_TOLD = """
import os, signal
input()
if child := os.fork():
    print(child, flush=True)
signal.pause()
"""


def test_a_process_that_is_started_meanwhile_is_killed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    kill = os.kill
    with subprocess.Popen(
        [sys.executable, "-c", FORKS_WHEN_TOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None

        def start_another_first(pid: int, number: int) -> None:
            if not started:
                print(file=leader.stdin, flush=True)
                started.append(int(leader.stdout.readline()))
            kill(pid, number)

        monkeypatch.setattr(os, "kill", start_another_first)
        try:
            kill_sessions({leader.pid})
            assert leader.wait(60) == -signal.SIGKILL
            ended, _, _ = select.select([leader.stdout], [], [], 60)  # once nobody can write
            assert ended
        finally:
            for pid in (leader.pid, *started):
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
