"""Errors of compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class HookRefusedError(PacelineError, RuntimeError):
    """A traced backward pass would not call these hooks."""

    hooks: Sequence[str]

    def __str__(self) -> str:
        return (
            f"{len(self.hooks)} hooks would be lost in compiled code: {'; '.join(self.hooks)}. "
            "Nothing was compiled. Remove them, or run this model in eager mode; full backward "
            "hooks of modules can be kept with paceline.compiled.keep_hooks."
        )


@dataclass(eq=False)
class HookResultError(PacelineError, RuntimeError):
    """A module's backward hook returned another number of gradients than it was given."""

    module: str
    hook: str
    given: int
    returned: int

    def __str__(self) -> str:
        return (
            f"a {self.hook} of {self.module} was called with {self.given} gradients and returned "
            f"{self.returned}. The other ranks now wait for this one. Return one for each, or None."
        )


@dataclass(eq=False)
class NotPlannedError(PacelineError, RuntimeError):
    """The schedule of a step cannot be read."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}"


@dataclass(eq=False)
class NotCapturedError(PacelineError, RuntimeError):
    """A step cannot be captured as one CUDA graph although ``graph=True``."""

    rank: int
    reason: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: train_step(graph=True): {self.reason}, so the step cannot be one "
            "CUDA graph. The other ranks raise an error in their step. Remove graph=True: then a "
            "graph is used only where that is possible."
        )
