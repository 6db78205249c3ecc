"""Samplers that deal a dataset out to ranks: every sample once, none twice, none left out.

An epoch is one row of samples, the same on every rank and for any number of ranks: a permutation
that follows from seed and epoch. It is dealt like cards: of N ranks, rank r gets the samples at
positions r, r + N, r + 2N… That has three uses.

- Ranks differ by one sample at most. Where that makes one batch more, train inside
  :class:`paceline.Join`; torch's sampler repeats samples instead, or drops some.
- Positions k·B to (k+1)·B are the k-th global batch of B samples for any N, if each rank's batch
  has B/N. So a run on two ranks sees what a run on eight sees, step by step.
- What all ranks have done of an epoch is one number, the position up to which it has been dealt.
  A state saved on four ranks can be resumed on two.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from ..errors import SamplerStateError
from ..groups import current_process_group
from .ranks import rank_and_size

__all__ = ["DistributedSampler"]


class DistributedSampler(TorchDistributedSampler[Any]):
    """The samples of this rank in each epoch; replaces ``torch.utils.data.DistributedSampler``.

    No sample is repeated: ranks may have unequal numbers of samples. ``num_replicas`` and ``rank``
    default to the size and rank of ``group``, else of the current process group, else of torch's
    default group. ``group`` may be a wrapped model, whose group is then used. They are read when an
    iteration begins. If the ranks of the group have changed since (``Group.reconfigure``),
    ``sampler.load_state_dict(sampler.state_dict())`` divides the remaining samples among the new
    ranks. The order is that of torch for the same ``seed`` and epoch. ``drop_last`` drops the
    samples that cannot be divided equally.

    As with torch's sampler, call :meth:`set_epoch` before each epoch. ``len`` is the number of
    samples in the next iteration on this rank. It works with ``torch.utils.data.DataLoader`` and
    with torchdata's ``StatefulDataLoader``, whose state then includes that of the sampler. ::

        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            with Join([model]):
                for batch in loader:
                    ...
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        group: ProcessGroup | Any = None,
    ) -> None:
        self._given = rank, num_replicas
        self._group = group if group is not None else current_process_group()
        self._known = -1, -1
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"Invalid rank {self.rank}, rank should be in the interval "
                f"[0, {self.num_replicas - 1}]"
            )
        self.dataset = cast("Dataset[Any]", dataset)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._position = 0  # up to which all ranks together have dealt this epoch
        self._start = 0  # where the next iteration begins
        self._dealt = False  # an iteration has begun
        self._knows_epoch = False  # it has been told one, or that it need not be: by a warning

    # -- whom it deals to ---------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The current rank in the group."""
        given = self._given[0]
        return self._now()[0] if given is None else given

    @rank.setter
    def rank(self, value: int) -> None:
        self._given = value, self._given[1]

    @property
    def num_replicas(self) -> int:
        """The current number of ranks in the group."""
        given = self._given[1]
        return self._now()[1] if given is None else given

    @num_replicas.setter
    def num_replicas(self, value: int) -> None:
        self._given = self._given[0], value

    def _now(self) -> tuple[int, int]:
        if self._group is not None or self._known[0] < 0 or dist.is_initialized():
            self._known = rank_and_size(self._group)
        return self._known

    def __getstate__(self) -> dict[str, Any]:
        """A copy deals to the ranks of now: it has no group to ask."""
        return {**self.__dict__, "_group": None, "_given": (self.rank, self.num_replicas)}

    # -- how an epoch is dealt ----------------------------------------------------------------

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """The number of samples of a whole epoch, on all ranks together."""
        return self._end(0)

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples of a whole epoch on this rank."""
        return len(self._own(0))

    def __len__(self) -> int:
        return len(self._own(self._start))

    def __iter__(self) -> Iterator[Any]:
        if self._start and not self._own(self._start, of_all=True):
            # The epoch was over. A loader that knows that by itself makes another iterator, which
            # must begin afresh; one that does not, uses this.
            self._start = 0
            return iter(())
        return self._deal()

    def _deal(self) -> Iterator[Any]:
        start, self._start = self._start, 0  # with the first sample: loaders make idle iterators
        if self._dealt and self.shuffle and not self._knows_epoch:
            self._warn_of_same_order()
        self._dealt = True
        self._position = start
        row, own, end = self._row(), self._own(start), self._end(start)
        for drawn, index in enumerate(row[own.start : own.stop : own.step].tolist(), 1):
            self._position = min(start + drawn * own.step, end)
            yield index
        self._position = end

    def _warn_of_same_order(self) -> None:
        self._knows_epoch = True
        warnings.warn(
            f"rank {self.rank}: DistributedSampler begins a second epoch, and set_epoch was never "
            "called: every epoch has the samples in the same order. Call "
            "sampler.set_epoch(epoch) before each epoch, on all ranks; if the order need not "
            "change, pass shuffle=False.",
            stacklevel=3,
        )

    def _row(self) -> torch.Tensor:
        """The samples of this epoch in order."""
        if not self.shuffle:
            return torch.arange(self._length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self._length, generator=generator)

    def _own(self, start: int, *, of_all: bool = False) -> range:
        """The positions this rank gets when dealing begins at ``start``; or those of all ranks."""
        if of_all:
            return range(start, self._end(start))
        return range(start + self.rank, self._end(start), self.num_replicas)

    def _end(self, start: int) -> int:
        left = max(self._length - start, 0)
        return start + left - (left % self.num_replicas if self.drop_last else 0)

    @property
    def _length(self) -> int:
        return len(cast(Sized, self.dataset))

    # -- where it stands ----------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and start at its beginning unless it is the current one."""
        self._knows_epoch = True
        if epoch != self.epoch:
            self.epoch, self._start, self._position = epoch, 0, 0

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """Return the state to continue from here, on any number of ranks.

        ``position`` is the number of samples of this epoch that all ranks together have used. By
        default it is computed from the samples that this rank has drawn. A ``DataLoader`` with
        workers draws ahead, so pass the number there; ``StatefulDataLoader`` does it for you.
        """
        return {
            "epoch": self.epoch,
            "position": self._position if position is None else position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": self._length,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue in the next iteration from where ``state_dict`` was saved.

        All ranks load the same one; if each rank has saved its own, any of them works.
        """
        here = {"seed": self.seed, "shuffle": self.shuffle, "length": self._length}
        for field, value in here.items():
            if state_dict[field] != value:
                raise SamplerStateError(field, state_dict[field], value)
        epoch, position = int(state_dict["epoch"]), int(state_dict["position"])
        if not 0 <= position <= self._length:
            raise SamplerStateError("position", position, self._length)
        if position == self._end(position) and epoch < self.epoch:
            return  # that epoch was over, and set_epoch has gone on (loaders load late)
        self.epoch, self._start, self._position = epoch, position, position
        self._knows_epoch = True
