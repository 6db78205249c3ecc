"""Threads that ask other ranks; only the end of the process waits for them, and not for long."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any, ParamSpec, TypeVar

_SAFE = sys.version_info >= (3, 12)  # garbage is collected between two lines of Python only
_looking = threading.Lock()
_asking: set[threading.Thread] = set()
_ours: set[int] = set()  # numbers of the recorder's threads that run

P = ParamSpec("P")
R = TypeVar("R")


def one_of_ours(run: Callable[P, R]) -> Callable[P, R]:
    """Mark a thread's function as the recorder's: such a thread is never where a rank is.

    It may have got the number of a thread that has ended, whose call was a rank's latest.
    """

    @functools.wraps(run)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        number = threading.get_ident()
        _ours.add(number)
        try:
            return run(*args, **kwargs)
        finally:
            _ours.discard(number)

    return marked


def in_thread(action: Any, *args: Any) -> Future[Any]:
    """A daemon thread's result; a pool's threads would be waited for at exit."""
    future: Future[Any] = Future()

    @one_of_ours
    def run() -> None:
        try:
            future.set_result(action(*args))
        except BaseException as error:
            future.set_exception(error)
        finally:
            _asking.discard(threading.current_thread())

    thread = threading.Thread(target=run, name="paceline-recorder-asks", daemon=True)
    _asking.add(thread)
    try:
        thread.start()
    except BaseException:  # there is no room for one more
        _asking.discard(thread)
        raise
    return future


def frames() -> dict[int, FrameType]:
    """Where each thread is, by its number, but for the recorder's own.

    Up to Python 3.11 garbage may be collected in the middle of it, while a lock of the interpreter
    is held. A finalizer that then lets other threads run (as the end of a group does) never comes
    back: one of them starts or ends a thread, and waits for that lock. So nothing is collected.
    """
    with _looking:
        collects = not _SAFE and gc.isenabled()
        if collects:
            gc.disable()
        try:
            return _without_ours(sys._current_frames())  # no variable: it would hold itself
        finally:
            if collects:
                gc.enable()


def _without_ours(found: dict[int, FrameType]) -> dict[int, FrameType]:
    return {number: found[number] for number in found.keys() - _ours}


def finish_asking(seconds: float) -> None:
    """Wait for threads that ask, for at most so long.

    Python ends a thread that comes back to it after the end, and inside a call of torch's that ends
    the process with an error.
    """
    until = time.monotonic() + seconds
    for thread in list(_asking):
        with contextlib.suppress(RuntimeError):  # it has not been started yet
            thread.join(max(0.0, until - time.monotonic()))


def forget_threads() -> None:
    """In a forked child, where none of them runs."""
    global _looking
    _asking.clear()
    _ours.clear()
    _looking = threading.Lock()  # the parent's may be somebody's who is not there
