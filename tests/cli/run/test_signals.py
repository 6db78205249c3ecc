"""Signals that come at the worst moment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from paceline.cli.run.signals import deferred, handling


class Stopped(Exception):
    """What a handler raises."""


def stop(_number: int, _frame: object) -> None:
    raise Stopped


@pytest.fixture(autouse=True)
def _handled() -> Iterator[None]:
    with handling(stop):
        yield


class Polled:
    """Polls as Popen does: under a lock, and a signal comes when it has just been taken."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def poll(self) -> None:
        if self.lock.acquire(False):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass  # the interpreter calls handlers between two steps of this
            self.lock.release()


def test_a_handler_that_raises_would_leave_a_lock_locked() -> None:
    process = Polled()
    with pytest.raises(Stopped):
        process.poll()
    assert process.lock.locked()


def test_a_signal_is_deferred_to_the_end_and_not_lost() -> None:
    process, reached = Polled(), []
    with pytest.raises(Stopped), deferred():
        process.poll()
        reached.append(True)
    assert reached
    assert not process.lock.locked()


def test_handlers_are_back_afterwards() -> None:
    with deferred():
        assert signal.getsignal(signal.SIGINT) is not stop
    assert signal.getsignal(signal.SIGINT) is stop
