"""torch's data loader: how its workers are ended, and where it is heard that one has died.

torch notes the processes of workers, and its handler of SIGCHLD raises when one of them dies,
wherever the main thread is: in the middle of a backward pass, say. Without that note nobody hears
of it until a batch is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

# torch's notes of worker processes, by the identity of an iterator.
from torch._C import _error_if_any_worker_fails, _remove_worker_pids, _set_worker_pids


def hear_nothing(batches: Any) -> None:
    """Have nobody told of the workers of an iteration that die, except in :func:`hearing`."""
    with suppress(ValueError):  # there is no note of them
        _remove_worker_pids(id(batches))
    if hasattr(batches, "_worker_pids_set"):  # else torch would take the note away once more
        batches._worker_pids_set = False


@contextmanager
def hearing(batches: Any) -> Iterator[None]:
    """Raise inside, as torch does, if a worker has died or dies."""
    hear_nothing(batches)
    try:
        _set_worker_pids(id(batches), tuple(w.pid for w in getattr(batches, "_workers", ())))
        _error_if_any_worker_fails()
        yield
    finally:
        hear_nothing(batches)


def stop_workers(batches: Iterator[Any]) -> None:
    """End the workers behind an iteration of a ``DataLoader`` now.

    To forget the iterator ends them too, but the traceback of what went wrong may still hold it.
    Nothing public does it.
    """
    stop = getattr(batches, "_shutdown_workers", None)
    if stop is not None:
        stop()
