"""torch's data loader: how its workers are ended, and where it is heard that one has died.

torch notes the processes of workers, and its handler of SIGCHLD raises when one of them dies,
wherever the main thread is: in the middle of a backward pass, or of the loader's own work. Without
that note torch looks every five seconds while a batch is waited for; here it is more often.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import connection
from typing import Any
from weakref import ref

# torch's notes of worker processes, by the identity of an iterator.
from torch._C import _remove_worker_pids

TICK = 0.25  # seconds between two looks at the workers
DYING = 5.0  # seconds that the end of a worker may take once its connection is broken


def hear_while_waiting(batches: Any) -> None:
    """Have a worker that dies end the wait for a batch, and nothing else."""
    with suppress(ValueError):  # there is no note of them
        _remove_worker_pids(id(batches))
    if hasattr(batches, "_worker_pids_set"):  # else torch would take the note away once more
        batches._worker_pids_set = False
    if hasattr(batches, "_try_get_data"):
        batches._try_get_data = Looking(batches)


class Looking:
    """Waits for a batch as torch does, and looks often whether the workers live."""

    def __init__(self, batches: Any) -> None:
        self._batches = ref(batches)  # which owns this
        self._wait = type(batches)._try_get_data

    def __call__(self, timeout: float = TICK) -> tuple[bool, Any]:
        batches: Any = self._batches()
        until = time.monotonic() + timeout
        while True:
            refuse_dead(batches)
            left = until - time.monotonic()
            found, data = self._get(batches, max(0.0, min(left, TICK)))
            if found or left <= TICK:
                return found, data

    def _get(self, batches: Any, timeout: float) -> tuple[bool, Any]:
        try:
            return self._wait(batches, timeout)  # type: ignore[no-any-return]
        except (OSError, EOFError):  # a dying worker closes its files before it is gone
            connection.wait([worker.sentinel for worker in batches._workers], DYING)
            refuse_dead(batches)
            raise


def refuse_dead(batches: Any) -> None:
    """Raise if a worker of an iteration has died, with how."""
    for worker in getattr(batches, "_workers", ()):
        code = worker.exitcode
        if code is not None:
            how = f"ended with exit code {code}"
            if code < 0:
                how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
            raise RuntimeError(f"DataLoader worker (pid {worker.pid}) {how}")


def stop_workers(batches: Iterator[Any]) -> None:
    """End the workers behind an iteration of a ``DataLoader`` now.

    To forget the iterator ends them too, but the traceback of what went wrong may still hold it.
    Nothing public does it.
    """
    stop = getattr(batches, "_shutdown_workers", None)
    if stop is not None:
        stop()
