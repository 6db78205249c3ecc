"""torch's own engines, gloo and NCCL, under our interface, and others that are registered there.

Where an engine lacks a form that others have, it is put together here from those it has: gathers of
unequal sizes from broadcasts, a scaled sum from a scaling and a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store
from torch.distributed import Work as TorchWork
from torch.distributed import distributed_c10d as c10d

from ..._torch.c10d import (
    all_gather_flat,
    devices_of,
    engine_of,
    lend,
    number_calls,
    reduce_scatter_flat,
    set_default_kind,
    set_timeout,
    source_rank,
)
from ...errors import UnexpectedOptionError, UnknownOptionError
from ..engine import TORCH_OPS, Call, Capabilities
from ..work import Together, Watcher, Wrapped
from . import integer_mean
from .gloo.pair import Pair

_GLOO_REDUCES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8}
    | {torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128}
)
_OUR_TAG = 0x70616365  # of messages that stand in for a gather or a scatter
_BITWISE = frozenset({"band", "bor", "bxor"})
_COPIED = 64 * 1024  # bytes; gloo's gather copies more than that twice where broadcasts do not


def open_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device, **options: object
) -> ProcessGroup:
    """torch's gloo group over ``store``."""
    if options:
        raise UnexpectedOptionError("gloo", sorted(options))
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    number_calls(backend)
    group = ProcessGroup(store, rank, size)
    set_default_kind(group, ProcessGroup.BackendType.GLOO)
    devices = {device.type, "cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    for kind in sorted(devices):
        lend(group, torch.device(kind), ProcessGroup.BackendType.GLOO, backend)
    return group


def open_nccl(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device, **options: object
) -> ProcessGroup:
    """torch's NCCL group over ``store``; options are attributes of ``ProcessGroupNCCL.Options``."""
    settings = dist.ProcessGroupNCCL.Options()
    set_timeout(settings, timeout)
    for name, value in options.items():
        if not hasattr(settings, name):
            raise UnknownOptionError("nccl", name)
        setattr(settings, name, value)
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    backend = dist.ProcessGroupNCCL(store, rank, size, settings)
    number_calls(backend)
    backend.eager_connect_single_device(device)
    group = ProcessGroup(store, rank, size)
    set_default_kind(group, ProcessGroup.BackendType.NCCL)
    lend(group, device, ProcessGroup.BackendType.NCCL, backend)
    return group


class TorchEngine:
    """A torch group beneath one of ours."""

    def __init__(self, inner: ProcessGroup, backend: str, device: torch.device) -> None:
        self.inner = inner
        self.watcher = Watcher(f"paceline-{backend}-futures")
        pair = backend == "gloo" and inner.size() == 2
        self._pair = Pair(inner, self.watcher) if pair else None
        # gloo's destructor joins threads that may want the GIL, and only torch's own wrappers let
        # go of it first: they must be the last to hold the engine, and attributes go in order.
        self._last = [engine_of(inner, d) for d in devices_of(inner)]
        self.device = device
        devices = {device.type, "cpu"} if backend == "gloo" else {device.type}
        if backend == "gloo" and torch.cuda.is_available():
            devices.add("cuda")
        self.capabilities = Capabilities(
            backend=backend,
            devices=frozenset(devices),
            in_place_memory=False,
            abortable=backend == "nccl",
            names_dead_ranks=False,
            checks_agreement=False,
            averages=backend == "nccl",
        )

    def lend_to(self, group: ProcessGroup) -> None:
        """Let torch's C++ find NCCL in ``group``, where it asks for it by name.

        gloo is not lent: C++ that holds a group could then be the last to hold the engine.
        """
        if self.capabilities.backend != "nccl":
            return
        for device in devices_of(self.inner):
            backend = engine_of(self.inner, device)
            lend(group, device, ProcessGroup.BackendType.NCCL, backend)
        set_default_kind(group, ProcessGroup.BackendType.NCCL)

    def run(self, call: Call) -> None:
        work = self.start(call)
        if call.kind in ("send", "recv"):  # these cannot be told the timeout beforehand
            work.wait(timedelta(seconds=call.timeout))
        else:
            work.wait()
        if call.kind == "recv" and call.root < 0:
            call.root = source_rank(work)

    def start(self, call: Call) -> TorchWork:
        if call.reduction and self.capabilities.backend in ("gloo", "nccl"):
            if integer_mean.applies(call):
                return self._integer_average(call)
            if self.capabilities.backend == "gloo" and call.outputs[0].dtype is torch.bool:
                call.reduction = {"sum": "max", "product": "min"}.get(  # it would add up bytes
                    call.reduction, call.reduction
                )
        if self._pair is not None and self._pair.takes(call):
            return self._pair.start(call)
        return self._START[call.kind](self, call)

    def _integer_average(self, call: Call) -> TorchWork:
        """gloo divides in floating point only, and NCCL after the sum has wrapped."""
        instead, finish = integer_mean.as_sum(call, self.inner.rank(), self.inner.size())
        work = Wrapped(self._START[call.kind](self, instead), call.outputs, self.watcher)
        return work.then_do(finish)

    def _then(self, work: TorchWork, outputs: Sequence[Tensor]) -> Wrapped:
        """``work`` as one of ours; gloo's reduce-scatters never say that they are completed."""
        return Wrapped(work, outputs, self.watcher)

    def _all_reduce(self, call: Call) -> TorchWork:
        options = c10d.AllreduceOptions()
        options.reduceOp = TORCH_OPS[call.reduction]
        options.timeout = timedelta(seconds=call.timeout)
        return self.inner.allreduce(list(map(_real, call.outputs)), options)

    def _adds(self, call: Call) -> bool:
        """Whether gloo's part could be a sum of ours."""
        tensor = call.outputs[0]
        sums = call.reduction in ("sum", "avg") and self.capabilities.backend == "gloo"
        return sums and tensor.device.type == "cpu" and tensor.dtype.is_floating_point

    def _reduce(self, call: Call) -> TorchWork:
        options = c10d.ReduceOptions()
        options.reduceOp = TORCH_OPS[call.reduction]
        options.rootRank = call.root
        options.timeout = timedelta(seconds=call.timeout)
        return self.inner.reduce(list(map(_real, call.outputs)), options)

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
        call.outputs[rank].copy_(call.inputs[0].view_as(call.outputs[rank]))
        works = [self._broadcast_one(t, root, call) for root, t in enumerate(call.outputs)]
        return Together(works, call.outputs, self.watcher)

    def _all_gather_single(self, call: Call) -> TorchWork:
        given, rows = call.inputs[0], call.outputs[0].view(self.inner.size(), -1)
        # By size alone: whether a rank's input is its row already is not the same on all ranks.
        if self.capabilities.backend == "gloo" and given.nbytes > _COPIED:
            own = rows[self.inner.rank()]
            if own.data_ptr() != given.data_ptr():
                own.copy_(given.view_as(own))
            works = [self._broadcast_one(row, root, call) for root, row in enumerate(rows)]
            return Together(works, call.outputs, self.watcher)
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=call.timeout)
        return all_gather_flat(self.inner, rows.view(-1), given.view(-1), options)

    def _gather(self, call: Call) -> TorchWork:
        if self.capabilities.backend == "gloo":  # its own wants equal sizes
            return self._to_and_fro(call, call.inputs[0], call.outputs, sending=False)
        options = c10d.GatherOptions()
        options.rootRank = call.root
        options.timeout = timedelta(seconds=call.timeout)
        outputs = [list(call.outputs)] if call.outputs else []
        return self.inner.gather(outputs, list(call.inputs), options)

    def _to_and_fro(
        self, call: Call, own: Tensor, parts: Sequence[Tensor], *, sending: bool
    ) -> TorchWork:
        """A gather, or when ``sending`` a scatter, of any sizes, as messages."""
        rank, root = self.inner.rank(), call.root
        inner = self.inner
        if rank != root:
            work = (inner.recv if sending else inner.send)([own], root, _OUR_TAG)
            return Together([work], [own], self.watcher)
        source, target = (parts[rank], own) if sending else (own, parts[rank])
        target.copy_(source.view_as(target))
        move = inner.send if sending else inner.recv
        works = [move([part], r, _OUR_TAG) for r, part in enumerate(parts) if r != rank]
        return Together(works, call.outputs, self.watcher)

    def _scatter(self, call: Call) -> TorchWork:
        if self.capabilities.backend == "gloo":
            return self._to_and_fro(call, call.outputs[0], call.inputs, sending=True)
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
            works.append(self._reduce(one))
        work = Together(works, call.outputs, self.watcher)
        rank = self.inner.rank()
        return work.then_do(lambda: call.outputs[0].copy_(copies[rank].view_as(call.outputs[0])))

    def _reduce_scatter(self, call: Call) -> TorchWork:
        if len({t.shape for t in call.inputs}) > 1:
            return self._each_reduces(call)
        options = c10d.ReduceScatterOptions()
        options.reduceOp = TORCH_OPS[call.reduction]
        options.timeout = timedelta(seconds=call.timeout)
        inputs = [list(map(_real, call.inputs))]
        work = self.inner.reduce_scatter(list(map(_real, call.outputs)), inputs, options)
        return self._then(work, call.outputs)

    def _reduce_scatter_single(self, call: Call) -> TorchWork:
        if self._adds(call):
            return self._send_and_add(call)
        options = c10d.ReduceScatterOptions()
        options.reduceOp = TORCH_OPS[call.reduction]
        options.timeout = timedelta(seconds=call.timeout)
        work = reduce_scatter_flat(
            self.inner, _real(call.outputs[0]), _real(call.inputs[0]), options
        )
        return self._then(work, call.outputs)

    def _send_and_add(self, call: Call) -> TorchWork:
        """Every rank gets its part from each; gloo's own would be an all-reduce of everything."""
        given, kept = call.inputs[0], call.outputs[0]
        parts = torch.empty_like(given)
        options = c10d.AllToAllOptions()
        options.timeout = timedelta(seconds=call.timeout)
        inner = self.inner.alltoall_base(parts.view(-1), given.view(-1), [], [], options)

        def add() -> None:
            torch.sum(parts.view(-1, kept.numel()), 0, out=kept.view(-1))
            if call.reduction == "avg":
                kept.div_(self.inner.size())

        return self._then(inner, call.outputs).then_do(add)

    def _all_to_all(self, call: Call) -> TorchWork:
        options = c10d.AllToAllOptions()
        options.timeout = timedelta(seconds=call.timeout)
        if self.capabilities.backend == "gloo":  # its own wants equal sizes
            return self._flat_all_to_all(call, options)
        return self.inner.alltoall(list(call.outputs), list(call.inputs), options)

    def _flat_all_to_all(self, call: Call, options: c10d.AllToAllOptions) -> TorchWork:
        given = torch.cat([t.reshape(-1) for t in call.inputs])
        sizes = [t.numel() for t in call.outputs]
        taken = given.new_empty(sum(sizes))
        work = self.inner.alltoall_base(
            taken, given, sizes, [t.numel() for t in call.inputs], options
        )

        def unpack() -> None:
            for tensor, part in zip(call.outputs, taken.split(sizes), strict=True):
                tensor.copy_(part.view_as(tensor))

        return self._then(work, call.outputs).then_do(unpack)

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

    _START: ClassVar[dict[str, Callable[[TorchEngine, Call], TorchWork]]] = {
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
        if self.capabilities.backend != "gloo":
            return reduction not in _BITWISE or not dtype.is_floating_point
        if reduction in _BITWISE:
            return dtype in (torch.uint8, torch.int8, torch.int32, torch.int64)
        if dtype.is_complex:
            return dtype in _GLOO_REDUCES and reduction in ("sum", "avg")
        if dtype is torch.bool:
            return reduction != "avg"
        return dtype in _GLOO_REDUCES

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def progress(self) -> None:
        """torch's engines have threads or streams of their own."""

    def abort(self) -> None:
        self.inner.abort()

    def shutdown(self) -> None:
        self.inner.shutdown()
        self.watcher.close()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
