"""One step of a job: this rank's shards, and more of them when ranks were lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..data import Shard, ShardedStep
from ..errors import WorkerLostError

if TYPE_CHECKING:
    from .loop import Job

log = logging.getLogger(__name__)


class JobStep:
    """This rank's part of one step; iterate for its shards, each with its batch.

    After the last shard the means over all shards of all ranks are in ``.grad``. If ranks are lost
    before that, those that are left share all shards out again: the iteration goes on with the
    shards that this rank computes now. So a body sees more shards, and nothing else.
    """

    ends_itself = True  # unlike a loader's step, which a wrapper has to end

    def __init__(self, job: Job, sharded: ShardedStep, number: int) -> None:
        self._job, self._sharded = job, sharded
        self.number = number
        """How many steps of the job came before it."""
        self.committed = False
        """Whether the means are in ``.grad``. False after the last shard: other ranks have done
        this step, ``.grad`` is zero here, and the next step begins with another rank's state."""
        self.ended = False
        self._taken: list[Shard] = []

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards that this rank has computed of it; if it was done again, the last time."""
        return tuple(self._taken)

    @property
    def epoch(self) -> int:
        """The epoch that it belongs to."""
        return self._sharded.epoch

    @property
    def place(self) -> int:
        """Its number within the epoch."""
        return self._sharded.number

    def __iter__(self) -> Iterator[tuple[Shard, Any]]:
        job = self._job
        while not self.ended:
            self._taken = []
            for item in job.compute(self.batches()):
                self._taken.append(item[0])
                yield item
            job.end(self)

    def batches(self) -> Iterator[tuple[Shard, Any]]:
        """This rank's shards, as the ranks are now, each with its batch."""
        step = self._sharded
        for shard in step.shards:
            try:
                item = step.take(shard.index)
            except WorkerLostError as error:
                log.warning("%s It is fetched again, in this process.", error)
                item = step.loader.fetch(step.number, shard.index, epoch=step.epoch)
            yield item
