"""Which stretches of a segment's heap are in use: plain bookkeeping.

Tensors are dropped anywhere: by the garbage collector, which may run in the middle of ``take`` on
the same thread, or in a thread that was stopped by a fork. So giving back never waits: it leaves a
note, and whoever holds the lock, or takes it next, does the rest.
"""

from __future__ import annotations

import bisect
import collections
import threading
from collections.abc import Callable

ALIGNMENT = 128  # two cache lines, so that neighbours never share one


class Heap:
    """First fit over ``[start, end)``; freed neighbours grow together again.

    ``discard(start, size)`` is told of every stretch before it can be taken again.
    """

    def __init__(
        self, start: int, end: int, discard: Callable[[int, int], object] | None = None
    ) -> None:
        self._free: list[tuple[int, int]] = [(start, end)]  # sorted, never adjacent
        self._taken: dict[int, int] = {}
        self._returned: collections.deque[int] = collections.deque()  # and not yet free
        self._discard = discard
        self._lock = threading.Lock()

    def take(self, size: int) -> int | None:
        """The start of ``size`` free bytes, or None when there is no such stretch."""
        size = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
        with self._lock:
            self._collect()
            start = self._first_fit(size)
        self._tidy()
        return start

    def give_back(self, start: int) -> None:
        """Free what :meth:`take` returned. Never waits, so a finalizer may call it."""
        self._returned.append(start)
        self._tidy()

    @property
    def used(self) -> int:
        """Bytes in use."""
        with self._lock:
            self._collect()
            used = sum(self._taken.values())
        self._tidy()
        return used

    def _tidy(self) -> None:
        """Free what was returned, unless somebody holds the lock, who then does it."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _first_fit(self, size: int) -> int | None:
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[i]
                else:
                    self._free[i] = (start + size, end)
                self._taken[start] = size
                return start
        return None

    def _collect(self) -> None:
        while self._returned:
            start = self._returned.popleft()
            size = self._taken.pop(start)
            if self._discard is not None:
                self._discard(start, size)
            self._insert(start, start + size)

    def _insert(self, start: int, end: int) -> None:
        i = bisect.bisect(self._free, (start, 0))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (start, end))
