"""Errors of samplers and of metrics over shards."""

from __future__ import annotations

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
