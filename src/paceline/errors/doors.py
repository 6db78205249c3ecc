"""Errors of the way into a job: its key file, and strangers at its ports."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError
from .cli import LaunchError


@dataclass(eq=False)
class KeyFileError(LaunchError):
    """The key file of a job on several hosts cannot be used as it is."""

    path: str = ""


@dataclass(eq=False)
class StrangerError(PacelineError, ConnectionError):
    """Who answered does not belong to this job, or does not take this process for a part of it."""

    where: str
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.where} is no part of this job: {self.reason}. Nothing was sent to it, and the "
            "hosts that wait for this one go on waiting. Give every host a copy of the same key "
            "file (paceline run --key), and see that its clock is right."
        )
