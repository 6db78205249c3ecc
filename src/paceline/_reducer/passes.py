"""Pass: what is known of one backward pass while it runs, and the part this rank has in it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor


class Role(Enum):
    """What this rank has to give in a pass."""

    ACTIVE = auto()  # the gradients of a backward pass, or of those it gathered
    OWING = auto()  # what it gathered before it ran out
    STANDING_IN = auto()  # nothing


@dataclass(eq=False, slots=True)
class Pass:
    """One backward pass whose gradients are averaged."""

    role: Role = Role.ACTIVE
    answers: bool = False  # gradients that a forward of the wrapper led to (expected.py)
    next: int = 0  # the bucket whose turn it is
    arrival: list[int] = field(default_factory=list)  # while learning: parameters, as they came
    touched: set[int] = field(default_factory=set)  # parameters that a gradient has come to
    seen: Counter[int] = field(default_factory=Counter)  # how often, for those that act on it
    ending: Callable[[], object] = object  # None once a backward pass has ended without us
    failure: Exception | None = None  # what this rank raises at the end
    trouble: str = ""  # the same, as the other ranks hear it
    again: set[int] = field(default_factory=set)  # strict: what torch would not have
    idle: set[int] = field(default_factory=set)  # have a gradient that this pass did not touch
    absent: set[int] = field(default_factory=set)  # have none
    late: dict[int, Tensor] = field(default_factory=dict)  # came after their bucket had left
    overdue: bool = False  # a rank was in trouble in the pass before, and nobody knew
    header: Tensor | None = None  # what the ranks said, on the device
    divisor: float = 1.0  # beyond the number of ranks
    began: int = field(default_factory=time.perf_counter_ns)
    first_launch: int = 0
    ended: int = 0  # the backward pass itself
    finished: int = 0

    @property
    def missed(self) -> set[int]:
        """Parameters that the graph did not reach."""
        return self.absent | self.idle

    def fail(self, error: Exception, told: str = "") -> None:
        """Raise ``error`` here at the end of the pass, and let the other ranks know."""
        self.failure = self.failure or error
        self.trouble = self.trouble or told or str(error)
