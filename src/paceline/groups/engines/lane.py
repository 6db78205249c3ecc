"""Lane: runs functions in the order they came, for engines that are written in Python.

A call that nobody runs before it is done by the caller itself; one that was only started is done
by the lane's thread, which the first such call starts.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from ..work import Watcher, Work


class LaneWork(Work):
    """A function that a lane will run, or has run."""

    def __init__(self, task: Callable[[], object], outputs: Sequence[Tensor], watcher: Watcher):
        super().__init__(outputs)
        self._task: Callable[[], object] | None = task
        self._raised: BaseException | None = None
        self._over = threading.Event()
        self._completer = watcher
        self.source = -1

    def perform(self) -> None:
        """Run the function, here."""
        task, self._task = self._task, None
        assert task is not None
        try:
            task()
        except BaseException as error:
            self._raised = error
        self._over.set()

    def _block(self, seconds: float | None) -> bool:
        if not self._over.wait(seconds):
            return False
        if self._raised is not None:
            raise self._raised
        return True

    def _owns(self, error: BaseException) -> bool:
        return super()._owns(error) or error is self._raised

    def _poll(self) -> bool:
        return self._over.is_set()

    def _watcher(self) -> Watcher:
        return self._completer

    def source_rank(self) -> int:
        return self.source


class Lane:
    """Functions in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.watcher = Watcher(f"{name}-futures")
        self._tasks: collections.deque[LaneWork] = collections.deque()
        self._changed = threading.Condition()
        self._busy = False
        self._thread: threading.Thread | None = None
        self._closing = False

    def run(self, task: Callable[[], object]) -> None:
        """Run ``task`` after everything that was started, and raise what it raises."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and not self._tasks)
            self._busy = True
        try:
            task()
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def start(self, task: Callable[[], object], outputs: Sequence[Tensor] = ()) -> LaneWork:
        """Have ``task`` run after everything that was started."""
        work = LaneWork(task, outputs, self.watcher)
        with self._changed:
            if self._closing:
                raise RuntimeError(f"{self._name}: started after the end")
            self._tasks.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return work

    def aside(self, task: Callable[[], object], outputs: Sequence[Tensor] = ()) -> LaneWork:
        """Have ``task``, which is about a message, run on a thread of its own, in no order."""
        work = LaneWork(task, outputs, self.watcher)
        work.is_message = True
        threading.Thread(target=work.perform, name=f"{self._name}-aside", daemon=True).start()
        return work

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (self._tasks and not self._busy) or (self._closing and not self._tasks)
                )
                if not self._tasks:
                    return
                work = self._tasks.popleft()
                self._busy = True
            work.perform()
            del work  # before whoever waits for the lane goes on: its outputs are theirs alone then
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def close(self) -> None:
        """Let the threads end after their current tasks; does not wait for them."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.watcher.close()
