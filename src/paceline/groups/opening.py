"""Opening: an engine that is opened on another thread, so that nobody has to wait for it.

Some engines cannot be told to stop waiting for a rank that died while they were opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from .engine import Engine


class OpeningGivenUp(Exception):
    """Whoever waited for an engine does not want it any more."""


class Opening:
    """Calls ``opener`` on a thread of its own, where ``device`` is the current one.

    It begins when its result is asked for; it can be given up before that too.
    """

    def __init__(self, opener: Callable[[], Engine], device: torch.device) -> None:
        self._opener, self._device = opener, device
        self._settled = threading.Condition()
        self.given_up = False  # perhaps too late: when the engine was there
        self._engine: Engine | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._open, name="paceline-opening", daemon=True)

    def _open(self) -> None:
        engine, error = None, None
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            engine = self._opener()
        except BaseException as failed:
            error = failed
        with self._settled:
            late = self._error is not None
            if not late:
                self._engine, self._error = engine, error
            self._settled.notify_all()
        if late and engine is not None:
            engine.abort()
            engine.shutdown()

    def give_up(self) -> None:
        """Let whoever waits go; an engine that comes later is ended at once. From any thread."""
        with self._settled:
            self.given_up = True
            if self._engine is None and self._error is None:
                self._error = OpeningGivenUp()
                self._settled.notify_all()

    def result(self) -> Engine:
        """The engine, once it is open; raises what went wrong, or :class:`OpeningGivenUp`.

        To be called once.
        """
        with self._settled:
            if self._error is None:
                self._thread.start()
            self._settled.wait_for(lambda: self._engine is not None or self._error is not None)
            if self._engine is not None:
                return self._engine
            assert self._error is not None
            raise self._error
