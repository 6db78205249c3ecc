"""Elastic launches whose keeper lets everybody in at once (``stand_in_keeper.py``)."""

import os
import sys
import threading
from pathlib import Path

import pytest

from paceline.cli.run.elastic import launch
from tests.cli.launches import Ended, paceline
from tests.cli.run.elastic.member import MEMBER

DEADLINE = 600.0  # seconds
STAND_IN = Path(__file__).with_name("stand_in_keeper.py")


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Run a script, MEMBER and what is given, as an elastic job."""

    def command(path: str, *options: object) -> list[str]:
        return [sys.executable, str(STAND_IN), path]

    monkeypatch.setattr(launch, "keeper_command", command)
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def begin(body: str, *options: object, **env: str) -> Ended:
        script = tmp_path / "member.py"
        script.write_text(body if body.startswith("#!") else MEMBER + body)
        late = threading.Timer(DEADLINE, lambda: [os.kill(os.getpid(), 15) for _ in range(2)])
        late.start()
        try:
            return paceline(capsys, "run", "--elastic", *_options(options), script, **env)
        finally:
            late.cancel()

    return begin


def _options(given: tuple[object, ...]) -> list[object]:
    """Members here have no torch to wait for, and are not forked but where a test is about that."""
    return [
        *(word for word in given if word != "--warm"),
        *(() if "--warm" in given else ["--cold"]),
    ]
