"""How long the demo trains, and with which learning rate: by steps, by time, or whichever is first.

Pure but for :class:`TrainingClock`, which makes all ranks read one clock: each must take the same
number of steps, with the same rates.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from ...groups import Group

WARM_UP = 30  # steps in which the rate grows; or a tenth of all, if that is less
EVERY = 10  # steps between two looks at rank 0's clock


@dataclass(frozen=True)
class Pace:
    """Ends after so many steps or seconds; infinity is no limit, and one of them is finite."""

    steps: float
    seconds: float

    def progress(self, step: int, elapsed: float) -> float:
        """The progress from 0 to 1 before the given step (counted from 0)."""
        return min(1.0, max(step / self.steps, elapsed / self.seconds))

    def rate(self, step: int, progress: float) -> float:
        """The learning rate as a share of the highest: up in a few steps, then down to nothing."""
        warm_up = min(WARM_UP, max(1.0, self.steps / 10))
        return min(1.0, (step + 1) / warm_up) * (1.0 - progress)


class TrainingClock:
    """Seconds of training as rank 0 counts them, on every rank."""

    def __init__(self, group: Group, pace: Pace) -> None:
        self.group, self.pace = group, pace
        self._began = time.perf_counter()
        self._agreed = torch.zeros((), dtype=torch.float64)

    def seconds(self) -> float:
        """Seconds of training, as this rank counts them."""
        return time.perf_counter() - self._began

    def progress(self, step: int) -> float:
        """How far training is, from 0 to 1, on every rank alike; all call it before each step."""
        if math.isfinite(self.pace.seconds) and step % EVERY == 0:
            self._agreed.fill_(self.seconds())
            self.group.broadcast(self._agreed)
        return self.pace.progress(step, float(self._agreed))
