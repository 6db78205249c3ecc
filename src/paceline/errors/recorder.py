"""Errors of the recorder."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class RecorderArgumentError(PacelineError, ValueError):
    """The recorder was given an invalid setting; nothing was changed."""

    argument: str
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"recorder: {self.argument}: expected {self.expected}, got {self.found}. "
            "Nothing was changed."
        )
