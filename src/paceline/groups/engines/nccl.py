"""NCCL under our interface, by whichever of its engines torch would take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store, distributed_c10d
from torch.distributed import Work as TorchWork

from ..._torch import nccl as torchs
from ..._torch.c10d import (
    all_gather_flat,
    devices_of,
    engine_of,
    lend,
    number_calls,
    set_default_kind,
    set_timeout,
)
from ...errors import UnknownOptionError
from ..engine import Call, Capabilities
from . import integer_mean
from .marks import DeviceMarks
from .torch_engine import BITWISE, TorchEngine

c10d: Any = distributed_c10d  # its options are in no stub
_UNKNOWN = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})  # to NCCL


def missing(name: str = "nccl") -> str:
    """Why NCCL, or the engine of that ``name``, cannot be used here; empty when it can."""
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL"
    if not torchs.is_known(name):
        return f"torch {torch.__version__} has no {name}; nccl is the engine that it has"
    return "" if torch.cuda.is_available() else "torch sees no GPU"


def open_nccl(
    name: str,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    device: torch.device,
    **options: object,
) -> ProcessGroup:
    """torch's NCCL group over ``store``, by the engine that ``name`` means to torch.

    Options are attributes of ``ProcessGroupNCCL.Options``, for all of its engines.
    """
    settings = dist.ProcessGroupNCCL.Options()
    set_timeout(settings, timeout)
    for option, value in options.items():
        if not hasattr(settings, option):
            raise UnknownOptionError(name, option)
        setattr(settings, option, value)
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    group = ProcessGroup(store, rank, size)
    backend = torchs.open_engine(name, group, device, store, rank, size, settings)
    number_calls(backend)
    backend.eager_connect_single_device(device)
    set_default_kind(group, ProcessGroup.BackendType.NCCL)
    lend(group, device, ProcessGroup.BackendType.NCCL, backend)
    return group


class NcclEngine(TorchEngine):
    """torch's NCCL group beneath one of ours."""

    def __init__(self, inner: ProcessGroup, device: torch.device) -> None:
        super().__init__(inner, "nccl", device)
        self.capabilities = Capabilities(
            backend="nccl",
            devices=frozenset({device.type}),
            abortable=True,
            averages=True,
            capturable=True,
            may_crash_on_mismatch=False,
            found_by_torch=True,
        )
        self.marks = DeviceMarks(device)

    def lend_to(self, group: ProcessGroup) -> None:
        """Let torch's C++ find NCCL in ``group``, where it asks for it by name."""
        for device in devices_of(self.inner):
            lend(group, device, ProcessGroup.BackendType.NCCL, engine_of(self.inner, device))
        set_default_kind(group, ProcessGroup.BackendType.NCCL)

    def run(self, call: Call) -> None:
        self.marks.comes()
        super().run(call)
        self.marks.came()

    def start(self, call: Call) -> TorchWork:
        if call.reduction and integer_mean.applies(call):
            return self._integer_average(call)
        return super().start(call)

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        if dtype.is_complex:
            return reduction in ("sum", "avg")
        return (
            reduction not in BITWISE
            and dtype not in _UNKNOWN
            and (dtype, reduction) != (torch.bool, "avg")
        )

    # torch puts lists of tensors into flat memory of its own, and lets go of it once waited for.
    # If another stream waits than that of the call, it may be written to while NCCL still uses it.

    def _all_gather(self, call: Call) -> TorchWork:
        given, parts = call.inputs[0], call.outputs
        if len({part.shape for part in parts}) > 1:
            return self._each_broadcasts(call)
        taken = given.new_empty(len(parts) * given.numel())
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=call.timeout)
        work = all_gather_flat(self.inner, taken, given.view(-1), options)
        return self._then_unpack(work, parts, taken)

    def _reduce_scatter(self, call: Call) -> TorchWork:
        if len({t.shape for t in call.inputs}) > 1:
            return self._each_reduces(call)
        given = torch.cat([t.reshape(-1) for t in call.inputs])
        work = self._reduce_scatter_single(dataclasses.replace(call, inputs=[given]))
        return self._then(work, call.outputs).using([given])

    def _then_unpack(self, work: TorchWork, parts: Sequence[Tensor], taken: Tensor) -> TorchWork:
        def unpack() -> None:
            for part, found in zip(parts, taken.split([p.numel() for p in parts]), strict=True):
                part.copy_(found.view_as(part))

        return self._then(work, parts).then_do(unpack, taken)

    # torch wants the parts of a gather or scatter to be of one size, which the root alone can see.
    # So all ranks make an exchange of it, in which only the root takes, or gives.

    def _gather(self, call: Call) -> TorchWork:
        own, parts = call.inputs[0], call.outputs
        sizes = [part.numel() for part in parts] or [0] * self.inner.size()
        taken = own.new_empty(sum(sizes))
        work = self._exchange(taken, own.reshape(-1), sizes, self._to_root(own, call), call)
        return self._then_unpack(work, parts, taken) if parts else work

    def _scatter(self, call: Call) -> TorchWork:
        own, parts = call.outputs[0], call.inputs
        sizes = [part.numel() for part in parts] or [0] * self.inner.size()
        given = torch.cat([part.reshape(-1) for part in parts]) if parts else own.new_empty(0)
        room = own.new_empty(own.numel())
        work = self._exchange(room, given, self._to_root(own, call), sizes, call)
        work = self._then(work, [own])
        return work.then_do(lambda: own.copy_(room.view_as(own)), given, room)

    def _to_root(self, own: Tensor, call: Call) -> list[int]:
        """How much goes between this rank and each, if all of it is the root's affair."""
        return [own.numel() if rank == call.root else 0 for rank in range(self.inner.size())]

    def _exchange(
        self, taken: Tensor, given: Tensor, sizes: list[int], given_sizes: list[int], call: Call
    ) -> TorchWork:
        options = c10d.AllToAllOptions()
        options.timeout = timedelta(seconds=call.timeout)
        return self.inner.alltoall_base(taken, given, sizes, given_sizes, options)

    _START: ClassVar[dict[str, Callable[[Any, Call], TorchWork]]] = {
        **TorchEngine._START,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "gather": _gather,
        "scatter": _scatter,
    }
