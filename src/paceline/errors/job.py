"""Errors of :func:`paceline.elastic.job`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .base import PacelineError, some_of


@dataclass(eq=False)
class JobArgumentError(PacelineError, ValueError):
    """An elastic job was given something that it cannot work with."""

    problem: str

    def __str__(self) -> str:
        return (
            f"elastic job: {self.problem}. This rank does not begin; the others go on without it."
        )


@dataclass(eq=False)
class JobStateError(PacelineError, RuntimeError):
    """This rank's objects, or its loop, do not go together with the job's state."""

    problem: str

    def __str__(self) -> str:
        return (
            f"elastic job: {self.problem}. This rank cannot go on; the others do without it. Run "
            "the same program, with the same arguments, on every rank and after every restart."
        )


@dataclass(eq=False)
class StartMismatchError(PacelineError, RuntimeError):
    """The ranks of a job were made differently, and would not train one model on the same data."""

    rank: int
    what: str
    said: Mapping[int, str]  # by rank

    def __str__(self) -> str:
        found = [f"rank {rank} has {value}" for rank, value in self.said.items()]
        return (
            f"rank {self.rank}: {self.what} differs between ranks when the job begins: "
            f"{some_of(found, '; ')}. Nothing was trained, and every rank raises this. Run the "
            "same program, with the same arguments and the same data, on every rank."
        )


@dataclass(eq=False)
class StateCopyError(PacelineError, RuntimeError):
    """A state arrived on a rank with other bits than it was sent with; all ranks raise it."""

    rank: int
    tensors: Sequence[str]  # that are wrong on this rank

    def __str__(self) -> str:
        what = f"wrong here: {some_of(self.tensors)}" if self.tensors else "wrong on another rank"
        return (
            f"rank {self.rank}: a state that was copied between ranks is not what was sent "
            f"({what}). Nobody uses it, and it is sent again. If that happens more than once, look "
            "for faulty memory."
        )


@dataclass(eq=False)
class ReplicasDifferError(PacelineError, RuntimeError):
    """The ranks' states differ, and no majority has the same one."""

    rank: int
    steps: int
    found: Sequence[int]  # a digest for each rank

    def __str__(self) -> str:
        shown = ", ".join(
            f"rank {rank} has {number:016x}" for rank, number in enumerate(self.found)
        )
        return (
            f"rank {self.rank}: after {self.steps} steps the ranks have different states ({shown}) "
            "and nobody can say which is right: a bit was flipped in memory, or a rank changed its "
            "weights alone. Every rank raises this. Start again: it goes on from its last save."
        )


@dataclass(eq=False)
class DamagedSaveError(PacelineError, RuntimeError):
    """There are saves of a job, and none of them is whole."""

    folder: str
    wrong: Mapping[str, str]  # by name

    def __str__(self) -> str:
        found = [f"{name}: {what}" for name, what in self.wrong.items()]
        return (
            f"none of the saves in {self.folder} is whole ({some_of(found, '; ')}). Nothing was "
            "begun, so that none is overwritten. Bring one back from a copy, or remove them to "
            "begin from the first step."
        )
