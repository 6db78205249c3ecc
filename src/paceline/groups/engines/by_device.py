"""One group for tensors of several devices: each call goes to the engine of its tensors.

This is what ``torch.distributed.init_process_group("paceline")`` opens where there are GPUs. The
engine of a device is opened by the first call that needs it; all ranks make the same calls in the
same order, so all of them open it then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from ..engine import Call, Engine

Open = Callable[[torch.device], Engine]


class DeviceEngine:
    """An engine for CPU tensors, and others by the kind of device."""

    def __init__(self, cpu: Engine, others: Mapping[str, Open]) -> None:
        self._cpu = cpu
        self._others = others
        self._opened: dict[str, Engine] = {"cpu": cpu}
        devices = cpu.capabilities.devices | set(others)
        self.capabilities = replace(cpu.capabilities, devices=devices)

    def _engine(self, call: Call) -> Engine:
        tensors = call.inputs or call.outputs
        if not tensors:
            return self._cpu
        device = tensors[0].device
        if device.type not in self._opened:
            self._opened[device.type] = self._others[device.type](device)
        return self._opened[device.type]

    def run(self, call: Call) -> None:
        self._engine(call).run(call)

    def start(self, call: Call) -> TorchWork:
        return self._engine(call).start(call)

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        return self._cpu.reduces(dtype, reduction)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._cpu.allocate(numel, dtype)

    def progress(self) -> None:
        self._cpu.progress()

    def abort(self) -> None:
        for engine in self._opened.values():
            engine.abort()

    def shutdown(self) -> None:
        for engine in self._opened.values():
            engine.shutdown()
