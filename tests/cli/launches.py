"""Launches for tests: in this process, where torch is imported already, or in one of its own."""

import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn
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


class Launched:
    """The command line in a forked process: quick, since torch is imported there already."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        out, err = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _be_the_command(arguments, env, out[1], err[1])
        for pipe in (out[1], err[1]):
            os.close(pipe)
        self.stdout, self.stderr = os.fdopen(out[0]), os.fdopen(err[0])
        self._end = os.pidfd_open(self.pid)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def wait(self, timeout: float) -> int:
        assert select.select([self._end], [], [], timeout)[0], "the launcher has not ended"
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What is left of its output, once it has ended; an error if it takes longer."""
        watchdog = threading.Timer(timeout, self.kill)
        watchdog.start()
        with ThreadPoolExecutor(2) as pool:
            out, err = pool.map(lambda stream: stream.read(), (self.stdout, self.stderr))
        self.wait(timeout)
        assert watchdog.is_alive(), "the launcher has not ended"
        watchdog.cancel()
        self._close()
        return out, err

    def kill(self) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Leave nothing of it."""
        if self._end >= 0:
            self.kill()
            self.wait(60)
            self._close()

    def _close(self) -> None:
        self.stdout.close(), self.stderr.close(), os.close(self._end)
        self._end = -1


def _be_the_command(
    arguments: Sequence[str], env: Mapping[str, str], out: int, err: int
) -> NoReturn:
    code = 70
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        os.dup2(out, 1), os.dup2(err, 2)
        os.closerange(3, 256)  # pipes of other tests' launchers, which would stay open with us
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ.clear()
        os.environ.update(env)
        code = cli.main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def fork(*arguments: object, **env: str) -> Launched:
    """:func:`start`, quicker; not for tests beside stores or threads, which do not survive it."""
    clean = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return Launched(list(map(str, arguments)), clean | env)


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
