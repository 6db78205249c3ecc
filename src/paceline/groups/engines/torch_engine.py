"""Any engine of torch's under our interface; ``gloo/engine.py`` and ``nccl.py`` know two of them.

Where an engine lacks a form that others have, it is put together here from those it has: gathers of
unequal sizes from broadcasts, a scaled sum from a scaling and a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import Work as TorchWork
from torch.distributed import distributed_c10d as c10d

from ..._torch.c10d import (
    all_gather_flat,
    devices_of,
    engine_of,
    reduce_scatter_flat,
    source_rank,
)
from ..engine import TORCH_OPS, Call, Capabilities
from ..work import Together, Watcher, Wrapped
from . import integer_mean
from .gloo.pair import Pair

BITWISE = frozenset({"band", "bor", "bxor"})


class TorchEngine:
    """A torch group beneath one of ours."""

    def __init__(self, inner: ProcessGroup, backend: str, device: torch.device) -> None:
        self.inner = inner
        self.watcher = Watcher(f"paceline-{backend}-futures")
        self._pair = self._pair_of(inner)  # here, since it holds the group too
        # gloo's destructor joins threads that may want the GIL, and only torch's own wrappers let
        # go of it first: they must be the last to hold the engine, and attributes go in order.
        self._last = [engine_of(inner, d) for d in devices_of(inner)]
        self.device = device
        self._last_options = "", 0.0, c10d.AllreduceOptions()  # of an all-reduce
        self.capabilities = Capabilities(backend, frozenset({device.type}))

    def _pair_of(self, inner: ProcessGroup) -> Pair | None:
        """What two ranks do without the engine's own collectives; gloo has it."""
        return None

    def run(self, call: Call) -> None:
        work = self.start(call)
        try:
            if call.kind in ("send", "recv"):  # these cannot be told the timeout beforehand
                work.wait(timedelta(seconds=call.timeout))
            else:
                work.wait()
            if call.kind == "recv" and call.root < 0:
                call.root = source_rank(work)
        finally:
            del work  # it has the error, whose traceback has this frame, and with it the engine

    def start(self, call: Call) -> TorchWork:
        return self._START[call.kind](self, call)

    def _integer_average(self, call: Call) -> TorchWork:
        """gloo divides in floating point only, and NCCL after the sum has wrapped."""
        instead, finish = integer_mean.as_sum(call, self.inner.rank(), self.inner.size())
        work = Wrapped(self._START[call.kind](self, instead), call.outputs, self.watcher)
        return work.then_do(finish, *instead.inputs, *instead.outputs)

    def _then(self, work: TorchWork, outputs: Sequence[Tensor]) -> Wrapped:
        """``work`` as one of ours."""
        return Wrapped(work, outputs, self.watcher)

    def _all_reduce(self, call: Call) -> TorchWork:
        reduction, timeout, options = self._last_options
        if (reduction, timeout) != (call.reduction, call.timeout):  # mostly they are the same
            options = c10d.AllreduceOptions()
            options.reduceOp = TORCH_OPS[call.reduction]
            options.timeout = timedelta(seconds=call.timeout)
            self._last_options = call.reduction, call.timeout, options
        return self.inner.allreduce(list(map(real, call.outputs)), options)

    def _reduce(self, call: Call) -> TorchWork:
        options = c10d.ReduceOptions()
        options.reduceOp = TORCH_OPS[call.reduction]
        options.rootRank = call.root
        options.timeout = timedelta(seconds=call.timeout)
        return self.inner.reduce(list(map(real, call.outputs)), options)

    def _broadcast(self, call: Call) -> TorchWork:
        return self._broadcast_one(call.outputs[0], call.root, call)

    def _broadcast_one(self, tensor: Tensor, root: int, call: Call) -> TorchWork:
        options = c10d.BroadcastOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=call.timeout)
        return self.inner.broadcast([tensor], options)

    def _all_gather(self, call: Call) -> TorchWork:
        if len({t.shape for t in call.outputs}) > 1:
            return self._each_broadcasts(call)
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=call.timeout)
        return self.inner.allgather([list(call.outputs)], list(call.inputs), options)

    def _each_broadcasts(self, call: Call) -> TorchWork:
        """Tensors of unequal sizes: every rank sends its own to all."""
        rank = self.inner.rank()
        with torch.no_grad():
            call.outputs[rank].copy_(call.inputs[0].view_as(call.outputs[rank]))
        works = [self._broadcast_one(t, root, call) for root, t in enumerate(call.outputs)]
        return Together(works, call.outputs, self.watcher)

    def _all_gather_single(self, call: Call) -> TorchWork:
        given, rows = call.inputs[0], call.outputs[0].view(self.inner.size(), -1)
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=call.timeout)
        return all_gather_flat(self.inner, rows.view(-1), given.view(-1), options)

    def _gather(self, call: Call) -> TorchWork:
        options = c10d.GatherOptions()
        options.rootRank = call.root
        options.timeout = timedelta(seconds=call.timeout)
        outputs = [list(call.outputs)] if call.outputs else []
        return self.inner.gather(outputs, list(call.inputs), options)

    def _scatter(self, call: Call) -> TorchWork:
        options = c10d.ScatterOptions()
        options.rootRank = call.root
        options.timeout = timedelta(seconds=call.timeout)
        inputs = [list(call.inputs)] if call.inputs else []
        return self.inner.scatter(list(call.outputs), inputs, options)

    def _each_reduces(self, call: Call) -> TorchWork:
        """Parts of unequal sizes: every rank is the root for its own."""
        copies = [t.clone() for t in call.inputs]
        works = []
        for root, copy in enumerate(copies):
            one = Call("reduce", (copy,), (copy,), call.reduction, root, timeout=call.timeout)
            works.append(TorchEngine._reduce(self, one))  # nobody else has the copies
        work = Together(works, call.outputs, self.watcher)
        kept, own = call.outputs[0], copies[self.inner.rank()]
        return work.then_do(lambda: kept.copy_(own.view_as(kept)), *copies)

    def _reduce_scatter(self, call: Call) -> TorchWork:
        if len({t.shape for t in call.inputs}) > 1:
            return self._each_reduces(call)
        options = c10d.ReduceScatterOptions()
        options.reduceOp = TORCH_OPS[call.reduction]
        options.timeout = timedelta(seconds=call.timeout)
        inputs = [list(map(real, call.inputs))]
        return self.inner.reduce_scatter(list(map(real, call.outputs)), inputs, options)

    def _reduce_scatter_single(self, call: Call) -> TorchWork:
        options = c10d.ReduceScatterOptions()
        options.reduceOp = TORCH_OPS[call.reduction]
        options.timeout = timedelta(seconds=call.timeout)
        return reduce_scatter_flat(self.inner, real(call.outputs[0]), real(call.inputs[0]), options)

    def _all_to_all(self, call: Call) -> TorchWork:
        options = c10d.AllToAllOptions()
        options.timeout = timedelta(seconds=call.timeout)
        return self.inner.alltoall(list(call.outputs), list(call.inputs), options)

    def _all_to_all_single(self, call: Call) -> TorchWork:
        options = c10d.AllToAllOptions()
        options.timeout = timedelta(seconds=call.timeout)
        return self.inner.alltoall_base(
            call.outputs[0],
            call.inputs[0],
            list(call.output_splits),
            list(call.input_splits),
            options,
        )

    def _send(self, call: Call) -> TorchWork:
        return self.inner.send(list(call.inputs), call.root, call.tag)

    def _recv(self, call: Call) -> TorchWork:
        if call.root < 0:
            return self.inner.recv_anysource(list(call.outputs), call.tag)
        return self.inner.recv(list(call.outputs), call.root, call.tag)

    def _barrier(self, call: Call) -> TorchWork:
        options = c10d.BarrierOptions()
        options.timeout = timedelta(seconds=call.timeout)
        if self.device.type == "cuda" and self.device.index is not None:
            options.device_ids = [self.device.index]
        return self.inner.barrier(options)

    _START: ClassVar[dict[str, Callable[[Any, Call], TorchWork]]] = {
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

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        if dtype.is_complex:  # as pairs of real numbers, which are added, not multiplied
            return reduction in ("sum", "avg")
        return reduction not in BITWISE or not dtype.is_floating_point

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def progress(self) -> None:
        """torch's engines have threads or streams of their own."""

    def abort(self) -> None:
        self.inner.abort()

    def shutdown(self) -> None:
        self.inner.shutdown()
        self.watcher.close()


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as one of real numbers, on the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
