"""Signals that end a launcher, except those it was started to ignore (nohup ignores SIGHUP)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
Handler = Callable[[int, FrameType | None], object]


def heeded() -> tuple[signal.Signals, ...]:
    """Those that this process was not started to ignore, as nohup and a shell's ``&`` have it."""
    return tuple(s for s in ENDING if signal.getsignal(s) is not signal.SIG_IGN)


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Give all signals that are heeded to ``handler`` meanwhile."""
    before = {number: signal.getsignal(number) for number in heeded()}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Collect the signals that this process is sent instead of ending; the oldest is first."""
    noted: list[int] = []
    with handling(lambda number, frame: noted.append(number)):
        yield noted


@contextmanager
def deferred() -> Iterator[list[int]]:
    """Leave signals to their handlers only at the end; until then they are noted.

    A handler that raises may do so anywhere, also where somebody else's code has just taken a lock:
    after that ``Popen.poll`` would never again see a process end, and ``Popen.wait`` never return.
    """
    before = {number: signal.getsignal(number) for number in heeded()}
    with signals_noted() as noted:
        yield noted
    for number in noted:
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, None)
        else:
            os.kill(os.getpid(), number)
