"""Errors of a store outside the job (etcd) that hosts agree through."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError
from .cli import LaunchError


@dataclass(eq=False)
class StoreUrlError(LaunchError):
    """What --store was given cannot be used."""


@dataclass(eq=False)
class StoreLostError(PacelineError, ConnectionError):
    """The store did not answer in time; what was asked may have happened or not."""

    where: str
    why: str

    def __str__(self) -> str:
        return (
            f"the store at {self.where} does not answer: {self.why}. While it does not, nobody can "
            "take the place of a lost keeper; members train on with the keeper they have. See "
            "that a majority of its servers runs and can be reached from this host."
        )


@dataclass(eq=False)
class StoreAnswerError(PacelineError, ConnectionError):
    """Who answered is no etcd, or one that refuses the question."""

    what: str

    def __str__(self) -> str:
        return (
            f"the store answered with {self.what}. Nothing of it is used, and the next server is "
            "asked. Give --store the client addresses of an etcd, 3.4 or later."
        )


@dataclass(eq=False)
class StoreUnreachableError(LaunchError):
    """This host did not reach the store in its time, so its members were ended."""

    where: str = ""
    seconds: float = 0.0


@dataclass(eq=False)
class HostLeftBehindError(LaunchError):
    """The job has ended, or was begun again, while this host could not be reached."""


@dataclass(eq=False)
class TermOverError(PacelineError, RuntimeError):
    """A keeper may not decide any more: its lease has run out, or another keeper was chosen."""

    term: int
    why: str

    def __str__(self) -> str:
        return (
            f"the keeper of term {self.term} decides nothing any more: {self.why}. What it had not "
            "told anybody has not happened. Members go on with the next keeper."
        )
