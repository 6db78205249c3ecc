"""Fragment: a part of the model, and where it is between two exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from ..._exchange import FlatBuffer, Standing


class FragmentPhase(Enum):
    """Where a fragment is between two exchanges."""

    LOCAL = auto()  # each rank changes its own
    IN_FLIGHT = auto()  # the same, while the last exchange is under way


@dataclass(eq=False, slots=True)
class Fragment:
    """A part of the model that is exchanged at one time, in one or more buffers."""

    pieces: tuple[FlatBuffer, ...]
    phase: FragmentPhase = FragmentPhase.LOCAL
    weight: float = 0.0  # of this rank's steps since the last exchange began
    since: int = 0  # the step it began after

    def start(self, step: int, *, active: bool = True, failed: bool = False) -> None:
        """Begin an exchange after ``step``."""
        steps = step - self.since
        share = self.weight / steps if steps else 0.0  # 1 where every step counted 1
        for piece in self.pieces:
            piece.start(Standing(share, float(active), float(failed)))
        self.phase, self.weight, self.since = FragmentPhase.IN_FLIGHT, 0.0, step

    def wait(self) -> Standing:
        """Block until the outcome is there; how all ranks stood in the exchange."""
        standings = [piece.wait() for piece in self.pieces]
        return standings[0]

    def means(self) -> list[Tensor] | None:
        """Copies of the outcome, for a checkpoint; None where there is none."""
        return [p.values.clone() for p in self.pieces] if self.wait().weight else None
