"""Errors of connecting to a job: its key file, and processes that do not belong to it."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError
from .cli import LaunchError


@dataclass(eq=False)
class KeyFileError(LaunchError):
    """The key file of a job on several hosts cannot be used."""

    path: str = ""


@dataclass(eq=False)
class StrangerError(PacelineError, ConnectionError):
    """The other side of a connection does not belong to this job, or rejects this process."""

    where: str
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.where} does not belong to this job: {self.reason}. Nothing was sent to it, and "
            "hosts that wait for this one still wait. Copy the same key file to every host "
            "(paceline run --key), and check that its clock is right."
        )
