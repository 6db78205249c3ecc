"""A thread that calls listeners, so that a slow listener delays nobody else."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable

from .roster import RosterChange

Heard = Callable[[RosterChange], None]


class Listening:
    """Calls listeners one after the other, on a thread that begins with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Heard] = []
        self._calls: queue.SimpleQueue[tuple[Heard, RosterChange] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, heard: Heard, missed: list[RosterChange]) -> None:
        """Call it with what it has missed, and from now on."""
        with self._lock:
            self._listeners.append(heard)
            for change in missed:
                self._calls.put((heard, change))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="paceline-listening", daemon=True
                )
                self._thread.start()

    def tell(self, change: RosterChange) -> None:
        """Let all listeners hear of a change."""
        with self._lock:
            for heard in self._listeners:
                self._calls.put((heard, change))

    def end(self) -> None:
        """Let the thread end after what has been told."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            heard, change = call
            try:
                heard(change)
            except Exception:
                traceback.print_exc()  # the next change must still be heard
