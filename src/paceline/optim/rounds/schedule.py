"""RoundSchedule: which fragment is exchanged when. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import AveragingArgumentError, AveragingTypeError


@dataclass(frozen=True)
class RoundSchedule:
    """Each fragment is exchanged every ``sync_every`` steps, at an offset of its own.

    The exchange of fragment ``k`` of ``K`` begins after step ``(k + 1) * sync_every // K`` of each
    round, so the last one ends the round, and its outcome is used ``overlap`` steps later. Steps
    count from 1; at most one exchange begins after a step.
    """

    sync_every: int
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        self._check("sync_every", 1, None)
        self._check("fragments", 1, self.sync_every)
        self._check("overlap", 0, self.sync_every - 1)

    def starting(self, step: int) -> int | None:
        """The fragment whose exchange begins after ``step``."""
        within = (step - 1) % self.sync_every + 1
        for fragment in range(self.fragments):
            if (fragment + 1) * self.sync_every // self.fragments == within:
                return fragment if step > 0 else None
        return None

    def ending(self, step: int) -> int | None:
        """The fragment that takes the outcome of its exchange after ``step``."""
        return self.starting(step - self.overlap)

    def _check(self, name: str, least: int, most: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise AveragingTypeError(f"{name}: expected a whole number, got {value!r}.")
        if value < least or (most is not None and value > most):
            limit = f"at least {least}" if most is None else f"{least} to {most}"
            why = "" if name == "sync_every" else f" with sync_every={self.sync_every}"
            raise AveragingArgumentError(f"{name}: expected {limit}{why}, got {value}.")
