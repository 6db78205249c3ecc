"""gloo under our interface: what it lacks or does slowly is put together from what it does well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store
from torch.distributed import Work as TorchWork
from torch.distributed import distributed_c10d as c10d

from ...._torch.c10d import lend, number_calls, set_default_kind
from ....errors import UnexpectedOptionError
from ...engine import Call, Capabilities
from ...work import Timed, Together
from .. import integer_mean
from ..torch_engine import BITWISE, TorchEngine
from .links import Links
from .pair import Pair

_REDUCES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8}
    | {torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128}
)
_MESSAGES = frozenset({"send", "recv", "gather", "scatter"})  # as messages; see _to_and_fro
_OUR_TAG = 0x70616365  # of messages that stand in for a gather or a scatter
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


class GlooEngine(TorchEngine):
    """torch's gloo group beneath one of ours."""

    def __init__(
        self, inner: ProcessGroup, device: torch.device, links: Links | None = None
    ) -> None:
        super().__init__(inner, "gloo", device)
        self._links = links
        devices = {device.type, "cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
        # Not lent to torch's C++: whoever holds a group there could be the last to hold the engine.
        self.capabilities = Capabilities(
            "gloo",
            frozenset(devices),
            abortable=links is not None,
            name_in_torch="paceline_gloo",
        )

    def abort(self) -> None:
        """Cut the connections that it opened, if they are known: gloo itself cannot be aborted."""
        if self._links is not None:
            self._links.cut()

    def shutdown(self) -> None:
        if self._links is not None and self.watcher.waits_for_messages():
            self._links.cut()  # they do not come any more, and a thread holds gloo for them
        super().shutdown()
        if self._links is not None:
            self._links.close()

    def _pair_of(self, inner: ProcessGroup) -> Pair | None:
        return Pair(inner, self.watcher) if inner.size() == 2 else None

    @torch.no_grad()
    def start(self, call: Call) -> TorchWork:
        if call.reduction:
            if integer_mean.applies(call):
                return self._integer_average(call)
            if call.outputs[0].dtype is torch.bool:  # it would add up bytes
                instead = {"sum": "max", "product": "min"}
                call.reduction = instead.get(call.reduction, call.reduction)
        if self._pair is not None and self._pair.takes(call):
            return self._pair.start(call)
        work = super().start(call)
        if call.kind in _MESSAGES and call.timeout:  # torch's cannot be told a timeout
            timed = Timed(work, call.outputs or call.inputs, self.watcher, call.timeout)
            timed.is_message, timed.receives = call.kind in ("send", "recv"), call.kind == "recv"
            return timed
        return work

    def _reduce(self, call: Call) -> TorchWork:
        """Into the root's tensor alone: gloo uses those of other ranks as room."""
        if self.inner.rank() == call.root:
            return super()._reduce(call)
        room = [t.clone() for t in call.outputs]
        instead = Call("reduce", room, room, call.reduction, call.root, timeout=call.timeout)
        return self._then(super()._reduce(instead), call.outputs).using(room)

    def _all_gather_single(self, call: Call) -> TorchWork:
        # By size alone: whether a rank's input is its row already is not the same on all ranks.
        if call.inputs[0].nbytes <= _COPIED:
            return super()._all_gather_single(call)
        given, rows = call.inputs[0], call.outputs[0].view(self.inner.size(), -1)
        own = rows[self.inner.rank()]
        if own.data_ptr() != given.data_ptr():
            own.copy_(given.view_as(own))
        works = [self._broadcast_one(row, root, call) for root, row in enumerate(rows)]
        return Together(works, call.outputs, self.watcher)

    def _gather(self, call: Call) -> TorchWork:
        return self._to_and_fro(call, call.inputs[0], call.outputs, sending=False)

    def _scatter(self, call: Call) -> TorchWork:
        return self._to_and_fro(call, call.outputs[0], call.inputs, sending=True)

    def _to_and_fro(
        self, call: Call, own: Tensor, parts: Sequence[Tensor], *, sending: bool
    ) -> TorchWork:
        """A gather, or when ``sending`` a scatter, as messages: gloo's own wants equal sizes."""
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

    def _reduce_scatter(self, call: Call) -> TorchWork:
        return self._silent(super()._reduce_scatter(call), call)

    def _reduce_scatter_single(self, call: Call) -> TorchWork:
        if _adds(call):
            return self._send_and_add(call)
        return self._silent(super()._reduce_scatter_single(call), call)

    def _silent(self, inner: TorchWork, call: Call) -> TorchWork:
        """gloo's reduce-scatters never say that they are done."""
        work = self._then(inner, call.outputs)
        work.tells = False
        return work

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

        return self._then(inner, call.outputs).then_do(add, parts)

    def _all_to_all(self, call: Call) -> TorchWork:
        """As one flat exchange: gloo's own wants equal sizes."""
        options = c10d.AllToAllOptions()
        options.timeout = timedelta(seconds=call.timeout)
        given = torch.cat([t.reshape(-1) for t in call.inputs])
        sizes = [t.numel() for t in call.outputs]
        taken = given.new_empty(sum(sizes))
        work = self.inner.alltoall_base(
            taken, given, sizes, [t.numel() for t in call.inputs], options
        )

        def unpack() -> None:
            for tensor, part in zip(call.outputs, taken.split(sizes), strict=True):
                tensor.copy_(part.view_as(tensor))

        return self._then(work, call.outputs).then_do(unpack, given, taken)

    _START: ClassVar[dict[str, Callable[[Any, Call], TorchWork]]] = {
        **TorchEngine._START,
        "reduce": _reduce,
        "all_gather_single": _all_gather_single,
        "gather": _gather,
        "scatter": _scatter,
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter_single": _reduce_scatter_single,
        "all_to_all": _all_to_all,
    }

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        if reduction in BITWISE:
            return dtype in (torch.uint8, torch.int8, torch.int32, torch.int64)
        if dtype.is_complex:
            return dtype in _REDUCES and reduction in ("sum", "avg")
        if dtype is torch.bool:
            return reduction != "avg"
        return dtype in _REDUCES


def _adds(call: Call) -> bool:
    """Whether gloo's part could be a sum of ours."""
    tensor = call.outputs[0]
    on_cpu = tensor.device.type == "cpu"
    return call.reduction in ("sum", "avg") and on_cpu and tensor.dtype.is_floating_point
