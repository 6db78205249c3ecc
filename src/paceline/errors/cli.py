"""Errors of the command line."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class LaunchError(PacelineError, RuntimeError):
    """Ranks could not be started as requested; none is left running."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}. {self.remedy}"


@dataclass(eq=False)
class LaunchCountError(LaunchError):
    """Another number of ranks or hosts was, or would be, started than was requested."""

    asked: int = 0
    started: int = 0


@dataclass(eq=False)
class PortTakenError(LaunchError):
    """The port of the store is in use by another process."""

    port: int = 0
