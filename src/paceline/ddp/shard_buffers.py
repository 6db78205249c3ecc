"""Buffers in a step of shards: every shard finds them as they were when the step began.

What a shard does to them is undone when it ends and counts as a term of the step, as its gradients
do: when the step ends, each buffer changes by the weighted mean of what the shards would have
changed. So running statistics are those of the whole step. Whole numbers, such as the count of
batches that BatchNorm keeps, change by the mean too, rounded: one step is one batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .._torch.autograd import keeping_versions
from ..errors import ModuleStateError
from .buffers import Buffers


class ShardBuffers:
    """The buffers of one wrapper's module."""

    def __init__(self, buffers: Buffers, rank: int) -> None:
        self._buffers, self._rank = buffers, rank
        self.tensors = buffers.named()
        self._before: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        """Every shard from now on finds them as they are now."""
        self.tensors = self._require_same()
        self._before = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def take_changes(self) -> dict[str, Tensor]:
        """What has changed since the step began, which is undone."""
        now = self._require_same()
        found = {name: self._change(name, now[name]) for name in self._changed(now)}
        self.undo()
        return found

    def _changed(self, now: Mapping[str, Tensor]) -> list[str]:
        """The names of those that have changed; waits for each device once."""
        flags: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in now.items():
            flags.setdefault(tensor.device, {})[name] = (tensor != self._before[name]).any()
        return [
            name
            for row in flags.values()
            for name, changed in zip(row, torch.stack(list(row.values())).tolist(), strict=True)
            if changed
        ]

    def _change(self, name: str, tensor: Tensor) -> Tensor:
        exact = torch.float64 if tensor.is_floating_point() else torch.int64
        return tensor.to(exact) - self._before[name].to(exact)

    def undo(self) -> None:
        """Make them what they were when the step began."""
        self._put(self._before)

    def change(self, name: str, mean: Tensor) -> None:
        """Let the shards' mean change count."""
        tensor, before = self.tensors[name], self._before[name]
        exact = torch.float64 if tensor.is_floating_point() else torch.int64
        self._put({name: (before.to(exact) + mean.to(exact)).to(tensor.dtype)})

    def _put(self, values: dict[str, Tensor]) -> None:
        now = self._buffers.named()
        tensors = [now[name] for name in values if name in now]
        with torch.no_grad(), keeping_versions(tuple(tensors)):
            for tensor, value in zip(tensors, values.values(), strict=True):
                tensor.copy_(value)

    def _require_same(self) -> dict[str, Tensor]:
        now = self._buffers.named()
        for name in {**self.tensors, **now}:
            old, new = self.tensors.get(name), now.get(name)
            if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ModuleStateError(
                    f"rank {self._rank}: the buffer {name} has come, gone or changed its shape "
                    "since the model was wrapped with shards=, so it cannot be averaged. The other "
                    "ranks get this error too.",
                    "Register buffers before the model is wrapped, and keep their shapes.",
                )
        return now
