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


@dataclass(eq=False)
class LoaderArgumentError(PacelineError, ValueError, TypeError):
    """A ShardedLoader was made, or asked, for something that cannot be."""

    argument: str
    value: object
    problem: str

    def __str__(self) -> str:
        return (
            f"ShardedLoader: {self.argument}={self.value!r}: {self.problem}. Nothing was fetched. "
            "Every rank has to give the same dataset, shards, batch and seed, so it raises on all."
        )


@dataclass(eq=False)
class LoaderStateError(PacelineError, ValueError):
    """A ShardedLoader was given a state that belongs to other shards."""

    field: str
    saved: object
    here: object

    def __str__(self) -> str:
        return (
            f"the loader's state was saved with {self.field}={self.saved!r}, and here is "
            f"{self.here!r}: the steps that were done there had other samples than those of the "
            "same number here. Nothing was loaded. Make the loader as it was (the number of ranks "
            "may differ, nothing else), or start the epoch afresh with seek()."
        )


@dataclass(eq=False)
class DatasetChangedError(PacelineError, RuntimeError):
    """A dataset has another length than when the epoch began."""

    rank: int
    epoch: int
    before: int
    now: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: the dataset had {self.before} samples when epoch {self.epoch} "
            f"began, and now has {self.now}: the shards that are left would have samples that were "
            "seen, or miss some. The other ranks wait for this one's shards. Change a dataset "
            "between epochs, on every rank; here, seek() to the start of an epoch."
        )


@dataclass(eq=False)
class WorkerLostError(PacelineError, RuntimeError):
    """A worker process died while it fetched samples."""

    rank: int
    epoch: int
    step: int
    index: int
    report: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: a worker was lost before shard {self.index} of step {self.step} "
            f"(epoch {self.epoch}) was fetched: {self.report} The other ranks wait for this "
            "shard. Nothing of the step is lost: iterated again, it is fetched by new workers. "
            "A worker that is killed often has no memory left: use fewer, or smaller samples."
        )
