"""Where in a device's streams the results of a work are.

NCCL's own works make whichever stream waits for them wait, as often as they are asked. What we do
behind them (results copied to where they were asked for, a sum divided) is in the stream of whoever
waited first; others have to wait for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor


def devices_holding(
    tensors: Iterable[Tensor], device: torch.device | None = None
) -> Collection[torch.device]:
    """The devices with streams that have ``tensors``, and ``device`` if it is one."""
    found = {tensor.device for tensor in tensors if tensor.is_cuda}
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found.add(torch.device("cuda", index))
    return found


def used_here(tensors: Iterable[Tensor]) -> None:
    """The current streams use ``tensors``: their memory is handed out again only after that."""
    for tensor in tensors:
        if tensor.is_cuda and tensor.layout is torch.strided:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class StreamMark:
    """A point in the current stream of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._is_captured = torch.cuda.is_current_stream_capturing()  # it is reached at each replay
        self._event = torch.cuda.Event()
        self._event.record(self._stream)

    def join(self) -> None:
        """Let the current stream wait for it, if it is not one of a capture that is over."""
        stream = torch.cuda.current_stream(self._stream.device)
        over = self._is_captured and not torch.cuda.is_current_stream_capturing()
        if stream != self._stream and not over:
            stream.wait_event(self._event)

    def is_reached(self) -> bool:
        """Whether the device is there."""
        return self._is_captured or self._event.query()
