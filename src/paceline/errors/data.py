"""Errors of samplers, of shards, and of metrics over shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class SamplerStateError(PacelineError, ValueError):
    """A sampler was given a state that belongs to another row of samples."""

    field: str
    saved: object
    here: object

    def __str__(self) -> str:
        return (
            f"the sampler's state was saved with {self.field}={self.saved!r}, and this one has "
            f"{self.here!r}: a position in one row of samples means nothing in another. "
            "Make the sampler as it was when the state was saved, or start the epoch afresh."
        )


@dataclass(eq=False)
class ShardMismatchError(PacelineError, ValueError):
    """Two ranks' shards do not fit together; every rank raises it."""

    rank: int
    rank_a: int
    shard_a: str
    rank_b: int
    shard_b: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: rank {self.rank_a} called {self.shard_a}, and rank {self.rank_b} "
            f"{self.shard_b}. Nothing was reduced, and every rank raises this. Shards may differ "
            "in the number of rows only; an empty one is torch.empty(0, ...) with the dtype and "
            "the other dimensions of the rest."
        )


@dataclass(eq=False)
class ShardArgumentError(PacelineError, ValueError, TypeError):
    """A rank gave something that is no shard; every rank raises it."""

    rank: int
    operation: str
    culprit: int
    problem: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.operation}: rank {self.culprit} gave {self.problem}. "
            "Nothing was reduced, and every rank raises this."
        )


@dataclass(eq=False)
class ShardNumberError(PacelineError, ValueError):
    """A shard of a global batch was made from numbers that cannot be."""

    field: str
    value: object
    problem: str

    def __str__(self) -> str:
        return (
            f"Shard({self.field}={self.value!r}): it {self.problem}. Every rank has to name a "
            "shard by the same numbers, so none are guessed. Steps, epochs and shards are counted "
            "from 0, in plain ints; int(...) makes one of a tensor or of numpy's."
        )


@dataclass(eq=False)
class ShareError(PacelineError, ValueError):
    """Shards were to be shared out among ranks that cannot be."""

    rank: int
    members: Sequence[int]

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: shards cannot be shared out among ranks {list(self.members)}: "
            "this rank has to be one of them, and each may be there once. With another list than "
            "the other ranks have, a shard would be computed twice or by nobody. Give every rank "
            "the same members."
        )
