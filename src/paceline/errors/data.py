"""Errors of samplers, loaders and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class SamplerStateError(PacelineError, ValueError):
    """A sampler was given the state of a sampler with another order of samples."""

    field: str
    saved: object
    here: object

    def __str__(self) -> str:
        return (
            f"the sampler's state was saved with {self.field}={self.saved!r}, but this sampler has "
            f"{self.here!r}, so the saved position does not apply to its order of samples. "
            "Create the sampler with the saved value, or start the epoch from the beginning."
        )


@dataclass(eq=False)
class ShardMismatchError(PacelineError, ValueError):
    """The tensors of two ranks cannot be combined; every rank raises it."""

    rank: int
    rank_a: int
    shard_a: str
    rank_b: int
    shard_b: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: rank {self.rank_a} called {self.shard_a}, but rank {self.rank_b} "
            f"called {self.shard_b}. Nothing was reduced, and every rank raises this. Tensors may "
            "differ in the number of rows only; for no rows pass torch.empty(0, ...) with the "
            "dtype and the other dimensions of the rest."
        )


@dataclass(eq=False)
class ShardArgumentError(PacelineError, ValueError, TypeError):
    """A rank passed an invalid value to a metric; every rank raises it."""

    rank: int
    operation: str
    culprit: int
    problem: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.operation}: rank {self.culprit} passed {self.problem}. "
            "Nothing was reduced, and every rank raises this."
        )


@dataclass(eq=False)
class ShardNumberError(PacelineError, ValueError):
    """A shard of a global batch was created from invalid numbers."""

    field: str
    value: object
    problem: str

    def __str__(self) -> str:
        return (
            f"Shard({self.field}={self.value!r}): it {self.problem}. Every rank has to use the "
            "same numbers for a shard. Steps, epochs and shards are plain ints that count from 0; "
            "convert numbers of torch or numpy with int(...)."
        )


@dataclass(eq=False)
class ShareError(PacelineError, ValueError):
    """Shards cannot be divided among these ranks."""

    rank: int
    members: Sequence[int]

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: shards cannot be divided among ranks {list(self.members)}: "
            "this rank has to be in the list, and each rank only once. If the lists of two ranks "
            "differ, a shard would be computed twice or not at all. Pass the same members on "
            "every rank."
        )


@dataclass(eq=False)
class LoaderArgumentError(PacelineError, ValueError, TypeError):
    """A ShardedLoader was given an invalid argument."""

    argument: str
    value: object
    problem: str

    def __str__(self) -> str:
        return (
            f"ShardedLoader: {self.argument}={self.value!r}: {self.problem}. Nothing was fetched. "
            "Every rank has to pass the same dataset, shards, batch and seed, so all raise this."
        )


@dataclass(eq=False)
class LoaderStateError(PacelineError, ValueError):
    """A ShardedLoader was given the state of a loader with other shards."""

    field: str
    saved: object
    here: object

    def __str__(self) -> str:
        return (
            f"the loader's state was saved with {self.field}={self.saved!r}, but this loader has "
            f"{self.here!r}, so its steps have other samples. Nothing was loaded. Create the "
            "loader with the saved value (only the number of ranks may differ), or start an epoch "
            "from the beginning with seek()."
        )


@dataclass(eq=False)
class DatasetChangedError(PacelineError, RuntimeError):
    """The length of a dataset changed during an epoch."""

    rank: int
    epoch: int
    before: int
    now: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: the dataset had {self.before} samples when epoch {self.epoch} "
            f"began, and now has {self.now}: the remaining shards would repeat or miss samples. "
            "The other ranks wait for the shards of this rank. Change a dataset only between "
            "epochs, on every rank, or seek() to the start of an epoch."
        )


@dataclass(eq=False)
class WorkerLostError(PacelineError, RuntimeError):
    """A worker process died while fetching samples."""

    rank: int
    epoch: int
    step: int
    index: int
    report: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: a worker died before shard {self.index} of step {self.step} "
            f"(epoch {self.epoch}) was fetched: {self.report} The other ranks wait for this "
            "shard. The step is not lost: iterate over it again, and new workers fetch it. "
            "Workers are often killed for lack of memory: use fewer workers or smaller samples."
        )
