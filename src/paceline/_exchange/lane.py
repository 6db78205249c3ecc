"""JobLane: what a hook does for one bucket, then for the next.

Ranks must make their calls to a group in the same order. A hook with several collectives for each
bucket would break that rule if it made the later ones in callbacks of futures, because a callback
runs whenever the one before it happens to be done: on one rank before the next bucket sets off, on
another after. (Stock DDP over gloo may hang for this reason.) So all that is to be done for a
bucket is one job, and jobs run one after the other on a thread of their own, in the order of the
buckets, while the backward pass goes on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

Job = Callable[[], Tensor]


class JobLane:
    """Runs jobs in the order they came. The first one starts its thread, which ends with it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Task | None] | None = None
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, Any] = {}

    def start(self, job: Job, device: torch.device) -> Future[Tensor]:
        """Have ``job`` run after those before it; a future of what it returns or raises.

        On a device, it is queued there at once, beside what runs.
        """
        if device.type != "cpu":
            return self._queue_on(device, job)
        task = _Task(job)
        if threading.current_thread() is self._thread:  # a job that has a job
            task.perform()
        else:
            self._open().put(task)
        return task.future

    def _open(self) -> queue.SimpleQueue[_Task | None]:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs,), name="paceline-hook", daemon=True
            )
            self._thread.start()
        return self._jobs

    def _queue_on(self, device: torch.device, job: Job) -> Future[Tensor]:
        module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        side = self._streams[device]
        side.wait_stream(module.current_stream(device))
        with module.stream(side), torch.no_grad():
            future: Future[Tensor] = Future(devices=[device])
            future.set_result(job())
        return future

    def __del__(self) -> None:
        if self._jobs is not None:
            self._jobs.put(None)


class _Task:
    """One job, and the future of its result.

    The future is a callback of another one: what is raised in a callback arrives as an error, while
    an exception that Python sets on a future crashes C++ that waits for it.
    """

    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._gate: Future[None] = Future()
        self._result: Tensor | BaseException | None = None
        self.future: Future[Tensor] = self._gate.then(lambda _: self._take())

    def perform(self) -> None:
        job, self._job = self._job, None
        assert job is not None
        try:
            with torch.no_grad():
                self._result = job()
        except BaseException as error:
            self._result = error
        del job  # it may hold the last reference to the lane
        self._gate.set_result(None)

    def _take(self) -> Tensor:
        result, self._result = self._result, None
        if isinstance(result, BaseException):
            raise result
        assert result is not None
        return result


def _serve(jobs: queue.SimpleQueue[_Task | None]) -> None:
    while (task := jobs.get()) is not None:
        task.perform()
        del task
