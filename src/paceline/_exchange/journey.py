"""A bucket on its way: what it waits for, and the future of those who wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future


@dataclass(eq=False)
class Journey:
    """A bucket on its way."""

    steps: Iterator[Sequence[TorchWork]]
    works: Sequence[TorchWork]
    gate: Future[None]
    future: Future[Tensor]
    error: BaseException | None = None

    @classmethod
    def begin(cls, steps: Iterator[Sequence[TorchWork]], buffer: Tensor) -> Journey:
        """Go until there is something to wait for."""
        devices: list[Any] = [] if buffer.device.type == "cpu" else [buffer.device]
        gate: Future[None] = Future(devices=devices)
        works = next(steps)
        journey = cls(steps, works, gate, gate)  # type: ignore[arg-type]

        # An error must be raised in a callback: set on the future itself, it would crash C++.
        def result(_gate: Future[None]) -> Tensor:
            if journey.error is not None:
                raise journey.error
            return buffer

        journey.future = gate.then(result)
        return journey

    def advance(self) -> bool:
        """Wait, and go on to the next wait; False at the end."""
        for work in self.works:
            work.wait()
        works = next(self.steps, None)
        self.works = works or ()
        return works is not None

    def end(self, error: BaseException | None) -> None:
        """Let those who wait for it know."""
        self.error = error
        self.gate.set_result(None)
