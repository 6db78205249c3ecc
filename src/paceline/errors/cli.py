"""Errors of the command line: a launch that cannot be as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class LaunchError(PacelineError, RuntimeError):
    """Ranks could not be started as asked; none is left running."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}. {self.remedy}"


@dataclass(eq=False)
class LaunchCountError(LaunchError):
    """The number of ranks or machines asked for is not the one that was, or would be, started."""

    asked: int = 0
    started: int = 0


@dataclass(eq=False)
class PortTakenError(LaunchError):
    """The port where ranks are to meet belongs to another process."""

    port: int = 0
