"""Which engine of ours goes around a group of torch's, or of somebody else's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from ..._torch.nccl import NAMES as NCCL_NAMES
from ..engine import Engine
from .foreign.engine import ForeignEngine
from .gloo.engine import GlooEngine
from .nccl import NcclEngine
from .torch_engine import TorchEngine

_KNOWN: dict[str, Callable[[ProcessGroup, torch.device], Engine]] = {
    "gloo": GlooEngine,
    **dict.fromkeys(NCCL_NAMES, NcclEngine),
}


def engine_around(inner: ProcessGroup, backend: str, device: torch.device) -> Engine:
    """An engine that makes its calls on ``inner``; ``backend`` is what that one says it is."""
    if type(inner) is not ProcessGroup:  # a subclass: somebody wrote it in Python
        return ForeignEngine(inner, backend, device)
    if backend in _KNOWN:
        return _KNOWN[backend](inner, device)
    return TorchEngine(inner, backend, device)
