"""The base classes of all errors."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Protocol


class PacelineError(Exception):
    """Base class of all errors. Subclasses are dataclasses whose fields hold the facts."""

    def __reduce__(self) -> tuple[object, ...]:
        return copyreg.__newobj__, (type(self),), vars(self)  # type: ignore[attr-defined]


class AwaitedExplanation(Protocol):
    """The cause of an error, which is being looked up; ``recorder/explain.py`` implements it."""

    @property
    def printed(self) -> bool:
        """Whether it was printed separately, so that the error need not repeat it."""

    def wait(self, seconds: float) -> None:
        """Wait until it is in the error's fields, at most ``seconds``."""

    def wait_for_text(self) -> None:
        """Wait briefly, because the error's text is needed now; else it is printed later."""


class ExplainedError(PacelineError):
    """An error that is raised before its cause is fully known.

    Meanwhile the recorder asks the other ranks and fills in the missing fields.
    """

    _explanation: AwaitedExplanation | None = None

    def explained_by(self, explanation: AwaitedExplanation) -> None:
        """Set the explanation that fills in the fields."""
        self._explanation = explanation

    def wait_for_verdict(self, seconds: float = 5.0) -> str:
        """Return what the recorder found out; waits for it, at most ``seconds``."""
        if self._explanation is not None:
            self._explanation.wait(seconds)
        return str(getattr(self, "verdict", ""))

    def _is_told_here(self) -> bool:
        """Whether the error's text has to include what the recorder found out."""
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
    """Return "rank 1" or "ranks 1, 2"."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def some_of(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first five names, and the total number if there are more."""
    more = f"{separator}… ({len(names)} in all)" if len(names) > 5 else ""
    return separator.join(list(names)[:5]) + more
