"""Threads that ask: none is waited for but at the end of the process, and then not for long."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

_asking: set[threading.Thread] = set()


def in_thread(action: Any, *args: Any) -> Future[Any]:
    """A daemon thread's result; a pool's threads would be waited for at exit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(action(*args))
        except BaseException as error:
            future.set_exception(error)
        finally:
            _asking.discard(threading.current_thread())

    thread = threading.Thread(target=run, name="paceline-recorder-asks", daemon=True)
    _asking.add(thread)
    thread.start()
    return future


def finish_asking(seconds: float) -> None:
    """Wait for threads that ask, for at most so long.

    Python ends a thread that comes back to it after the end, and inside a call of torch's that ends
    the process with an error.
    """
    until = time.monotonic() + seconds
    for thread in list(_asking):
        thread.join(max(0.0, until - time.monotonic()))


def forget_threads() -> None:
    """In a forked child, where none of them runs."""
    _asking.clear()
