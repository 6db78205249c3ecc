"""Bucket: gradients that travel together, and their life within one backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Work as TorchWork
from torch.futures import Future
from typing_extensions import Self

from .._torch import foreach, sweep
from .._torch.c10d import FutureBase
from ..errors import BucketPhaseError, CommHookError
from ..groups import FINISHED, Group, ReduceOp
from .grad_bucket import GradBucket
from .memory import NOTHING, BucketMemory, LazyMemory, cut
from .tensors import add_to_grad, local, settled


class Phase(Enum):
    """Life of a bucket within one backward pass, in order."""

    FILLING = auto()  # waits for gradients
    IN_FLIGHT = auto()  # the group, or a communication hook, owns the buffer
    REDUCED = auto()  # it has been waited for: the averages may be read


Hook = Callable[[GradBucket], "Future[Tensor]"]


@dataclass(frozen=True, eq=False, slots=True)
class Starter:
    """How a bucket was sent last time, to send it the same way again."""

    buffer: Tensor
    way: tuple[Group, bool, bool]
    start: Callable[[], TorchWork]


@dataclass(eq=False, slots=True)
class Bucket:
    """Gradients that travel together, in one flat buffer.

    ``views[i]`` is the stretch of ``buffer`` that belongs to ``params[i]``, and ``grads[i]`` the
    same as what its ``.grad`` may be. While the bucket is filled, gradients are *taken*: copied in,
    and ``.grad`` is None from then on, so that whatever arrives later is seen and spoils nothing.
    A gradient that was accumulated in its stretch is there already.

    What is done for every parameter in every pass is done for all of a bucket in one sweep, with
    few steps for each (``_take_plain``, ``give_back_all``); all else goes the longer way.
    """

    index: int
    numbers: tuple[int, ...]  # of the parameters, in the reducer's count
    params: tuple[nn.Parameter, ...]
    buffer: Tensor  # the gradients, and behind them the header if it rides here
    views: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    lends: bool  # .grad becomes a stretch of the buffer
    size: int = 0  # elements of the gradients, without what rides behind them
    phase: Phase = Phase.FILLING
    taken: set[int] = field(default_factory=set)  # slots
    absent: set[int] = field(default_factory=set)  # slots that had nothing to give
    kept: dict[int, Tensor] = field(default_factory=dict)  # slot → the object .grad was
    work: TorchWork = FINISHED
    future: Future[Tensor] | None = None
    _starter: Starter | None = None
    lazy: LazyMemory | None = None  # where there is memory only while a pass needs it
    places: tuple[int, ...] = ()  # where the views lie, if .grad is one of them

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
        """A bucket for ``params`` in memory that ``group`` likes, and ``extra`` elements more.

        A ``lazy`` one has its memory from :meth:`claim` to :meth:`reset`.
        """
        mine = [local(p) for p in params]
        dtype, device = dtype or mine[0].dtype, mine[0].device
        size = sum(p.numel() for p in mine)
        lends = lends and dtype == mine[0].dtype
        make = functools.partial(group.allocate, size + extra, dtype, device)
        memory = NOTHING if lazy else cut(make(), params)
        bucket = cls(index, tuple(numbers), tuple(params), *memory, lends, size)
        bucket.lazy = LazyMemory(bucket.params, make) if lazy else None
        bucket.places = tuple(map(Tensor.data_ptr, bucket.views)) if lends else ()
        return bucket

    def claim(self) -> bool:
        """Have memory, if it has none; whether there is other memory now."""
        if self.lazy is None:
            return self._put_right()
        if self.views:
            return False
        self.buffer, self.views, self.grads = self.lazy.get()
        return True

    def _put_right(self) -> bool:
        """Cut the views anew, if a program has put other memory under ``.grad``, which was one."""
        if self.taken or not self.places or tuple(map(Tensor.data_ptr, self.views)) == self.places:
            return False
        _, self.views, self.grads = cut(self.buffer, self.params)
        return True

    def let_go(self) -> None:
        """Keep no memory from pass to pass, if it is lazy; gradients stay where they lie."""
        if self.lazy is not None and self.views:
            self.lazy.let_go(BucketMemory(self.buffer, self.views, self.grads))
            self.buffer, self.views, self.grads = NOTHING
            self._starter = None

    def lent(self) -> Sequence[Tensor | None]:
        """By slot, what ``.grad`` is where it lies in this bucket; lazy ones keep nothing else."""
        return self.grads if self.lazy is None or self.views else self.lazy.lent()

    @property
    def payload(self) -> Tensor:
        """The gradients, without the header behind them."""
        return self.buffer[: self.size]

    @property
    def means(self) -> Tensor:
        """Where the averages are once it is reduced."""
        return self.payload

    def take(self, slots: Sequence[int], scale: float, *, plain: bool = False) -> None:
        """Move these gradients in, times ``scale``; a missing one counts as zeros.

        ``plain`` says that nothing was held before the pass and that gradients have no graph.
        """
        if plain and self.take_whole(scale):
            return
        self._require(Phase.FILLING)
        self.claim()
        grads = [self.params[slot].grad for slot in slots]
        self.taken.update(slots)
        self._take_each(slots, grads, scale)

    def take_whole(self, scale: float) -> bool:
        """Move all gradients in at once; False, and nothing is moved, unless all have come.

        Of a pass before which nothing was held, and whose gradients have no graph.
        """
        self._require(Phase.FILLING)
        if self.taken or not (self._sweep_in(scale) or self._take_plain(scale)):
            return False
        self.taken.update(range(len(self.params)))
        return True

    def _sweep_in(self, scale: float) -> bool:
        """Copy the gradients of a whole bucket in C++; False if that cannot be done."""
        if not self.places or self.lazy is not None:
            return False
        if not sweep.take(self.params, self.views, self.places, same_dtype=scale != 1):
            return False
        if scale != 1:
            self.payload.mul_(scale)
        return True

    def _take_plain(self, scale: float) -> bool:
        """Copy the gradients of a whole bucket at once; False if that cannot be done."""
        grads: list[Any] = [param.grad for param in self.params]
        if set(map(type, grads)) != _TENSOR:
            return False
        self.claim()
        if scale != 1 and grads[0].dtype != self.buffer.dtype:
            return False  # they are to be scaled first: a weighted sum may not fit 16 bits
        try:
            foreach.copy_(self.views, grads)
        except RuntimeError:
            if any(grad.is_sparse for grad in grads):
                return False
            raise
        if scale != 1:
            self.payload.mul_(scale)
        for param in self.params:
            param.grad = None
        if not self.lends:
            self.kept.update(enumerate(grads))
        return True

    def _take_each(
        self, slots: Sequence[int], grads: Sequence[Tensor | None], scale: float
    ) -> None:
        views, fresh = [], []
        for slot, grad in zip(slots, grads, strict=True):
            param, view = self.params[slot], self.views[slot]
            if grad is None:
                self.absent.add(slot)
                view.zero_()
                continue
            param.grad = None
            if grad is self.grads[slot]:
                if scale != 1:
                    view.mul_(scale)
                continue
            if not self.lends or grad.requires_grad:
                self.kept[slot] = grad
            if type(grad) is not Tensor or grad.requires_grad:
                grad = local(settled(grad.detach(), param))
            if grad.is_sparse:
                view.zero_().add_(grad, alpha=scale)
            else:
                views.append(view)
                fresh.append(grad)
        _copy(views, fresh, scale)

    def missing(self) -> Sequence[int]:
        """Slots that were not taken yet."""
        slots = range(len(self.params))
        if len(self.taken) == len(slots):
            return ()
        return [slot for slot in slots if slot not in self.taken] if self.taken else slots

    def launch(self, group: Group, *, average: bool, quiet: bool) -> None:
        """Start reducing over ``group``; returns at once."""
        self._require(Phase.FILLING)
        way, starter = (group, average, quiet), self._starter
        if starter is None or starter.buffer is not self.buffer or starter.way != way:
            op = ReduceOp.AVG if average else ReduceOp.SUM
            start = group.repeated_all_reduce(self.buffer, op, quiet=quiet)
            starter = self._starter = Starter(self.buffer, way, start)
        self.work = starter.start()
        self.phase = Phase.IN_FLIGHT

    def launch_hook(self, hook: Hook, *, last: bool, weight: float = 1.0) -> None:
        """Let ``hook`` reduce it; ``weight`` is what gradients were multiplied by."""
        self._require(Phase.FILLING)
        self.phase = Phase.IN_FLIGHT
        future = hook(GradBucket(self, last=last, weight=weight))
        if not isinstance(future, FutureBase):
            raise CommHookError(type(future).__name__)
        self.future = future

    def wait(self) -> None:
        """Block until the averages are in ``views``."""
        self._require(Phase.IN_FLIGHT)
        self.work.wait()
        if self.future is not None:
            self._store(self.future.wait())
        self.work, self.future = FINISHED, None
        self.phase = Phase.REDUCED

    def abandon(self) -> None:
        """Wait until nothing writes to this memory any more, whether it succeeded or failed."""
        try:
            self.work.wait()
        except Exception:
            pass
        except BaseException as error:  # an interrupt that it has ended with is known already
            if self.work.exception() is not error:
                raise
        with contextlib.suppress(Exception):
            if self.future is not None:
                self.future.wait()

    def _store(self, result: Any) -> None:
        result = result[0] if isinstance(result, list | tuple) else result
        payload = self.payload
        if not isinstance(result, Tensor) or result.numel() != payload.numel():
            raise CommHookError(
                type(result).__name__ if not isinstance(result, Tensor) else str(result.shape),
                expected=f"one tensor of {payload.numel()} elements",
            )
        if result.data_ptr() != payload.data_ptr():
            payload.copy_(result.view(-1))

    def give_back_all(self) -> None:
        """Set ``.grad`` of every parameter to its average."""
        grads: Sequence[Tensor] = self.grads
        if len(self.kept) == len(grads) and set(map(type, self.kept.values())) == _TENSOR:
            grads = [self.kept.pop(slot) for slot in range(len(grads))]
            foreach.copy_([grad.detach() for grad in grads], self.views)
        if not self.kept and (self.lends or grads is not self.grads):
            sweep.give(self.params, tuple(grads))
        else:
            for slot in range(len(self.params)):
                self.give_back(slot)

    def give_back(self, slot: int) -> None:
        """Set ``.grad`` to the average; for a gradient that is to stay its own, copy it there."""
        param = self.params[slot]
        kept = self.kept.pop(slot, None)
        if kept is not None:
            local(kept.detach()).copy_(self.views[slot])
            param.grad = kept
        elif self.lends:
            param.grad = self.grads[slot]
        else:
            grad = torch.empty_like(param, requires_grad=False)
            local(grad).copy_(self.views[slot])
            param.grad = grad

    def holding(self) -> list[int]:
        """Slots whose parameters have a gradient in ``.grad``."""
        return sweep.holding(self.params)

    def strange(self) -> list[int]:
        """Parameters whose ``.grad`` is no stretch of the buffer, though it should be."""
        rows = zip(self.numbers, self.params, self.lent(), strict=self.lends)
        found = (n for n, p, own in rows if p.grad is not None and p.grad is not own)
        return list(found) if self.lends else []

    def withhold(self, slot: int) -> None:
        """Leave ``.grad`` as it was before the pass, because no rank had a gradient."""
        self.kept.pop(slot, None)

    def add(self, slot: int, total: Tensor) -> None:
        """Add an average that came late, a plain tensor in the parameter's shape."""
        add_to_grad(self.params[slot], total, sparse=False)

    def conclude(self) -> None:
        """All averages of the pass are in place."""

    def reset(self) -> None:
        """Be ready for the next pass."""
        self.phase = Phase.FILLING
        self.taken.clear()
        self.absent.clear()
        self.kept.clear()
        self.work, self.future = FINISHED, None
        self.let_go()

    def _require(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise BucketPhaseError(self.index, needed=phase.name, found=self.phase.name)


class SparseBucket(Bucket):
    """One parameter whose gradients are sparse; their entries travel, as many as there are."""

    __slots__ = ()

    @classmethod
    def hold(cls, index: int, number: int, param: nn.Parameter) -> SparseBucket:
        """A bucket for ``param``."""
        return cls(index, (number,), (param,), _no_entries(param), (), (), lends=False)

    @property
    def payload(self) -> Tensor:
        return self.buffer

    def take_whole(self, scale: float) -> bool:
        return False  # there is no memory to move it to

    def take(self, slots: Sequence[int], scale: float, *, plain: bool = False) -> None:
        self._require(Phase.FILLING)
        if not slots:
            return
        param = self.params[0]
        grad, param.grad = param.grad, None
        self.taken.add(0)
        if grad is None:
            self.absent.add(0)
            self.buffer = _no_entries(param)
            return
        entries = grad.detach() if grad.is_sparse else grad.detach().to_sparse(1)
        self.buffer = entries * scale if scale != 1 else entries

    def launch(self, group: Group, *, average: bool, quiet: bool) -> None:
        self._require(Phase.FILLING)
        self.buffer = self.buffer.coalesce()
        self.work = group.all_reduce(self.buffer, ReduceOp.AVG if average else ReduceOp.SUM)
        self.phase = Phase.IN_FLIGHT

    def _store(self, result: Any) -> None:
        self.buffer = result[0] if isinstance(result, list | tuple) else result

    def give_back(self, slot: int) -> None:
        self.params[0].grad = self.buffer
        self.buffer = _no_entries(self.params[0])

    def withhold(self, slot: int) -> None:
        self.buffer = _no_entries(self.params[0])

    def add(self, slot: int, total: Tensor) -> None:
        add_to_grad(self.params[slot], total, sparse=True)


_TENSOR = {Tensor}  # the types of gradients that are plain memory


def _copy(views: list[Tensor], fresh: list[Tensor], scale: float) -> None:
    if scale != 1:
        for view, grad in zip(views, fresh, strict=True):
            if view.dtype == grad.dtype:
                torch.mul(grad, scale, out=view)
            else:
                view.copy_(grad * scale)  # scaled first: a weighted sum may not fit 16 bits
    elif len(views) == 1:
        views[0].copy_(fresh[0])
    elif views:
        foreach.copy_(views, fresh)


def _no_entries(param: Tensor) -> Tensor:
    indices = torch.empty(1, 0, dtype=torch.int64, device=param.device)
    values = torch.empty(0, *param.shape[1:], dtype=param.dtype, device=param.device)
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(indices, values, param.shape, is_coalesced=True)
