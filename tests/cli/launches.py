"""Launches for tests: in this process, where torch is imported already, or in one of its own."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest

from paceline import cli

DEADLINE = 600.0  # seconds for one launch in this process
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
    with mock.patch.dict(os.environ, clean | env, clear=True), signals_kept(), _in_time():
        code = cli.main([str(word) for word in arguments])
    captured = capsys.readouterr()
    return Ended(code, captured.out, captured.err)


@contextmanager
def _in_time() -> Iterator[None]:
    """Kill ranks that go on after ``DEADLINE``, so that the launcher tells of them and ends."""
    over = threading.Event()

    def watch() -> None:
        over.wait(DEADLINE)
        while not over.wait(0.1):
            for listing in Path("/proc/self/task").glob("*/children"):
                with suppress(OSError):
                    for child in map(int, listing.read_text().split()):
                        if b"script.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                            os.kill(child, signal.SIGKILL)

    watchdog = threading.Thread(target=watch, name="watchdog")
    watchdog.start()
    try:
        yield
    finally:
        over.set()
        watchdog.join()


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


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Launched:
    """The command line in a process that has torch imported already, so that it starts quickly.

    A server without threads forks it (``multiprocessing.forkserver``, the one of ``spawn_ranks``):
    what is forked beside threads finds their locks held, for good.
    """

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["paceline.testing", "paceline.groups"])
        out, err = context.Pipe(duplex=False), context.Pipe(duplex=False)
        theirs = (out[1], err[1])
        ignored = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        self._process = context.Process(
            target=_be_the_command, args=(arguments, env, ignored, *theirs)
        )
        self._process.start()
        for end in theirs:
            end.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.returncode: int | None = None
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno())) for end in (out[0], err[0]))
        self._ended = False

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self.poll()
        assert code is not None, "the launcher has not ended"
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
        self._process.kill()

    def end(self) -> None:
        """Leave nothing of it."""
        if not self._ended:
            self.kill()
            self.wait(60)
            self._close()

    def _close(self) -> None:
        self.stdout.close(), self.stderr.close(), self._process.close()
        self._ended = True


def _be_the_command(
    arguments: Sequence[str],
    env: Mapping[str, str],
    ignored: Sequence[int],
    out: Connection,
    err: Connection,
) -> NoReturn:
    code = 70
    try:
        os.setsid()
        for number in _SIGNALS:  # as a process that the test starts itself inherits it
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        if signal.SIGINT not in ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        os.closerange(3, 256)  # what the server holds
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
    """:func:`start`, quicker: torch is imported there already."""
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
