"""Errors of Join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import PacelineError
from .groups import PeerDiedError, PeerLeftError


@dataclass(eq=False)
class JoinArgumentError(PacelineError, ValueError):
    """A Join context was given joinables that cannot be combined."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


@dataclass(eq=False)
class NotJoinableError(PacelineError, TypeError, AssertionError):
    """A Joinable notified its Join context without having called Joinable's constructor."""

    kind: str

    def __str__(self) -> str:
        return (
            f"Check that the {self.kind} constructor calls the ``Joinable`` constructor. "
            "Nothing was sent."
        )


@dataclass(eq=False)
class NestedJoinError(PacelineError, RuntimeError):
    """A Join context was entered inside another one on the same group or the same objects."""

    rank: int
    shared: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: this Join context is inside another one with the same "
            f"{self.shared}. A rank that runs out of inputs in the outer one could not take part "
            "in the inner one. Pass all joinables to one Join, or end the outer one first."
        )


class EarlyTerminationError(PacelineError, RuntimeError):
    """A rank ran out of inputs, with ``throw_on_early_termination=True``."""


@dataclass(eq=False)
class InputsExhaustedError(EarlyTerminationError):
    """This rank ran out of inputs before others did."""

    rank: int
    step: int

    def __str__(self) -> str:
        return (
            f"Rank {self.rank} exhausted all inputs. The other ranks raise too, "
            "because throw_on_early_termination=True."
        )


@dataclass(eq=False)
class PeerExhaustedError(EarlyTerminationError):
    """Another rank ran out of inputs."""

    rank: int
    step: int

    def __str__(self) -> str:
        return (
            "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
            f"Rank {self.rank} was about to begin step {self.step}; without "
            "throw_on_early_termination=True it would continue."
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
            "the step unfinished. See the traceback of that rank."
        )


@dataclass(eq=False)
class PeerDiedUnjoinedError(PeerDiedError):
    """The process of a rank died before it had joined."""

    step: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()} {_unjoined(self.step)}"


@dataclass(eq=False)
class PeerLeftUnjoinedError(PeerLeftError):
    """A rank left the group before it had joined."""

    step: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()} {_unjoined(self.step)}"


def _at(step: int) -> str:
    """Return the step in words, counted from one; torch's joinables do not count steps."""
    return f" in step {step}" if step else ""


def _unjoined(step: int) -> str:
    return f"It had not joined: the others were inside a Join context{_at(step)}."
