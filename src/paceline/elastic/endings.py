"""SIGTERM: the step is finished, and then this rank leaves."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class LeaveNow(Exception):
    """The signal came while this rank waited to be let in: there is no step to finish."""


class EndOnSignal:
    """Calls ``dismiss`` when the process gets SIGTERM, from :meth:`listen` to :meth:`close`.

    Python delivers signals to the main thread, so elsewhere nothing is listened to.
    """

    def __init__(self, dismiss: Callable[[str], None]) -> None:
        self._dismiss = dismiss
        self._before: Any = None
        self._listens = self._raises = False

    def listen(self) -> None:
        """Begin."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._heard)
            self._listens = True

    def close(self) -> None:
        """Let SIGTERM do what it did before."""
        if self._listens:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._listens = False

    def _heard(self, *_: object) -> None:
        self._dismiss("it got SIGTERM")
        if self._raises:
            raise LeaveNow

    @contextlib.contextmanager
    def at_once(self, wanted: bool) -> Iterator[None]:
        """Inside, if ``wanted``, the signal raises :class:`LeaveNow`."""
        self._raises = wanted and self._listens
        try:
            yield
        finally:
            self._raises = False
