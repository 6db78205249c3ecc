"""Errors of communication hooks and codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class HookStateError(PacelineError, ValueError):
    """A communication hook was given settings or a state that it cannot work with."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


@dataclass(eq=False)
class CodecSettingError(PacelineError, ValueError):
    """A codec, or a hook that uses one, was given something it cannot work with."""

    found: str
    expected: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found}: needs that {self.expected}. {self.remedy}".strip()


@dataclass(eq=False)
class CodecMismatchError(PacelineError, RuntimeError):
    """Ranks want to encode gradients in different ways."""

    rank: int
    wanted: Sequence[str]  # by each rank

    def __str__(self) -> str:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self.wanted))
        return (
            f"rank {self.rank}: ranks do not agree on how gradients are encoded ({said}). "
            "Every rank raises this, and the codec in use stays. Give all ranks the same codec and "
            "settings, and change them on all ranks at the same step."
        )


@dataclass(eq=False)
class CodecStateError(PacelineError, RuntimeError, ValueError):
    """A codec hook cannot do this now, or cannot go on from this state."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}"
