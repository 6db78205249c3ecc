"""Errors of :func:`paceline.elastic.job`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .base import PacelineError, some_of


@dataclass(eq=False)
class JobArgumentError(PacelineError, ValueError):
    """An elastic job was given an invalid argument."""

    problem: str

    def __str__(self) -> str:
        return (
            f"elastic job: {self.problem}. This rank does not start; the others continue without "
            "it."
        )


@dataclass(eq=False)
class JobStateError(PacelineError, RuntimeError):
    """The objects or the loop of this rank do not match the state of the job."""

    problem: str

    def __str__(self) -> str:
        return (
            f"elastic job: {self.problem}. This rank cannot continue; the others do without it. "
            "Run the same program with the same arguments on every rank and after every restart."
        )


@dataclass(eq=False)
class StartMismatchError(PacelineError, RuntimeError):
    """The ranks of a job have different models, data or arguments."""

    rank: int
    what: str
    said: Mapping[int, str]  # by rank

    def __str__(self) -> str:
        found = [f"rank {rank} has {value}" for rank, value in self.said.items()]
        return (
            f"rank {self.rank}: {self.what} differs between ranks when the job begins: "
            f"{some_of(found, '; ')}. Nothing was trained, and every rank raises this. Run the "
            "same program with the same arguments and the same data on every rank."
        )


@dataclass(eq=False)
class StateCopyError(PacelineError, RuntimeError):
    """A state arrived on a rank with wrong bits; all ranks raise it."""

    rank: int
    tensors: Sequence[str]  # that are wrong on this rank

    def __str__(self) -> str:
        what = f"wrong here: {some_of(self.tensors)}" if self.tensors else "wrong on another rank"
        return (
            f"rank {self.rank}: a state that was copied between ranks arrived with wrong bits "
            f"({what}). No rank uses it, and it is sent again. If this happens more than once, "
            "check the memory of the hosts."
        )


@dataclass(eq=False)
class ReplicasDifferError(PacelineError, RuntimeError):
    """The states of the ranks differ, and there is no majority."""

    rank: int
    steps: int
    found: Sequence[int]  # a digest for each rank

    def __str__(self) -> str:
        shown = ", ".join(
            f"rank {rank} has {number:016x}" for rank, number in enumerate(self.found)
        )
        return (
            f"rank {self.rank}: after {self.steps} steps the ranks have different states ({shown}) "
            "without a majority: a bit was flipped in memory, or a rank changed its weights alone. "
            "Every rank raises this. Start the job again: it resumes from its last save."
        )


@dataclass(eq=False)
class DamagedSaveError(PacelineError, RuntimeError):
    """A job has saves, but all of them are damaged."""

    folder: str
    wrong: Mapping[str, str]  # by name

    def __str__(self) -> str:
        found = [f"{name}: {what}" for name, what in self.wrong.items()]
        return (
            f"all saves in {self.folder} are damaged ({some_of(found, '; ')}). The job did not "
            "start, so that none is overwritten. Restore one from a backup, or remove them to "
            "start from the first step."
        )
