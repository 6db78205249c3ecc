"""Errors of optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class AveragingArgumentError(PacelineError, ValueError):
    """An averager, LocalSGD or DiLoCo was given an invalid argument."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


class AveragingTypeError(AveragingArgumentError, TypeError):
    """An averager, LocalSGD or DiLoCo was given an object of the wrong type."""


class UnsupportedParametersError(AveragingArgumentError, NotImplementedError):
    """An averager was given parameters that it cannot average."""


@dataclass(eq=False)
class RoundsMismatchError(PacelineError, RuntimeError):
    """Ranks created a LocalSGD or DiLoCo with different models or arguments."""

    rank: int
    peer: int
    fact: str
    own: object
    others: object

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.fact} is {self.own} here and {self.others} on rank "
            f"{self.peer}. The ranks would synchronize different things in different steps, so "
            "every rank raises this. Use the same model and the same arguments on all ranks."
        )


@dataclass(eq=False)
class RoundsStateError(PacelineError, ValueError):
    """A LocalSGD or DiLoCo cannot load this state dict."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem} Nothing was loaded. {self.remedy}"


@dataclass(eq=False)
class OptimizerArgumentError(PacelineError, ValueError):
    """A sharded optimizer, or a function for one, was given an invalid argument."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


class OptimizerTypeError(OptimizerArgumentError, TypeError):
    """A sharded optimizer was given an object of the wrong type."""


class OptimizerStateError(OptimizerArgumentError, RuntimeError):
    """A sharded optimizer cannot do this now."""
