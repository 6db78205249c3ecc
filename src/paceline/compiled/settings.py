"""Settings of a compiled step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from ..errors import ModuleArgumentError


@dataclass(frozen=True)
class Settings:
    """How a step is compiled: the options of :func:`train_step`.

    ``max_norm`` clips gradients to that norm. ``accumulate`` calls make one step of the optimizer.
    ``autocast`` is the dtype of the forward pass. With a ``scaler`` (``torch.amp.GradScaler``) the
    loss is scaled, nothing is updated if a gradient is not finite, and the scale is updated. With
    ``keep_grads``, ``.grad`` holds the averages after a step, before clipping. With ``fullgraph``,
    a step that cannot be traced raises an error; otherwise it runs in eager mode. ``dynamic``,
    ``backend`` and ``options`` are those of ``torch.compile``. ``graph`` captures each step in a
    CUDA graph; None does so on one rank if it is faster. ``compile_timeout`` is how long ranks wait
    while another rank compiles.
    """

    max_norm: float | None = None  # gradients are scaled down to it
    accumulate: int = 1  # so many calls are one step of the optimizer
    autocast: torch.dtype | None = None  # of the forward pass
    scaler: torch.amp.GradScaler | None = None  # with the same scale on all ranks
    keep_grads: bool = False  # .grad holds the averages after a step, as they were before clipping
    fullgraph: bool = False  # raise where a step cannot be traced; else it is done in eager mode
    dynamic: bool | None = None  # as torch.compile takes it
    backend: Any = "inductor"
    options: Mapping[str, Any] = field(default_factory=dict)  # for Inductor
    graph: bool | None = None  # one CUDA graph for each step; None: on one rank, if quicker
    compile_timeout: timedelta = timedelta(minutes=30)  # for ranks that wait while another compiles

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ModuleArgumentError(
                f"train_step: accumulate: expected at least 1, got {self.accumulate}."
            )
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise ModuleArgumentError(
                f"train_step: max_norm: expected a number above 0, got {self.max_norm}."
            )
