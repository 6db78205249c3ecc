"""Where the integers of a sum lie: each tensor's in a place of a bucket, and some beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from .._exchange import strides_of
from .._transport import ANY_LEVEL, NO_LEVEL, has_loops
from ..groups import FINISHED, Group, ReduceOp
from .sums import words_for

NONFINITE = -(1 << 30)  # stands for a level, where infinities and NaNs are counted


@dataclass(frozen=True, eq=False)
class Summed:
    """A tensor of which a step makes the mean over its shards."""

    name: str
    like: Tensor  # has the same shape, type, device and order of elements
    rare: bool = False  # most steps have no terms for it, so it travels with none that have

    @cached_property
    def exact(self) -> bool:
        """Whether it is made of whole numbers already."""
        return not self.like.is_floating_point()

    @cached_property
    def numel(self) -> int:
        """How many elements it has."""
        return self.like.numel()

    @cached_property
    def words(self) -> int:
        """Integers for each element."""
        return words_for(self.like.dtype)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """How its elements lie in its sums, and in its mean."""
        return strides_of(self.like)

    @cached_property
    def has_loops(self) -> bool:
        """Whether loops in C add its terms."""
        return has_loops(self.like)

    def is_quick(self, term: Tensor) -> bool:
        """Whether a loop in C may read ``term`` as it lies."""
        return self.has_loops and term.stride() == self.strides and term.dtype is self.like.dtype


@dataclass(eq=False, slots=True)
class Sum:
    """The sum of one tensor, as far as it has come."""

    of: Summed
    place: Tensor  # a row for each integer of an element; a stretch of a bucket
    level: int | None = None  # of what is in the place; None: nothing
    others: dict[int, Tensor] = field(default_factory=dict)  # of other levels
    touched: bool = False  # a shard had a term, were it zero
    promised: bool = False  # the place is for terms of the expected level, if there is one
    expected: int | None = None
    sent: bool = False  # what is in the place is on its way
    address: int = 0  # of the place, where loops in C work there
    _mean: Tensor | None = None

    def __post_init__(self) -> None:
        if self.of.has_loops:
            self.address = self.place.data_ptr()

    @property
    def mean(self) -> Tensor:
        """Where the mean is written: over the integers, in the tensor's own type and shape."""
        if self._mean is None:
            like = self.of.like
            flat = self.place.view(-1).view(like.dtype)[: self.of.numel]
            self._mean = flat.as_strided(like.shape, self.of.strides, flat.storage_offset())
        return self._mean.detach()  # somebody may give it other memory: .grad is everybody's

    def begin(self) -> None:
        """Forget all terms."""
        self.level, self.touched, self.sent = None, False, False
        self.others.clear()

    def takes(self) -> int:
        """The level of terms that are added in the place, for loops in C."""
        if self.sent:
            return NO_LEVEL
        if self.level is None and not self.promised:
            return ANY_LEVEL
        level = self.expected if self.level is None else self.level
        return NO_LEVEL if level is None else level

    def words_of(self, level: int) -> tuple[Tensor, bool]:
        """Where terms of ``level`` are added, and whether nothing is there yet."""
        if not self.sent:
            if self.level is None and (not self.promised or level == self.expected):
                self.level = level
                return self.place, True
            if self.level == level:
                return self.place, False
        fresh = level not in self.others
        if fresh:
            self.others[level] = torch.empty_like(self.place)
        return self.others[level], fresh

    def counts(self) -> Tensor:
        """Where infinities and NaNs are counted."""
        if NONFINITE not in self.others:
            self.others[NONFINITE] = torch.zeros_like(self.place[:1])
        return self.others[NONFINITE]

    def levels(self) -> list[int]:
        """All that something was added to."""
        first = [] if self.level is None else [self.level]
        return [*first, *self.others]

    def levels_left(self) -> list[int]:
        """Those that the ranks have to know of: others than what was promised."""
        return list(self.others) if self.promised else self.levels()

    def send(self) -> None:
        """Mark the place as sent: it belongs to the group now."""
        if self.level is None:
            self.place.zero_()
        self.sent = True

    def merge(self) -> None:
        """Add what came too late for the place to what the ranks have there."""
        self.level = self.expected
        if self.level is not None and self.level in self.others:
            self.place.add_(self.others.pop(self.level))

    def put_on_top(self, top: int | None) -> None:
        """Have the terms of level ``top`` in the place, and no others."""
        if self.level is not None and self.level != top:
            self.others[self.level] = self.place.clone()
        if self.level is None or self.level != top:
            found = None if top is None else self.others.pop(top, None)
            self.place.zero_() if found is None else self.place.copy_(found)
        self.level = top


@dataclass(eq=False, slots=True)
class SumBucket:
    """Places that travel together."""

    memory: Tensor
    row: list[int]  # the tensors whose places are in it
    promised: bool = False
    sent: bool = False
    work: TorchWork = FINISHED
    error: Exception | None = None  # why it could not be sent

    def send(self, group: Group, memory: Tensor, *, quiet: bool) -> None:
        """Start to add it up; should that fail, :meth:`wait` says why."""
        self.sent = True
        try:
            self.work = group.start_all_reduce(memory, ReduceOp.SUM, quiet=quiet)
        except Exception as error:  # not here: it may be in the middle of a backward pass
            self.error = error

    def wait(self) -> None:
        """Block until it holds the sums of all ranks."""
        if self.error is not None:
            raise self.error
        self.work.wait()
        self.sent, self.work = False, FINISHED
