"""What all errors are, and how they speak."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence


class PacelineError(Exception):
    """Base of all our errors. Subclasses are dataclasses: fields hold facts, __str__ tells them."""

    def __reduce__(self) -> tuple[object, ...]:
        return copyreg.__newobj__, (type(self),), vars(self)  # type: ignore[attr-defined]


def ranks_named(ranks: Sequence[int]) -> str:
    """One rank or several, in words."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def some_of(names: Sequence[str], separator: str = ", ") -> str:
    """The first names, and how many there are if there are more."""
    more = f"{separator}… ({len(names)} in all)" if len(names) > 5 else ""
    return separator.join(list(names)[:5]) + more
