"""Buckets of which each rank keeps one stretch: half the bytes of an average for all.

An optimizer whose state is spread over the ranks (ZeRO) updates, on each rank, one part of the
parameters; only that part of the gradients is needed there. A :class:`ScatteredBucket` is therefore
reduced and scattered. The means are in :attr:`Stretch.grad`, and ``.grad`` of parameters is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ..groups import Group, ReduceOp
from .bucket import Bucket, Phase

if TYPE_CHECKING:
    from .layout import Layout


@dataclass(eq=False, slots=True)
class Stretch:
    """This rank's part of one bucket."""

    params: tuple[nn.Parameter, ...]  # they lie one after another, each in its own memory order
    numel: int  # of the whole bucket, filled up to a multiple of the number of ranks
    start: int  # this rank's stretch of it
    stop: int
    grad: Tensor | None = None  # the mean over ranks, since it was last cleared
    touched: set[int] = field(default_factory=set)  # places of parameters that it has means for
    zeros: set[int] = field(default_factory=set)  # places whose gradients were cleared in place
    _stepped: set[int] = field(default_factory=set)  # places that had one when it was last used

    @property
    def present(self) -> set[int]:
        """Places of parameters that have a gradient, if only zeros."""
        return self.touched | self.zeros

    def gradient(self) -> Tensor | None:
        """The mean over ranks; zeros where gradients were cleared in place and none has come."""
        if self.grad is not None or not self.zeros:
            return self.grad
        return self.params[0].new_zeros(self.stop - self.start)

    def accept(self, mean: Tensor) -> None:
        """A pass brought ``mean``, in memory that the next pass will use."""
        if self.grad is None:
            self.grad = mean
        else:
            self.grad.add_(mean)

    def clear(self, *, in_place: bool = False) -> None:
        """Forget the gradients. ``in_place``: those that there were are zero from now on."""
        self.use()
        self.zeros = self.zeros | self._stepped if in_place else set()
        self._stepped = set()

    def use(self) -> None:
        """An optimizer has stepped with them: they are not to be added to."""
        self.grad = None
        self._stepped |= self.touched
        self.touched.clear()

    def rescue(self, memory: Tensor) -> None:
        """Keep what was not cleared: a pass is about to use ``memory``."""
        if self.grad is not None and self.grad.data_ptr() == memory.data_ptr():
            self.grad = self.grad.clone()


@dataclass(eq=False, slots=True)
class ScatteredBucket(Bucket):
    """A bucket that is reduced and scattered."""

    stretch: Stretch | None = None

    @classmethod
    def allocate(
        cls,
        index: int,
        numbers: Sequence[int],
        params: Sequence[nn.Parameter],
        group: Group,
        *,
        dtype: torch.dtype | None = None,
        lends: bool = True,
        extra: int = 0,
        lazy: bool = False,
    ) -> Self:
        payload = sum(p.numel() for p in params)
        padding = -payload % group.size()
        bucket = super(ScatteredBucket, cls).allocate(
            index, numbers, params, group, dtype=dtype, lends=False, extra=padding, lazy=lazy
        )
        each, rank = (payload + padding) // group.size(), group.rank()
        bucket.buffer[payload:].zero_()  # of a lazy one, when there is memory
        bucket.stretch = Stretch(bucket.params, payload + padding, rank * each, (rank + 1) * each)
        return bucket

    @property
    def own(self) -> Stretch:
        """This rank's part."""
        assert self.stretch is not None
        return self.stretch

    def claim(self) -> bool:
        fresh = super(ScatteredBucket, self).claim()
        if fresh:
            self.buffer[self.size :].zero_()
        return fresh

    @property
    def means(self) -> Tensor:
        return self.buffer[self.own.start : self.own.stop]

    def take(self, slots: Sequence[int], scale: float, *, plain: bool = False) -> None:
        if not self.taken:
            self.own.rescue(self.means)
        super(ScatteredBucket, self).take(slots, scale, plain=plain)
        self.kept.clear()

    def take_whole(self, scale: float) -> bool:
        self.own.rescue(self.means)
        whole = super(ScatteredBucket, self).take_whole(scale)
        self.kept.clear()
        return whole

    def launch(self, group: Group, *, average: bool, quiet: bool) -> None:
        self._require(Phase.FILLING)
        op = ReduceOp.AVG if average else ReduceOp.SUM
        self.work = group.start_reduce_scatter(self.means, self.buffer, op, quiet=quiet)
        self.phase = Phase.IN_FLIGHT

    def conclude(self) -> None:
        if self.own.touched:
            lasts = self.lazy is None or self.own.grad is not None
            self.own.accept(self.means if lasts else self.means.clone())

    def give_back_all(self) -> None:
        """Only note it: the means are in the stretch."""
        self.own.touched.update(range(len(self.params)))

    def give_back(self, slot: int) -> None:
        """Only note it: the mean is in the stretch."""
        self.own.touched.add(slot)

    def add(self, slot: int, total: Tensor) -> None:
        own, start = self.own, sum(view.numel() for view in self.views[:slot])
        own.touched.add(slot)
        low, high = max(own.start, start), min(own.stop, start + total.numel())
        if low < high:
            flat = total.new_empty(total.numel())
            flat.as_strided(self.views[slot].shape, self.views[slot].stride()).copy_(total)
            self.means[low - own.start : high - own.start].add_(flat[low - start : high - start])


class ScatteredGradients:
    """This rank's part of the averaged gradients of a model; :meth:`clear` it after each step."""

    def __init__(self, layout: Layout, group: Group) -> None:
        self._layout = layout
        self.group = group

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """One for each bucket, in the order in which they are sent."""
        buckets = self._layout.buckets
        return tuple(bucket.own for bucket in buckets if isinstance(bucket, ScatteredBucket))

    def clear(self, *, in_place: bool = False) -> None:
        """Forget the gradients, as ``zero_grad`` does, or leave zeros as it does ``in_place``."""
        for stretch in self.stretches:
            stretch.clear(in_place=in_place)

    def use(self) -> None:
        """An optimizer has stepped with them: they are not to be added to."""
        for stretch in self.stretches:
            stretch.use()
