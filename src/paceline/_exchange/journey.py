"""A buffer that is being averaged, and a future of the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future


class Journey:
    """A buffer on its way along a route. Made, it has gone until there is something to wait for."""

    def __init__(self, steps: Iterator[Sequence[TorchWork]]) -> None:
        self._steps = steps
        self._failed: BaseException | None = None
        self._works: Sequence[TorchWork] = next(steps, ())

    def advance(self) -> bool:
        """Wait, and go on to the next wait; False at the end."""
        if self._failed is not None:
            raise self._failed
        for work in self._works:
            work.wait()
        try:
            works = next(self._steps, None)
        except BaseException as error:
            self._failed = error  # or the next wait would find the end
            raise
        self._works = works or ()
        return works is not None

    def wait(self) -> None:
        """Go to the end."""
        while self.advance():
            pass


class FutureJourney(Journey):
    """A bucket's journey, and a future of its buffer."""

    def __init__(self, steps: Iterator[Sequence[TorchWork]], buffer: Tensor) -> None:
        super().__init__(steps)
        devices: list[Any] = [] if buffer.device.type == "cpu" else [buffer.device]
        self._gate: Future[Any] = Future(devices=devices)
        self._result = buffer if devices else None
        self._error: BaseException | None = None

        # An error must be raised in a callback: set on the future itself, it would crash C++.
        def result(_gate: Future[Any]) -> Tensor:
            if self._error is not None:
                raise self._error
            return buffer

        self.future: Future[Tensor] = self._gate.then(result)

    def end(self, error: BaseException | None) -> None:
        """Complete the future."""
        self._error = error
        # From the buffer torch learns which streams to wait for.
        self._gate.set_result(self._result if error is None else None)
