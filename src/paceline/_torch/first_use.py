"""Changes to torch that are made when this process opens its first group, and not before."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waiting:
    """Functions that are called once, before a group is handed to whoever makes it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._functions: list[Callable[[], None]] = []
        self._calls = False  # whether this thread, which has the lock, calls them now
        self._came = False  # whether there has been a group

    def before_next_group(self, function: Callable[[], None]) -> None:
        """Call ``function`` when a group is made next, once."""
        self._functions.append(function)

    def group_is_made(self) -> None:
        """Call what waits; another thread that makes a group meanwhile waits until that is done."""
        self._came = True
        if not self._functions:
            return
        with self._lock:
            if self._calls:  # one of them makes a group itself
                return
            self._calls = True
            try:
                while self._functions:
                    self._functions[0]()
                    del self._functions[0]
            finally:
                self._calls = False

    def catch_up(self) -> None:
        """Call what waits now, if there has been a group: it may live on, and be the last."""
        if self._came:
            self.group_is_made()


_waiting = Waiting()

before_next_group = _waiting.before_next_group
"""Call a function when a group is made next, once."""

group_is_made = _waiting.group_is_made
"""Call what waits for a group: there is one."""

catch_up = _waiting.catch_up
"""Call what waits for a group now, if there has been one."""
