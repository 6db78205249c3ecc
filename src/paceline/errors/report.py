"""Errors of reading a recorded run."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class RunMissingError(PacelineError, FileNotFoundError):
    """There is no recorded run at this path."""

    path: str
    problem: str  # "there is no such folder"
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}. {self.remedy}."


@dataclass(eq=False)
class DamagedLogError(PacelineError, ValueError):
    """A rank's log cannot be read."""

    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path} is damaged: {self.problem}. Remove the file to report on the other "
            "ranks, or record the run again."
        )


@dataclass(eq=False)
class LogVersionError(PacelineError, ValueError):
    """The log of a rank has a format that this version cannot read."""

    path: str
    found: int
    known: int

    def __str__(self) -> str:
        age = "newer" if self.found > self.known else "older"
        return (
            f"{self.path} has version {self.found} of the log format, but this paceline reads "
            f"version {self.known}. Use the {age} paceline that recorded it, or "
            "record the run again."
        )
