"""torch's data loader: how its workers are ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def stop_workers(batches: Iterator[Any]) -> None:
    """End the workers behind an iteration of a ``DataLoader`` now.

    To forget the iterator ends them too, but the traceback of what went wrong may still hold it.
    Nothing public does it.
    """
    stop = getattr(batches, "_shutdown_workers", None)
    if stop is not None:
        stop()
