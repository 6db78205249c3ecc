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
    """This rank's part of one step; iterate over it to get its shards and their batches.

    After the last shard ``.grad`` holds the means over all shards of all ranks. If ranks are lost
    before that, the remaining ranks divide all shards again, and the iteration continues with the
    shards that this rank computes now. The loop body only sees more shards.
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
        """The shards that this rank has computed; if the step was repeated, the last time."""
        return tuple(self._taken)

    @property
    def epoch(self) -> int:
        """The epoch of the step."""
        return self._sharded.epoch

    @property
    def place(self) -> int:
        """The number of the step within the epoch."""
        return self._sharded.number

    def __iter__(self) -> Iterator[tuple[Shard, Any]]:
        job = self._job
        while not self.ended:
            self._taken = []
            for item in job.compute(self.batches(), len(self._sharded)):
                self._taken.append(item[0])
                yield item
            job.end(self)

    def batches(self) -> Iterator[tuple[Shard, Any]]:
        """Yield the shards that this rank computes now, with their batches."""
        step = self._sharded
        for shard in step.shards:
            try:
                item = step.take(shard.index)
            except WorkerLostError as error:
                log.warning("%s It is fetched again, in this process.", error)
                item = step.loader.fetch(step.number, shard.index, epoch=step.epoch)
            yield item
