"""GradientStreams: on which of a device's streams the gradients of a model come.

Autograd brings each gradient on the stream on which its parameter was used, and lets the caller's
stream wait for all of them at the end. A bucket that leaves before that must wait by itself: its
last gradient comes on one stream, and others may still be computed on another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .._torch.streams import used_here
from .tensors import local


class GradientStreams:
    """Those of one model. It costs nothing where there are no streams, and little where one is."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        devices = {param.device for param in params}
        device = devices.pop() if len(devices) == 1 else None
        self._device = device if device is not None and device.type == "cuda" else None
        self._now: set[torch.cuda.Stream] = set()  # in this pass

    def pass_begins(self) -> None:
        """No gradient has come."""
        self._now = set()

    def note(self) -> None:
        """A gradient comes on the current stream."""
        if self._device is not None:
            self._now.add(torch.cuda.current_stream(self._device))

    @property
    def are_several(self) -> bool:
        """Whether gradients came on several streams: then those of each parameter must be known."""
        return len(self._now) > 1

    def meet(self, grads: Iterable[Tensor | None]) -> None:
        """Let the current stream wait for the others, and note that it uses ``grads``."""
        if self._device is None:
            return
        here = torch.cuda.current_stream(self._device)
        others = [stream for stream in self._now if stream != here]
        for stream in others:
            here.wait_stream(stream)
        if others:
            used_here(local(grad) for grad in grads if grad is not None)
