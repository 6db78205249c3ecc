"""Launches for tests: in this process, where torch is imported already, or in one of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest

from paceline import cli

# Left over from another launch, these would make a plan of their own.
FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def paceline(capsys: pytest.CaptureFixture[str], *arguments: object, **env: str) -> Ended:
    """Run the command line in this process; its ranks are processes all the same."""
    clean = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    with mock.patch.dict(os.environ, clean | env, clear=True), signals_kept():
        code = cli.main([str(word) for word in arguments])
    captured = capsys.readouterr()
    return Ended(code, captured.out, captured.err)


@contextmanager
def signals_kept() -> Iterator[None]:
    """torch's agent takes over the signals of its process."""
    kept = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    kept[signal.SIGQUIT] = signal.getsignal(signal.SIGQUIT)
    try:
        yield
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


def start(*arguments: object, **env: str) -> subprocess.Popen[str]:
    """Start the command line as a process; its output comes through pipes."""
    clean = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean | env,
        start_new_session=True,
    )
