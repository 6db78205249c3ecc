"""Which backward passes of a wrapper are averaged, how they are weighted, and steps of shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from torch.utils.hooks import RemovableHandle

from ..data import Shard
from ..errors import ModuleStateError
from . import same_bits
from .replica import Replica, SampleCount
from .shard_replica import ShardReplica

Item = TypeVar("Item")


class AveragedPasses:
    """What a program says about its backward passes; a part of the wrapper."""

    replica: Replica

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients on this rank; the first pass outside averages them.

        It takes effect if the backward pass, or its forward, runs inside the context.
        """
        return self.replica.averaging.no_sync()

    def accumulate(self, steps: int) -> contextlib.AbstractContextManager[bool]:
        """Run one of ``steps`` micro-steps; the last one averages, and its value is True::

        for batch in loader:
            with ddp.accumulate(4) as last:
                loss(ddp(batch)).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        """
        return self.replica.averaging.accumulate(steps)

    def samples(self, count: float) -> SampleCount:
        """Let the next backward pass, or those inside the context, count as ``count`` samples::

            with ddp.samples(len(batch)):
                loss(ddp(batch)).backward()  # a mean over the batch

        The gradient is then the mean over all samples of all ranks, whatever the batch sizes.
        """
        return self.replica.samples(count)

    def shard(self, shard: Shard) -> contextlib.AbstractContextManager[None]:
        """Compute one of the ``shards=`` of a step, on this rank only::

            for step in loader:
                for shard, (x, y) in ddp.shards_of(step):
                    with ddp.shard(shard):
                        loss(ddp(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        Inside, random numbers are those of the shard, buffers are as they were when the step began,
        and operations without a deterministic form are refused. What ``backward`` leaves in
        ``.grad`` is taken when it ends. A shard counts as ``shard.samples`` samples, unless
        :meth:`samples` is called inside.
        """
        return self._sharded().shard(shard)

    def shards_of(self, step: Iterable[Item]) -> Iterator[Item]:
        """Iterate over this rank's shards of ``step``, then average the gradients.

        After the loop ``.grad`` holds the means over the shards of all ranks, bitwise the same
        however shards are divided. Every rank has to run the loop, even one without shards.
        """
        return self._sharded().each(step)

    def conditions(self) -> dict[str, str]:
        """Return what the bits of a run with ``shards=`` depend on besides code, data and seed.

        Save it with a checkpoint; :meth:`require_conditions` compares it when the run resumes.
        """
        return same_bits.conditions(self._sharded().shards, self.replica.group.device)

    def require_conditions(self, saved: Mapping[str, str]) -> None:
        """Raise an error if :meth:`conditions` differ from ``saved``."""
        found = same_bits.differences(saved, self.conditions())
        if found:
            raise ModuleStateError(
                f"rank {self.replica.group.rank()}: the run resumes under other conditions: "
                f"{'; '.join(found)}. Its bits would differ from an uninterrupted run.",
                "Resume under the same conditions, or do not call require_conditions().",
            )

    def _sharded(self) -> ShardReplica:
        if not isinstance(self.replica, ShardReplica):
            raise ModuleStateError(
                f"rank {self.replica.group.rank()}: the model is not wrapped with shards=.",
                "Say how many shards a step has: DistributedDataParallel(model, shards=8).",
            )
        return self.replica

    def sync_grads(self) -> None:
        """Average what ``.grad`` holds now, without a backward pass; every rank has to call it.

        With ``shards=`` it ends the step, as a loop over :meth:`shards_of` does.
        """
        self.replica.sync_grads()

    def after_backward(self, callback: Callable[[], None]) -> RemovableHandle:
        """Call ``callback`` after each backward pass that has averaged gradients.

        It runs in the thread of the backward pass, before ``backward()`` returns, and not for
        passes inside :meth:`no_sync`. Call ``remove()`` of the result to remove it.
        """
        return self.replica.reducer.observers.on_average(callback)
