"""NCCL under our interface, by whichever of its engines torch would take."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed import Work as TorchWork

from ..._torch import nccl as torchs
from ..._torch.c10d import (
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
from .torch_engine import TorchEngine


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

    def lend_to(self, group: ProcessGroup) -> None:
        """Let torch's C++ find NCCL in ``group``, where it asks for it by name."""
        for device in devices_of(self.inner):
            lend(group, device, ProcessGroup.BackendType.NCCL, engine_of(self.inner, device))
        set_default_kind(group, ProcessGroup.BackendType.NCCL)

    def start(self, call: Call) -> TorchWork:
        if call.reduction and integer_mean.applies(call):
            return self._integer_average(call)
        return super().start(call)
