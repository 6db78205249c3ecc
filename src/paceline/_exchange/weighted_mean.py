"""Exchange: the weighted mean over ranks of one flat buffer, started now and taken later.

The buffer of an exchange ends in a few elements more than what it carries: how this rank stands in
it (:class:`Standing`). So the sum of the weights comes with the sum of the values, in one
collective, and the mean is ``sum(w_r * x_r) / sum(w_r)``. A rank of weight 0 sends zeros, whatever
it holds, NaN included.

``coded.py`` has the one whose buffers travel encoded. Either way every rank ends with the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from .._torch.streams import StreamMark, devices_holding
from ..groups import Group, ReduceOp

HEAD = 3  # elements of a Standing


@dataclass(frozen=True)
class Standing:
    """How a rank stands in an exchange; added up, how all of them do."""

    weight: float  # 0: it adds nothing
    active: float = 1.0  # 0: it has run out of inputs
    failed: float = 0.0  # 1: it leaves with an error

    def row(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Its three numbers, as a tensor."""
        return torch.tensor(astuple(self), dtype=dtype, device=device)

    def __add__(self, other: Standing) -> Standing:
        return Standing(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


NOBODY = Standing(0.0, 0.0, 0.0)


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> Standing:
        """Block until the mean is in the buffer; how all ranks stood in it, added up.

        Where the sum of weights is 0 there is no mean. May be called again.
        """


class BufferExchange(Protocol):
    """How one buffer is averaged over a group, again and again."""

    group: Group

    def start(self, buffer: Tensor, standing: Standing) -> Pending:
        """Average ``buffer[:-HEAD]`` over the ranks; it belongs to the exchange until the end."""

    def state_dict(self) -> dict[str, Any]:
        """What the next exchange depends on besides the buffer; this rank's own."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class Arrived:
    """An exchange that is complete, or was not needed."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing

    def wait(self) -> Standing:
        """The sum of the standings, which is known already."""
        return self._standing


class WeightedMean:
    """The buffer travels as it is."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def start(self, buffer: Tensor, standing: Standing) -> Pending:
        """One all-reduce."""
        values = buffer[:-HEAD]
        if standing.weight == 0:
            values.zero_()
        elif standing.weight != 1:
            values.mul_(standing.weight)
        buffer[-HEAD:] = standing.row(buffer.dtype, buffer.device)
        return Averaging(self.group.all_reduce(buffer, async_op=True), buffer, divides=True)

    def state_dict(self) -> dict[str, Any]:
        """Empty: nothing is remembered between exchanges."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


class Awaited(Protocol):
    """Something to wait for: torch's Work, or a :class:`Journey`."""

    def wait(self) -> Any: ...


class Averaging:
    """A buffer under way, and the sum of the standings at its end.

    ``divides``: what arrives are sums, to be divided by the sum of the weights.
    """

    def __init__(self, arrival: Awaited, buffer: Tensor, *, divides: bool) -> None:
        self._arrival: Awaited | None = arrival
        self._buffer, self._divides = buffer, divides
        self._standing = NOBODY
        self._marks: Sequence[StreamMark] = ()

    def wait(self) -> Standing:
        """Block until the mean is in the buffer."""
        if self._arrival is not None:
            self._arrival.wait()
            self._standing = Standing(*self._buffer[-HEAD:].tolist())
            if self._divides and self._standing.weight:
                self._buffer[:-HEAD].div_(self._standing.weight)
            self._marks = [StreamMark(device) for device in devices_holding([self._buffer])]
            self._arrival = None
        for mark in self._marks:  # others may have waited on another stream
            mark.join()
        return self._standing


class Largest(WeightedMean):
    """For whole numbers, such as a count of batches: they become their largest over the ranks."""

    def start(self, buffer: Tensor, standing: Standing) -> Pending:
        """One all-reduce; the weight does not matter."""
        buffer[-HEAD:] = 0
        return _Maximal(self.group.all_reduce(buffer, ReduceOp.MAX, async_op=True))


class _Maximal:
    """An all-reduce of maxima under way."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> Standing:
        self._work.wait()
        return Standing(1.0)


def buffer_for(group: Group, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer for ``numel`` values and the standing, in memory that the engine uses directly."""
    if device.type == "cpu" and group.capabilities.in_place_memory:
        return group.allocate(numel + HEAD, dtype)
    return torch.empty(numel + HEAD, dtype=dtype, device=device)
