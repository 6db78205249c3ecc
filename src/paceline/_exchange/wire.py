"""What goes over the wire: messages of bytes, and how many there were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import Work as TorchWork

from ..groups import FINISHED, Group
from .codecs.codec import Parts, RowCodec

_ALIGNED = 16  # bytes: parts begin where numbers of any type may


@dataclass(frozen=True)
class Field:
    """A part's place in a message."""

    name: str
    dtype: torch.dtype
    columns: int
    start: int
    nbytes: int


class Frame:
    """Parts of so many rows as one message of bytes, and ``extra`` bytes behind them."""

    def __init__(self, codec: RowCodec, rows: int, width: int, extra: int = 0) -> None:
        self.fields: list[Field] = []
        self.rows, at = rows, 0
        for name, (dtype, columns) in codec.columns(width).items():
            nbytes = rows * columns * dtype.itemsize
            self.fields.append(Field(name, dtype, columns, at, nbytes))
            at += -(-nbytes // _ALIGNED) * _ALIGNED
        self.extra = slice(at, at + extra)
        self.nbytes = at + -(-extra // _ALIGNED) * _ALIGNED

    def write(self, message: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Put ``parts`` where :meth:`read` finds them."""
        for field in self.fields:
            self._place(message, field).copy_(parts[field.name])

    def read(self, message: Tensor) -> Parts:
        """The parts, as views of the message."""
        return {field.name: self._place(message, field) for field in self.fields}

    def _place(self, message: Tensor, field: Field) -> Tensor:
        stretch = message[field.start : field.start + field.nbytes]
        return stretch.view(field.dtype).view(self.rows, field.columns)


@dataclass(eq=False)
class Meter:
    """Bytes this rank has sent, and what a plain all-reduce would have."""

    sent: float = 0.0
    plain: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times less was sent."""
        return self.plain / self.sent if self.sent else 1.0


class MeteredGroup:
    """A group, with what is sent over it counted. Calls are begun, or with ``now`` done."""

    def __init__(self, source: ProcessGroup, meter: Meter, device: torch.device) -> None:
        self.source, self.meter = source, meter
        self.group = Group.wrap(source, device)
        self.rank, self.ranks = self.group.rank(), self.group.size()

    @property
    def current(self) -> bool:
        """Whether the group has the members it had."""
        return (self.rank, self.ranks) == (self.group.rank(), self.group.size())

    def gather(self, output: Tensor, message: Tensor, *, now: bool) -> TorchWork:
        """Every rank's message, one after the other."""
        if self.ranks == 1 or not message.numel():
            output.copy_(message)
            return FINISHED
        self.meter.sent += message.nbytes * (self.ranks - 1)
        return self.group.all_gather_single(output, message, async_op=not now)

    def exchange(self, output: Tensor, messages: Tensor, *, now: bool) -> TorchWork:
        """An equal part of ``messages`` to each rank."""
        self.meter.sent += messages.nbytes * (self.ranks - 1) / self.ranks
        return self.group.all_to_all_single(output, messages, async_op=not now)

    def add_up(self, tensor: Tensor, *, now: bool) -> TorchWork:
        """The sum over ranks, in place."""
        if self.ranks == 1 or not tensor.numel():
            return FINISHED
        self.meter.sent += self.plain_bytes(tensor)
        return self.group.all_reduce(tensor, async_op=not now)

    def plain_bytes(self, tensor: Tensor) -> float:
        """What a rank sends in an all-reduce of ``tensor``."""
        return tensor.nbytes * 2 * (self.ranks - 1) / self.ranks
