"""A sharded optimizer that steps inside the backward pass.

The optimizer is asked for three things: ``overlaps_with_ddp``; ``overlap_begin(ddp,
shard_buckets)``, once; and ``overlap_bucket(index, parameters, gradients, is_last)``, for every
bucket of every pass. It lets the first passes go by, as torch's does: two, or three with a static
graph. The last bucket's call exchanges parameters, so it comes when all else is over.

Over our DDP the steps are taken at the end of the pass, when the average is final: only then are
weights and late gradients accounted for, a rank that has run out has its gradients too, and it
is certain that no rank's pass has failed. Over torch's DDP a bucket is stepped when its average
arrives (interleaved), or all of them when the last one has set off.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .._exchange import JobLane, one_tensor
from ..errors import HookStateError
from .allreduce import Hook
from .optimizer_overlap import settle


def hook_with_zero_step(hook: Hook, ddp: Any, zero: Any, shard_buckets: bool = False) -> Hook:
    """Return a hook that averages like ``hook`` and steps ``zero`` inside the backward pass.

    Create ``zero`` with ``overlap_with_ddp=True``; you need not call its ``step()``.
    """
    take = _stepper(ddp, zero, shard_buckets, at_once=False)

    def hook_with_zero_fn(
        state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return take(bucket, hook(state, bucket))

    return hook_with_zero_fn


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: Any, zero: Any, shard_buckets: bool = False
) -> Hook:
    """Return a hook that averages like ``hook`` and steps each bucket of ``zero`` once averaged.

    With torch's DDP that is inside the backward pass, with Paceline's at its end. Create ``zero``
    with ``overlap_with_ddp=True``; you need not call its ``step()``.
    """
    take = _stepper(ddp, zero, shard_buckets, at_once=True)

    def hook_with_zero_interleaved_fn(
        state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return take(bucket, hook(state, bucket))

    return hook_with_zero_interleaved_fn


def _stepper(
    ddp: Any, zero: Any, shard_buckets: bool, *, at_once: bool
) -> Callable[[Any, Future[Any]], Future[Tensor]]:
    if not zero.overlaps_with_ddp:
        raise HookStateError(
            "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this "
            "hook properly.",
            "As it is, call its step() after each backward pass instead.",
        )
    zero.overlap_begin(ddp, shard_buckets)
    if hasattr(ddp, "after_backward"):  # ours
        return _AfterPass(ddp, zero).take
    return _InPass(zero, at_once).take


class _AfterPass:
    """Steps when our DDP has handed the averages out."""

    def __init__(self, ddp: Any, zero: Any) -> None:
        self._ddp = weakref.ref(ddp)
        self._zero = zero
        self._buckets: list[Sequence[Tensor]] = []  # of the pass that runs: their parameters
        self._waits = False  # to be told when a pass has left averages

    def take(self, bucket: Any, future: Future[Any]) -> Future[Tensor]:
        if not self._waits:
            self._ddp().after_backward(self._step)  # type: ignore[union-attr]
            self._waits = True
        if bucket.index() == 0:  # a pass that failed may have left some
            self._buckets.clear()
        self._buckets.append(bucket.parameters())
        return future

    def _step(self) -> None:
        last = len(self._buckets) - 1
        for index, members in enumerate(self._buckets):
            params = [param for param in members if param.grad is not None]
            grads = [param.grad for param in params]
            self._zero.overlap_bucket(index, params, grads, index == last)


class _InPass:
    """Steps while torch's DDP still waits for averages."""

    def __init__(self, zero: Any, at_once: bool) -> None:
        self._zero = zero
        self._at_once = at_once
        self._waiting: list[tuple[Any, Future[Any]]] = []  # what is stepped before the last one
        self._lane = JobLane()

    def take(self, bucket: Any, future: Future[Any]) -> Future[Tensor]:
        if not bucket.is_last():
            if self._at_once:
                future = future.then(lambda done: self._step(bucket, done))
            self._waiting.append((bucket, future))
            return future
        waiting, self._waiting = self._waiting, []
        return self._lane.start(lambda: self._end(waiting, bucket, future), bucket.buffer().device)

    def _end(
        self, waiting: list[tuple[Any, Future[Any]]], bucket: Any, future: Future[Any]
    ) -> Tensor:
        for other, arriving in waiting:
            arriving.wait()
            if not self._at_once:
                self._step(other, arriving)
        future.wait()
        return self._step(bucket, future)

    def _step(self, bucket: Any, future: Future[Any]) -> Tensor:
        with torch.no_grad():
            settle(bucket, one_tensor(future.value()))
            index, last = bucket.index(), bucket.is_last()
            self._zero.overlap_bucket(index, bucket.parameters(), bucket.gradients(), last)
        return bucket.buffer()  # type: ignore[no-any-return]
