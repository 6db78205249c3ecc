"""Errors of unsupported versions of torch."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class UnsupportedTorchError(PacelineError, ImportError):
    """torch is too old, or so new that paceline cannot be imported."""

    found: str
    oldest: str
    newest: str
    cause: str = ""  # what went wrong, where it is a newer one

    def __post_init__(self) -> None:
        self.name, self.path, self.msg = "torch", None, str(self)

    def __str__(self) -> str:
        tested = f"paceline works with torch {self.oldest} and newer, tested up to {self.newest}"
        if self.cause:
            return (
                f"{tested}, and cannot be imported with torch {self.found}: {self.cause}. "
                f"Install a newer paceline, or torch {self.newest}."
            )
        return f"{tested}; this is torch {self.found}. Install one of these: pip install -U torch."
