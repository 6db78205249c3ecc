"""Groups that others wrote in Python, as subclasses of torch's ProcessGroup, under our interface.

Such a group has what its author needed, often no more than torch's DistributedDataParallel calls:
``allreduce``, ``broadcast`` and ``allgather``, each with an options object. Whatever else is asked
of it is put together here from those. A method counts as there when Python overrides it, or when an
engine of torch's is registered for the device.

**Reductions.** Not every such group reads which reduction it is asked for: torch's wrapper asks for
sums alone. So do we; an average is divided here, a maximum is gathered and taken here.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ...._torch.c10d import is_served
from ....errors import RendezvousError, UnsupportedError
from ...engine import COMBINE, TORCH_OPS, Call, Capabilities
from ...work import Together, Watcher, Work
from .. import integer_mean
from .work import ForeignWork, as_real, overrides

_O = TypeVar("_O")
_counted: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()  # groups whose ranks are as they say
_BITWISE = frozenset({"band", "bor", "bxor"})
_GATHER_FLAT = ("_allgather_base", "all_gather_single")  # one thing under torch's old and new name
_SCATTER_FLAT = ("_reduce_scatter_base", "reduce_scatter_single")
_EXCHANGE_FLAT = ("alltoall_base", "all_to_all_single")


class ForeignEngine:
    """A group written in Python beneath one of ours."""

    def __init__(self, inner: ProcessGroup, backend: str, device: torch.device) -> None:
        self.inner: Any = inner
        self.device = device
        self.watcher = Watcher(f"paceline-{backend}-futures")
        self._served = is_served(inner, device)
        self.capabilities = Capabilities(backend, frozenset({device.type}))

    def run(self, call: Call) -> None:
        work = self.start(call)
        work.wait(timedelta(seconds=call.timeout) if call.kind in ("send", "recv") else None)
        if call.kind == "recv" and call.root < 0:
            call.root = work.source_rank()

    @torch.no_grad()
    def start(self, call: Call) -> Work:
        if self.inner not in _counted and call.kind not in ("send", "recv"):
            self._count_ranks(call)
        if call.reduction == "avg":
            return self._average(call)
        return self._START[call.kind](self, call)

    def _count_ranks(self, call: Call) -> None:
        """See once that no number is that of two ranks: a wrapper may forget to hand it on.

        A group may also divide what it adds up, or add up nothing; its author will know why.
        """
        size, rank = self.inner.size(), self.inner.rank()
        said = torch.zeros(size, device=self.device)
        if rank < size:
            said[rank] = 1
        if size > 1:
            self._reduced(said, Call("all_reduce", reduction="sum", timeout=call.timeout)).wait()
        if rank >= size or float(said.max()) > 1.5:
            kind = type(self.inner).__name__
            raise RendezvousError(
                f"{kind} has {size} ranks, and by rank number they count {said.tolist()}",
                f"{kind}.rank() must be another one, below {kind}.size(), on every rank.",
                rank,
            )
        _counted.add(self.inner)

    # -- what the group has -------------------------------------------------------------------

    def _has(self, *names: str) -> str:
        """The first of these methods that the group has; empty when it has none."""
        return next(
            (n for n in names if self._served or overrides(self.inner, ProcessGroup, n)), ""
        )

    def _need(self, *names: str) -> Callable[..., Any]:
        """The first of these methods that the group has."""
        if not (name := self._has(*names)):
            kind = type(self.inner).__name__
            raise UnsupportedError(
                self.capabilities.backend,
                f"{names[0]}, which {kind} does not override",
                f"Write {kind}.{names[0]}, or use another group.",
                self.inner.rank(),
            )
        method: Callable[..., Any] = getattr(self.inner, name)
        return method

    def _work(self, work: Any, outputs: Sequence[Tensor], *, reduced: bool = False) -> Work:
        if work is None:
            return Together([], outputs, self.watcher)
        return ForeignWork(work, outputs, self.watcher, self.capabilities.backend, reduced=reduced)

    # -- reductions ---------------------------------------------------------------------------

    def _average(self, call: Call) -> Work:
        """A sum, divided beforehand: it may not fit 16 bits. Integers are divided afterwards."""
        size = self.inner.size()
        if integer_mean.applies(call):
            instead, finish = integer_mean.as_sum(call, self.inner.rank(), size)
            work = Together([self._START[call.kind](self, instead)], call.outputs, self.watcher)
            return work.then_do(finish, *instead.inputs, *instead.outputs)
        call.reduction = "sum"
        if call.kind == "all_reduce":
            call.outputs[0].div_(size)
        else:
            call.inputs = [t / size for t in call.inputs]
        return self._START[call.kind](self, call).using(call.inputs)

    def _all_reduce(self, call: Call) -> Work:
        return self._reduced(call.outputs[0], call)

    def _reduced(self, tensor: Tensor, call: Call) -> Work:
        """The ranks' ``tensor`` in one, in place."""
        if call.reduction != "sum" and self._has("allgather", "broadcast"):
            return self._combined(tensor, call)
        options = self._timed(c10d.AllreduceOptions(), call)
        options.reduceOp = TORCH_OPS[call.reduction]
        work = self._need("allreduce", "allreduce_coalesced")([as_real(tensor)], options)
        return self._work(work, [tensor], reduced=True)

    def _combined(self, tensor: Tensor, call: Call) -> Work:
        """The ranks' ``tensor`` in one: gathered and reduced here, as the group might only add."""
        parts = [torch.empty_like(tensor) for _ in self._ranks()]
        combine = COMBINE[call.reduction]

        def reduce() -> None:
            tensor.copy_(parts[0])
            for part in parts[1:]:
                combine(tensor, part, out=tensor)

        return self._gathered(parts, tensor, call).then_do(reduce, *parts)

    def _reduce(self, call: Call) -> Work:
        total, output = call.inputs[0].clone(), call.outputs[0]  # only the root's may change
        if call.reduction == "sum" and self._has("reduce"):
            options = self._timed(c10d.ReduceOptions(), call)
            options.rootRank = call.root
            work = self._work(self.inner.reduce([as_real(total)], options), [output])
        else:
            work = self._reduced(total, call)
        at_root = self.inner.rank() == call.root
        return work.then_do(lambda: output.copy_(total) if at_root else None, total)

    def _reduce_scatter(self, call: Call) -> Work:
        output, rank = call.outputs[0], self.inner.rank()
        equal = len({t.shape for t in call.inputs}) == 1
        if equal and call.reduction == "sum" and self._has("reduce_scatter"):
            options = self._timed(c10d.ReduceScatterOptions(), call)
            inputs = [list(map(as_real, call.inputs))]
            return self._work(
                self.inner.reduce_scatter([as_real(output)], inputs, options), [output]
            )
        sizes = [t.numel() for t in call.inputs]
        total = torch.cat([t.reshape(-1) for t in call.inputs])
        part = total.split(sizes)[rank]
        work = self._reduced(total, call)
        return work.then_do(lambda: output.copy_(part.view_as(output)), total)

    def _reduce_scatter_single(self, call: Call) -> Work:
        output, given = call.outputs[0], call.inputs[0]
        if call.reduction == "sum" and (name := self._has(*_SCATTER_FLAT)):
            options = self._timed(c10d.ReduceScatterOptions(), call)
            method = getattr(self.inner, name)
            return self._work(method(as_real(output), as_real(given), options), [output])
        total = given.reshape(-1).clone()
        part = total.view(self.inner.size(), -1)[self.inner.rank()]
        work = self._reduced(total, call)
        return work.then_do(lambda: output.copy_(part.view_as(output)), total)

    # -- moving -------------------------------------------------------------------------------

    def _broadcast(self, call: Call) -> Work:
        return self._sent(call.outputs[0], call.root, call)

    def _sent(self, tensor: Tensor, root: int, call: Call) -> Work:
        """The root's values, in ``tensor`` on every rank."""
        if self._has("broadcast") or not self._has("allgather"):
            options = self._timed(c10d.BroadcastOptions(), call)
            options.rootRank = root
            return self._work(self._need("broadcast")([tensor], options), [tensor])
        copies = [torch.empty_like(tensor) for _ in range(self.inner.size())]
        work = self._gathered(copies, tensor, call)
        return work.then_do(lambda: tensor.copy_(copies[root]), *copies)

    def _all_gather(self, call: Call) -> Work:
        return self._gathered(call.outputs, call.inputs[0], call)

    def _gathered(self, outputs: Sequence[Tensor], given: Tensor, call: Call) -> Work:
        """Every rank's ``given``, in ``outputs`` by rank, of any sizes."""
        if self._has("allgather") and len({t.shape for t in outputs}) == 1:
            options = self._timed(c10d.AllgatherOptions(), call)
            given = given.view_as(outputs[0])
            return self._work(self.inner.allgather([list(outputs)], [given], options), outputs)
        own = outputs[self.inner.rank()]
        own.copy_(given.view_as(own))
        works = [self._sent(t, root, call) for root, t in enumerate(outputs) if t.numel()]
        return Together(works, outputs, self.watcher)

    def _all_gather_single(self, call: Call) -> Work:
        output, given = call.outputs[0].view(-1), call.inputs[0].view(-1)
        if name := self._has(*_GATHER_FLAT):
            options = self._timed(c10d.AllgatherOptions(), call)
            return self._work(getattr(self.inner, name)(output, given, options), call.outputs)
        return self._gathered(output.view(self.inner.size(), -1).unbind(), given, call)

    def _gather(self, call: Call) -> Work:
        if self._has("gather"):
            options = self._timed(c10d.GatherOptions(), call)
            options.rootRank = call.root
            outputs = [list(call.outputs)] if call.outputs else []
            return self._work(self.inner.gather(outputs, list(call.inputs), options), call.outputs)
        given, here = call.inputs[0], self.inner.rank() == call.root
        give = [given if r == call.root else given.new_empty(0) for r in self._ranks()]
        return self._exchange(give, dict(enumerate(call.outputs)) if here else {}, call)

    def _scatter(self, call: Call) -> Work:
        if self._has("scatter"):
            options = self._timed(c10d.ScatterOptions(), call)
            options.rootRank = call.root
            inputs = [list(call.inputs)] if call.inputs else []
            return self._work(self.inner.scatter(list(call.outputs), inputs, options), call.outputs)
        output = call.outputs[0]
        give = list(call.inputs) or [output.new_empty(0) for _ in self._ranks()]
        return self._exchange(give, {call.root: output}, call)

    def _all_to_all(self, call: Call) -> Work:
        if self._has("alltoall"):
            options = self._timed(c10d.AllToAllOptions(), call)
            return self._work(
                self.inner.alltoall(list(call.outputs), list(call.inputs), options), call.outputs
            )
        return self._exchange(call.inputs, dict(enumerate(call.outputs)), call)

    def _all_to_all_single(self, call: Call) -> Work:
        output, given, size = call.outputs[0], call.inputs[0], self.inner.size()
        give, take = list(call.input_splits), list(call.output_splits)
        if name := self._has(*_EXCHANGE_FLAT):
            options = self._timed(c10d.AllToAllOptions(), call)
            method = getattr(self.inner, name)
            return self._work(method(output, given, take, give, options), [output])
        given_parts, taken_parts = (
            t.view(-1).split(
                [n * math.prod(t.shape[1:]) for n in splits or [len(t) // size] * size]
            )
            for t, splits in ((given, give), (output, take))
        )
        return self._exchange(given_parts, dict(enumerate(taken_parts)), call)

    def _exchange(self, give: Sequence[Tensor], take: Mapping[int, Tensor], call: Call) -> Work:
        """What each rank has for each: all of it is gathered, and each keeps what is for it."""
        size, rank = self.inner.size(), self.inner.rank()
        own = torch.tensor([t.numel() for t in give], device=give[0].device)
        table = own.new_empty(size, size)
        self._gathered(table.unbind(), own, call).wait()
        rows = [[int(n) for n in row] for row in table.tolist()]
        everything = [give[0].new_empty(sum(row)) for row in rows]
        given = torch.cat([t.reshape(-1) for t in give])
        work = self._gathered(everything, given, call)

        def keep() -> None:
            for source, tensor in take.items():
                part = everything[source].split(rows[source])[rank]
                tensor.copy_(part.view_as(tensor))

        return work.then_do(keep, given, *everything)

    def _ranks(self) -> range:
        return range(self.inner.size())

    def _send(self, call: Call) -> Work:
        work = self._need("send")(list(call.inputs), call.root, call.tag)
        return self._message(work, call.inputs)

    def _recv(self, call: Call) -> Work:
        outputs = list(call.outputs)
        if call.root < 0:
            return self._message(self._need("recv_anysource")(outputs, call.tag), outputs)
        return self._message(self._need("recv")(outputs, call.root, call.tag), outputs)

    def _message(self, work: Any, tensors: Sequence[Tensor]) -> Work:
        message = self._work(work, tensors)
        message.is_message = True
        return message

    def _barrier(self, call: Call) -> Work:
        if self._has("barrier"):
            options = self._timed(c10d.BarrierOptions(), call)
            if self.device.type == "cuda" and self.device.index is not None:
                options.device_ids = [self.device.index]
            return self._work(self.inner.barrier(options), ())
        call.reduction = "sum"
        return self._reduced(torch.zeros(1, device=self.device), call)

    def _timed(self, options: _O, call: Call) -> _O:
        options.timeout = timedelta(seconds=call.timeout)  # type: ignore[attr-defined]
        return options

    _START: ClassVar[dict[str, Callable[[ForeignEngine, Call], Work]]] = {
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "all_gather_single": _all_gather_single,
        "gather": _gather,
        "scatter": _scatter,
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter_single": _reduce_scatter_single,
        "all_to_all": _all_to_all,
        "all_to_all_single": _all_to_all_single,
        "send": _send,
        "recv": _recv,
        "barrier": _barrier,
    }

    # -- the rest -----------------------------------------------------------------------------

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        if reduction == "avg" and dtype in (torch.bool, torch.uint64):
            return False
        return reduction not in _BITWISE or not dtype.is_floating_point

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def progress(self) -> None:
        """Nothing to do: the group works on its own."""

    def abort(self) -> None:
        self.inner.abort()

    def shutdown(self) -> None:
        self.inner.shutdown()
        self.watcher.close()
