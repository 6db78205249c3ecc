"""Errors of communication hooks and codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class HookStateError(PacelineError, ValueError):
    """A communication hook was given invalid settings or an invalid state."""

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()


@dataclass(eq=False)
class CodecSettingError(PacelineError, ValueError):
    """A codec, or a hook that uses one, has an invalid setting."""

    found: str
    expected: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found}: requires that {self.expected}. {self.remedy}".strip()


@dataclass(eq=False)
class CodecMismatchError(PacelineError, RuntimeError):
    """Ranks use different codecs for gradients."""

    rank: int
    wanted: Sequence[str]  # by each rank

    def __str__(self) -> str:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self.wanted))
        return (
            f"rank {self.rank}: ranks use different codecs for gradients ({said}). "
            "Every rank raises this, and the current codec stays. Use the same codec and "
            "settings on all ranks, and change them on all ranks in the same step."
        )


@dataclass(eq=False)
class CodecStateError(PacelineError, RuntimeError, ValueError):
    """A codec hook cannot do this now, or cannot load this state."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}"
