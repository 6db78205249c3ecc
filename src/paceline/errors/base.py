"""What all errors are, and how they speak."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Protocol


class PacelineError(Exception):
    """Base of all our errors. Subclasses are dataclasses: fields hold facts, __str__ tells them."""

    def __reduce__(self) -> tuple[object, ...]:
        return copyreg.__newobj__, (type(self),), vars(self)  # type: ignore[attr-defined]


class AwaitedExplanation(Protocol):
    """What will be known of an error's cause soon; ``recorder/explain.py`` has the real one."""

    @property
    def printed(self) -> bool:
        """Whether it has been printed on its own, so that no text needs to repeat it."""

    def wait(self, seconds: float) -> None:
        """Wait until it is in the error's fields, for at most so long."""

    def wait_for_text(self) -> None:
        """Wait a moment, since somebody wants the error as text now; else it is printed later."""


class ExplainedError(PacelineError):
    """An error that is raised before its cause is known in full.

    The recorder asks the other ranks meanwhile and fills in the fields that it knows best.
    """

    _explanation: AwaitedExplanation | None = None

    def explained_by(self, explanation: AwaitedExplanation) -> None:
        """Tell the error who fills in its fields."""
        self._explanation = explanation

    def wait_for_verdict(self, seconds: float = 5.0) -> str:
        """What the recorder makes of it; waits until that is known, at most ``seconds``."""
        if self._explanation is not None:
            self._explanation.wait(seconds)
        return str(getattr(self, "verdict", ""))

    def _is_told_here(self) -> bool:
        """Whether a text of this error has to say what the recorder found out."""
        if self._explanation is None:
            return True
        self._explanation.wait_for_text()
        return not self._explanation.printed

    def __reduce__(self) -> tuple[object, ...]:
        if self._explanation is not None:
            self._explanation.wait_for_text()
        facts = {name: value for name, value in vars(self).items() if name != "_explanation"}
        return copyreg.__newobj__, (type(self),), facts  # type: ignore[attr-defined]


def ranks_named(ranks: Sequence[int]) -> str:
    """One rank or several, in words."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def some_of(names: Sequence[str], separator: str = ", ") -> str:
    """The first names, and how many there are if there are more."""
    more = f"{separator}… ({len(names)} in all)" if len(names) > 5 else ""
    return separator.join(list(names)[:5]) + more
