"""FlatBuffer: tensors that are exchanged together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .._torch import foreach
from ..policies import MIB
from .flat import local_part
from .weighted_mean import HEAD, NOBODY, Arrived, BufferExchange, Pending, Standing, buffer_for

CAP_BYTES = 25 * MIB  # of one buffer, unless a single tensor is larger

_WIDE = (torch.float32, torch.float64)


def local_values(tensor: Tensor) -> Tensor:
    """The values that this rank holds of a parameter, as real numbers outside of autograd.

    Complex numbers are pairs; of a DTensor it is this rank's part.
    """
    held = local_part(tensor.detach())
    return torch.view_as_real(held) if held.is_complex() else held


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to send such numbers in: float32 for 16-bit floats, so that no sum overflows."""
    if not dtype.is_floating_point:
        return torch.int64
    return dtype if dtype in _WIDE else torch.float32


def group_for_buffers(tensors: Iterable[Tensor], cap_bytes: int = CAP_BYTES) -> list[list[Tensor]]:
    """Cut a list of tensors into lists that can share a buffer, in order.

    One buffer holds one type on one device, and is closed by the tensor that makes it reach the
    cap. Every rank gets the same answer for the same shapes.
    """
    packed: list[list[Tensor]] = []
    open_ones: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        held = local_values(tensor)
        kind = held.device, wire_dtype(held.dtype)
        members, size = open_ones.pop(kind, ([], 0))
        if not members:
            packed.append(members)
        members.append(tensor)
        size += held.numel() * kind[1].itemsize
        if size < cap_bytes:
            open_ones[kind] = members, size
    return packed


def cut_evenly(sizes: Sequence[int], parts: int) -> list[range]:
    """Cut neighbours into ``parts`` runs of about the same total size, none of them empty."""
    ends = list(accumulate(sizes))
    bounds = [0]
    for part in range(1, parts):
        goal = ends[-1] * part / parts
        nearest = min(range(len(ends)), key=lambda i: abs(ends[i] - goal)) + 1
        # Each run before has at least one, and each one after needs one.
        bounds.append(min(max(nearest, bounds[-1] + 1), len(sizes) - (parts - part)))
    return [range(a, b) for a, b in zip(bounds, [*bounds[1:], len(sizes)], strict=True)]


class FlatBuffer:
    """Tensors of one kind and device, and what is exchanged of them: here, their values."""

    def __init__(self, tensors: Sequence[Tensor], exchange: BufferExchange) -> None:
        self.tensors = tuple(tensors)
        self.exchange = exchange
        held = self.held()
        sizes = [t.numel() for t in held]
        first = held[0]
        self.buffer = buffer_for(exchange.group, sum(sizes), wire_dtype(first.dtype), first.device)
        self.values = self.buffer[:-HEAD]
        parts = self.values.split(sizes)
        self.views = [part.view(t.shape) for part, t in zip(parts, held, strict=True)]
        self._pending: Pending = Arrived(NOBODY)

    def held(self) -> list[Tensor]:
        """What the tensors hold now; not kept, since a script may give them other memory."""
        return [local_values(t) for t in self.tensors]

    def fill(self) -> None:
        """Write into ``views`` what is to be averaged."""
        foreach.copy_(self.views, self.held())

    def start(self, standing: Standing) -> None:
        """Begin an exchange, in which this rank stands so."""
        self.fill()
        self._pending = self.exchange.start(self.buffer, standing)

    def wait(self) -> Standing:
        """Block until the means are in ``views``; how all ranks stood, added up."""
        return self._pending.wait()

    def take(self) -> None:
        """Copy ``views`` to the tensors."""
        foreach.copy_(self.held(), self.views)

    def finish(self) -> None:
        """Wait for the means and take them."""
        if self.wait().weight:
            self.take()

    def broadcast(self) -> None:
        """Give every rank the values of rank 0."""
        foreach.copy_(self.views, self.held())
        self.exchange.group.broadcast(self.buffer, 0)
        self.take()

    def arrive(self, mean: Tensor | None) -> None:
        """Go on as after an exchange with this outcome."""
        if mean is not None:
            self.values.copy_(mean)
        self._pending = Arrived(NOBODY if mean is None else Standing(1.0))
