"""Errors of Join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import PacelineError
from .groups import PeerDiedError, PeerLeftError


@dataclass(eq=False)
class JoinArgumentError(PacelineError, ValueError):
    """A Join context was made of things that do not go together."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


@dataclass(eq=False)
class NotJoinableError(PacelineError, TypeError, AssertionError):
    """An object told the Join context of a step without having called Joinable's constructor."""

    kind: str

    def __str__(self) -> str:
        return (
            f"Check that the {self.kind} constructor calls the ``Joinable`` constructor: "
            "the object does not know which Join context it is in. Nothing was sent."
        )


@dataclass(eq=False)
class NestedJoinError(PacelineError, RuntimeError):
    """A Join context was entered inside another one on the same group or the same objects."""

    rank: int
    shared: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: this Join context is inside another one with the same "
            f"{self.shared}. A rank that runs out in the outer one could not stand in for what the "
            "others do in the inner one. Give all joinables to one Join, or end the outer one."
        )


class EarlyTerminationError(PacelineError, RuntimeError):
    """A rank ran out of inputs, and the Join context was told to raise everywhere then."""


@dataclass(eq=False)
class InputsExhaustedError(EarlyTerminationError):
    """This rank ran out of inputs before others did."""

    rank: int
    step: int

    def __str__(self) -> str:
        return (
            f"Rank {self.rank} exhausted all inputs. The ranks that have more raise as well, "
            "since throw_on_early_termination=True."
        )


@dataclass(eq=False)
class PeerExhaustedError(EarlyTerminationError):
    """Another rank ran out of inputs."""

    rank: int
    step: int

    def __str__(self) -> str:
        return (
            "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
            f"Rank {self.rank} was about to begin step {self.step}; it would go on without "
            "throw_on_early_termination=True."
        )


@dataclass(eq=False)
class PeerFailedError(PacelineError, RuntimeError):
    """Another rank raised an exception inside the Join context."""

    rank: int
    peers: Sequence[int]
    step: int
    message: str

    def __str__(self) -> str:
        several = f" (and so did rank {', '.join(map(str, self.peers[1:]))})"
        others = several if len(self.peers) > 1 else ""
        return (
            f"rank {self.rank}: rank {self.peers[0]} failed inside the Join context"
            f"{_at(self.step)}{others}: {self.message}. This rank has left the context too, with "
            "the step unfinished; that rank's own traceback says more."
        )


@dataclass(eq=False)
class PeerDiedUnjoinedError(PeerDiedError):
    """A rank's process is gone, and it had not joined."""

    step: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()} {_unjoined(self.step)}"


@dataclass(eq=False)
class PeerLeftUnjoinedError(PeerLeftError):
    """A rank left the group, and it had not joined."""

    step: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()} {_unjoined(self.step)}"


def _at(step: int) -> str:
    """Tell the step, counted from one; joinables of torch's count none."""
    return f" in step {step}" if step else ""


def _unjoined(step: int) -> str:
    return f"It had not joined: the others were inside a Join context{_at(step)}."
