"""ShardedLoader: the samples of a step in shards, the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import Dataset, IterableDataset

from ..errors import DatasetChangedError, LoaderArgumentError, LoaderStateError
from ..groups import current_process_group
from .cutting import EpochCut
from .fetching import FetchAhead, ShardRequest, ShardSamples, data_loader
from .ranks import rank_and_size
from .shards import Shard, share_out

__all__ = ["ShardedLoader", "ShardedStep"]


class ShardedLoader:
    """Yields the steps of an epoch, and for each step the shards that this rank computes.

    A step has ``batch`` samples over all ranks, divided into ``shards`` parts whose sizes differ by
    at most one. Both are fixed for a whole run. The samples of a shard depend only on seed, epoch,
    step and shard, and so do the random numbers that the dataset and ``collate_fn`` draw: it does
    not matter which rank or worker loads it. Each sample is used once per epoch. The last step has
    the remaining samples; if these are fewer than ``shards``, they are added to the step before, or
    dropped with ``drop_last``. ::

        loader = ShardedLoader(dataset, shards=8, batch=64, group=group)
        for epoch in range(loader.epoch, epochs):
            for step in loader:
                for shard, (x, y) in step:
                    with ddp.shard(shard):
                        loss(ddp(x), y).backward()
                optimizer.step()

    Each iteration is one epoch, so there is no ``set_epoch``. After a ``break`` the next iteration
    continues with the next step. The dataset must be a map-style dataset with a length.
    ``num_workers`` and all other options are those of ``torch.utils.data.DataLoader``; workers load
    whole shards ahead, and live as long as the loader.

    Shards are divided among the ranks of ``group`` (which may be a wrapped model), of the current
    group, or of torch's default group, as they are when a step is iterated; or among ``members``, a
    number of ranks or a list. ``share`` is the function that divides them, by default
    :func:`share_out`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        shards: int,
        batch: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        group: Any = None,
        members: int | Sequence[int] | None = None,
        rank: int | None = None,
        share: Callable[..., Sequence[int]] = share_out,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        _require_indexable(dataset)
        self.dataset = dataset
        self.seed, self.shuffle, self.share = seed, shuffle, share
        self._group = group if group is not None else current_process_group()
        self._members, self._rank = members, rank
        self._cut = EpochCut(len(cast(Sized, dataset)), batch, shards, drop_last)
        self._epoch = self._step = 0  # of the step that is given out next
        self._row_of, self._row = 0, torch.empty(0)
        Shard(seed, 0, 0, shards)  # refuses a seed that is none
        self._samples = ShardSamples(dataset, collate_fn)
        self._options = {"num_workers": num_workers, **options}
        self._ahead = FetchAhead(self._samples, self._likely_after, self._options)
        data_loader(self._samples, (), self._options)  # refuses options that are none
        self.share_of(0)  # refuses ranks that are none

    # -- steps --------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many steps an epoch has."""
        return self._cut.steps

    def __iter__(self) -> Iterator[ShardedStep]:
        if self._step == 0:
            self._measure()
        while self._step < len(self):
            self._require_same_length()
            step = self._step
            self._step += 1
            yield ShardedStep(self, self._epoch, step)
        self.seek(self._epoch + 1)

    def next_step(self) -> ShardedStep:
        """The step that comes next; after the last step of an epoch, the first of the next."""
        if self._step >= len(self):
            self.seek(self._epoch + 1)
        if self._step == 0:
            self._measure()
        self._require_same_length()
        self._step += 1
        return ShardedStep(self, self._epoch, self._step - 1)

    @property
    def has_ended(self) -> bool:
        """Whether all steps of this epoch have been yielded."""
        return self._step >= len(self)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epoch

    def seek(self, epoch: int, step: int = 0) -> None:
        """Continue with ``step`` of ``epoch``."""
        if not 0 <= step <= len(self) or epoch < 0:
            raise LoaderStateError("step", (epoch, step), f"{len(self)} steps in an epoch")
        self._epoch, self._step = epoch, step

    def fetch(self, step: int, index: int, *, epoch: int | None = None) -> tuple[Shard, Any]:
        """Load any shard of any step in this process; by default of the current epoch.

        A shard is always bitwise the same, no matter where and how often it is loaded.
        """
        request = self._request(self._epoch if epoch is None else epoch, step, index)
        (batch,) = data_loader(self._samples, [request], self._here)
        return request.shard, batch

    def close(self) -> None:
        """Stop the workers; the next iteration starts new ones."""
        self._ahead.drop()

    # -- ranks --------------------------------------------------------------------------------

    @property
    def group(self) -> Any:
        """The group that was given, whose ranks compute the shards."""
        return self._group

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that compute the shards. You can set it between steps or during one."""
        given = self._members
        given = rank_and_size(self._group)[1] if given is None else given
        return tuple(range(given)) if isinstance(given, int) else tuple(given)

    @members.setter
    def members(self, members: int | Sequence[int]) -> None:
        self._members = members

    @property
    def rank(self) -> int:
        """This rank."""
        return rank_and_size(self._group)[0] if self._rank is None else self._rank

    def share_of(self, step: int) -> tuple[int, ...]:
        """Return the shards of ``step`` that this rank computes, with the current ranks."""
        count = self._cut.shards
        found = tuple(self.share(count, self.members, self.rank, step=step))
        if not set(found) <= set(range(count)) or len(set(found)) != len(found):
            problem = f"it gave {found} of {count} shards"
            raise LoaderArgumentError("share", self.share, problem)
        return found

    # -- where it stands ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state to continue from here, on any number of ranks; it is equal on all ranks.

        A step counts as done once it has been yielded, even if workers have loaded further ahead.
        """
        return {"epoch": self._epoch, "step": self._step, **self._identity()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from where ``state_dict`` was saved, with the step that came next."""
        self._measure()
        for field, value in self._identity().items():
            if state_dict.get(field) != value:
                raise LoaderStateError(field, state_dict.get(field), value)
        self.seek(int(state_dict["epoch"]), int(state_dict["step"]))

    def _identity(self) -> dict[str, Any]:
        """What makes the shards what they are."""
        cut = self._cut
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": cut.length,
            "shards": cut.shards,
            "batch": cut.batch,
            "drop_last": cut.drop_last,
        }

    # -- samples ------------------------------------------------------------------------------

    def shard(self, epoch: int, step: int, index: int) -> Shard:
        """Return the description of a shard, without its samples."""
        samples = len(self._cut.shard(step, index))
        return Shard(self.seed, step, index, self._cut.shards, epoch, samples, self._source)

    @property
    def _source(self) -> str:
        """What ranks have to have in common, for a wrapper that compares it."""
        cut, order = self._cut, "shuffled" if self.shuffle else "in order"
        rest = ", without the rest" if cut.drop_last else ""
        return f"{cut.length} samples {order}, {cut.batch} to a step{rest}"

    def _request(self, epoch: int, step: int, index: int) -> ShardRequest:
        if not 0 <= step < len(self) or not 0 <= index < self._cut.shards:
            found = f"step {step}, shard {index}"
            raise LoaderArgumentError("fetch", found, f"an epoch has {len(self)} steps")
        positions = self._cut.shard(step, index)
        samples = self._order(epoch)[positions.start : positions.stop].tolist()
        return ShardRequest(self.shard(epoch, step, index), samples)

    def _order(self, epoch: int) -> torch.Tensor:
        """The samples of an epoch in order; kept, since every shard of it asks."""
        length = self._cut.length
        if (epoch, length) != (self._row_of, len(self._row)):
            generator = torch.Generator()
            key = Shard(self.seed, 0, 0, 1, epoch).key("order")
            generator.manual_seed(int.from_bytes(key[:8], "little"))
            shuffled = self.shuffle
            row = torch.randperm(length, generator=generator) if shuffled else torch.arange(length)
            self._row_of, self._row = epoch, row
        return self._row

    def _likely_after(self, request: ShardRequest) -> ShardRequest | None:
        """What this rank takes next in the epoch, if ranks do not change."""
        epoch, step, index = request.shard.epoch, request.shard.step, request.shard.index
        own = self.share_of(step)
        rest = own[own.index(index) + 1 :] if index in own else ()
        while not rest and step + 1 < len(self):
            step += 1
            rest = self.share_of(step)
        return self._request(epoch, step, rest[0]) if rest else None

    def _take(self, epoch: int, step: int, index: int) -> tuple[Shard, Any]:
        """As :meth:`fetch`, by workers where there are any."""
        self._require_same_length()
        if not self._options["num_workers"]:
            return self.fetch(step, index, epoch=epoch)
        request = self._request(epoch, step, index)
        return request.shard, self._ahead.take(request, self.rank)

    @property
    def _here(self) -> dict[str, Any]:
        """Options of a loader without workers."""
        return {"pin_memory": self._options.get("pin_memory", False), "num_workers": 0}

    def _measure(self) -> None:
        """A dataset may have another length in another epoch; workers have a copy of the old."""
        length = len(cast(Sized, self.dataset))
        if length != self._cut.length:
            cut = self._cut
            self._cut = EpochCut(length, cut.batch, cut.shards, cut.drop_last)
            self._ahead.drop()

    def _require_same_length(self) -> None:
        length = len(cast(Sized, self.dataset))
        if length != self._cut.length:
            raise DatasetChangedError(self.rank, self._epoch, self._cut.length, length)


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """This rank's part of one step; iterate over it to get its shards and their batches.

    Shards are divided among the ranks when an iteration begins. To repeat a step after ranks were
    lost, iterate it again: it then yields the shards that this rank has to compute now.
    """

    loader: ShardedLoader
    epoch: int
    number: int

    def __len__(self) -> int:
        return len(self.shards)

    def __iter__(self) -> Iterator[tuple[Shard, Any]]:
        for shard in self.shards:
            yield self.take(shard.index)

    def take(self, index: int) -> tuple[Shard, Any]:
        """Return any shard of the step with its batch; workers load it if there are any."""
        return self.loader._take(self.epoch, self.number, index)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards that this rank computes, with the current ranks."""
        indices = self.loader.share_of(self.number)
        return tuple(self.loader.shard(self.epoch, self.number, index) for index in indices)


def _require_indexable(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        problem = "an IterableDataset has no indices, so a shard could not be loaded again"
        raise LoaderArgumentError("dataset", type(dataset).__name__, problem)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        problem = "it needs __len__ and __getitem__"
        raise LoaderArgumentError("dataset", type(dataset).__name__, problem)
