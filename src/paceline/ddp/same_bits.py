"""What the bits of a shard depend on besides its data: algorithms that are the same each time.

Inside a shard torch's deterministic algorithms are on, and an operation that has none raises an
error that names it. cuDNN does not choose its kernels by timing them.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from ..errors import ModuleArgumentError

_RAISE = 2  # of torch's modes: an operation without a deterministic form is an error
memory: Any = torch.utils.deterministic


class _Deterministic:
    """torch's settings, which belong to the process; ranks that are threads have them together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0, False, False

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._enter()
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._leave()

    def _enter(self) -> None:
        cudnn = torch.backends.cudnn
        self._before = (
            torch.get_deterministic_debug_mode(),
            memory.fill_uninitialized_memory,
            cudnn.benchmark,
        )
        if self._before[0] != _RAISE:
            # not use_deterministic_algorithms, which takes seconds to load the compiler
            torch.set_deterministic_debug_mode(_RAISE)
            memory.fill_uninitialized_memory = False  # who asked for neither need not pay for it
        cudnn.benchmark = False

    def _leave(self) -> None:
        mode, memory.fill_uninitialized_memory, timed = self._before
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = timed


deterministic = _Deterministic().on


def check_device(device: torch.device) -> None:
    """Refuse a GPU on which matrix products may differ from run to run."""
    told = os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
    if device.type == "cuda" and torch.version.cuda is not None and not told:
        raise ModuleArgumentError(
            "shards= on a GPU: cuBLAS may sum in a different order each time, unless you "
            "configure it. Every rank raises this.",
            "Set the environment variable CUBLAS_WORKSPACE_CONFIG to :4096:8 for all ranks.",
        )


def conditions(shards: int, device: torch.device) -> dict[str, str]:
    """What the bits of a run depend on besides its code, data and seed, by name."""
    found = {
        "shards": str(shards),
        "number of threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "float32 products": torch.get_float32_matmul_precision(),
        "device": device.type,
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    return found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is different, in words."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name}: {before.get(name, '?')} then, {now.get(name, '?')} now" for name in names]
