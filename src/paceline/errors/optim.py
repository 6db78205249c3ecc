"""Errors of optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class AveragingArgumentError(PacelineError, ValueError):
    """An averager, LocalSGD or DiLoCo was given something it cannot work with."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


class AveragingTypeError(AveragingArgumentError, TypeError):
    """An averager, LocalSGD or DiLoCo was given something of a wrong type."""


class UnsupportedParametersError(AveragingArgumentError, NotImplementedError):
    """An averager was given parameters that it cannot average."""


@dataclass(eq=False)
class RoundsMismatchError(PacelineError, RuntimeError):
    """Ranks made a LocalSGD or DiLoCo that do not go together."""

    rank: int
    peer: int
    fact: str
    own: object
    others: object

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.fact} is {self.own} here and {self.others} on rank "
            f"{self.peer}. The ranks would exchange different things at different steps, so every "
            "rank refuses. Make it with the same model and the same arguments on all of them."
        )


@dataclass(eq=False)
class RoundsStateError(PacelineError, ValueError):
    """A state dict that this LocalSGD or DiLoCo cannot go on from."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem} Nothing was loaded. {self.remedy}"


@dataclass(eq=False)
class OptimizerArgumentError(PacelineError, ValueError):
    """A sharded optimizer, or what goes with it, was given something it cannot work with."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


class OptimizerTypeError(OptimizerArgumentError, TypeError):
    """A sharded optimizer was given an object of a wrong type."""


class OptimizerStateError(OptimizerArgumentError, RuntimeError):
    """A sharded optimizer was asked for something it cannot do now."""
