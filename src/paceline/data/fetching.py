"""A shard's samples, fetched the same wherever it happens: in this process or in any worker.

Whatever draws random numbers while samples are fetched (augmentation, a collate function that
masks words) draws those of the shard. Sums over floats may depend on the number of threads, and
torch gives workers one; so there is one here, too.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from .._torch.data import hear_while_waiting, refuse_dead, stop_workers
from ..errors import WorkerLostError
from .randomness import keyed_random
from .shards import Shard

__all__ = ["FetchAhead", "ShardRequest", "ShardSamples", "data_loader"]


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """What a worker is asked for: a shard, and the numbers of its samples in the dataset."""

    shard: Shard
    samples: Sequence[int]


class ShardSamples(Dataset[Any]):
    """A dataset of shards on top of a dataset of samples; what a worker has of a loader."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self._collate = default_collate if collate is None else collate

    def __getitem__(self, request: ShardRequest) -> Any:
        with keyed_random(request.shard, purpose="samples"), _one_thread():
            if callable(getattr(self.dataset, "__getitems__", None)):
                return self._collate(self.dataset.__getitems__(list(request.samples)))
            return self._collate([self.dataset[sample] for sample in request.samples])


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def data_loader(
    samples: ShardSamples, requests: Iterable[ShardRequest], options: Mapping[str, Any]
) -> DataLoader[Any]:
    """torch's loader, which answers one request after another, in order."""
    return DataLoader(
        samples,
        batch_size=None,  # a request is a whole batch
        sampler=requests,
        generator=torch.Generator(),  # else it draws from torch's global random numbers
        in_order=True,
        **options,
    )


class RequestsAhead:
    """What torch's loader asks its workers for, a few requests ahead of what is taken.

    It begins with ``first``; ``after(request)`` says what follows, and None that nothing does. That
    is known by reference only and belongs to whoever owns the workers: in a circle of references
    they would end by timeout, as queues are closed before anyone has told them to stop.
    """

    def __init__(self, after: Callable[[ShardRequest], ShardRequest | None]) -> None:
        self.first: ShardRequest | None = None
        self.waiting: deque[ShardRequest] = deque()  # not taken yet, oldest first
        self._after = WeakMethod(after)

    def __iter__(self) -> Iterator[ShardRequest]:
        request = self.first
        while request is not None:
            self.waiting.append(request)
            yield request
            after = self._after()
            request = after(request) if after is not None else None
            del after


class FetchAhead:
    """Batches that workers fetch before anybody takes them.

    ``after(request)``, a method, says what is likely to be taken next. To take something else is
    right too, and slower: what was fetched ahead is thrown away. The workers stay.
    """

    def __init__(
        self,
        samples: ShardSamples,
        after: Callable[[ShardRequest], ShardRequest | None],
        options: Mapping[str, Any],
    ) -> None:
        self._asked = RequestsAhead(after)
        self._samples, self._options = samples, {**options, "persistent_workers": True}
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] = iter(())
        self._process = os.getpid()
        self._left_alone: list[object] = []

    def take(self, request: ShardRequest, rank: int) -> Any:
        """The batch of ``request``; blocks until a worker has it."""
        self._leave_to_parent()
        try:
            if request not in self._asked.waiting:
                self._begin(request)
            while self._asked.waiting[0] != request:
                self._next()
            return self._next()
        except BaseException as error:
            # workers may be gone, and what they were asked for with them
            if died := self.drop() or _death_in(error):
                shard = request.shard
                place = shard.epoch, shard.step, shard.index
                raise WorkerLostError(rank, *place, died) from error
            raise

    def drop(self) -> str:
        """End the workers; the next :meth:`take` starts others. Of one that died, says how."""
        died = ""
        try:
            refuse_dead(self._batches)
        except RuntimeError as error:
            died = _death_in(error)
        try:
            stop_workers(self._batches)
        finally:
            self._forget()
        return died

    def _forget(self) -> None:
        self._batches, self._loader = iter(()), None
        self._asked.waiting.clear()

    def _begin(self, request: ShardRequest) -> None:
        self._asked.first = request
        self._asked.waiting.clear()
        if self._loader is None:
            self._loader = data_loader(self._samples, self._asked, self._options)
        self._batches = iter(self._loader)
        hear_while_waiting(self._batches)

    def _next(self) -> Any:
        refuse_dead(self._batches)
        batch = next(self._batches)
        self._asked.waiting.popleft()
        return batch

    def _leave_to_parent(self) -> None:
        """In a forked child: workers are the parent's, and to let go of them would end them."""
        if os.getpid() != self._process:
            self._left_alone += [self._batches, self._loader]
            self._process = os.getpid()
            self._forget()


def _death_in(error: BaseException) -> str:
    """How a worker died, if ``error`` comes from that; its pipe may break before torch sees it.

    What a dataset raises in a worker begins with "Caught".
    """
    text = str(error)
    if isinstance(error, RuntimeError) and "DataLoader worker (pid" in text:
        return text
    broken = isinstance(error, ConnectionError | EOFError) and not text.startswith("Caught")
    return f"its connection broke ({type(error).__name__})" if broken else ""
