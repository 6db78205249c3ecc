"""Which stretches of a segment's heap are in use: plain bookkeeping, no memory touched."""

from __future__ import annotations

import bisect
import threading

ALIGNMENT = 128  # two cache lines, so that neighbours never share one


class Heap:
    """First fit over ``[start, end)``; freed neighbours grow together again."""

    def __init__(self, start: int, end: int) -> None:
        self._free: list[tuple[int, int]] = [(start, end)]  # sorted, never adjacent
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> int | None:
        """The start of ``size`` free bytes, or None when there is no such stretch."""
        size = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
        with self._lock:
            for i, (start, end) in enumerate(self._free):
                if end - start >= size:
                    if end - start == size:
                        del self._free[i]
                    else:
                        self._free[i] = (start + size, end)
                    self._taken[start] = size
                    return start
        return None

    def give_back(self, start: int) -> int:
        """Free what :meth:`take` returned; returns its size."""
        with self._lock:
            size = self._taken.pop(start)
            i = bisect.bisect(self._free, (start, 0))
            end = start + size
            if i < len(self._free) and self._free[i][0] == end:
                end = self._free.pop(i)[1]
            if i > 0 and self._free[i - 1][1] == start:
                start = self._free.pop(i - 1)[0]
                i -= 1
            self._free.insert(i, (start, end))
            return size

    @property
    def used(self) -> int:
        """Bytes in use."""
        with self._lock:
            return sum(self._taken.values())
