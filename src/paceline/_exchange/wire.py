"""What goes over the wire: messages of bytes, and how many there were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import Work as TorchWork

from ..errors import CodecStateError
from ..groups import FINISHED, Group

_ALIGNED = 16  # bytes: parts begin where numbers of any type may


@dataclass(frozen=True)
class Field:
    """A tensor's place in a message."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Frame:
    """Where named tensors lie in a message of bytes."""

    fields: tuple[Field, ...]
    nbytes: int

    @classmethod
    def of(cls, parts: Mapping[str, Tensor]) -> Frame:
        """For tensors of these names, shapes and types."""
        fields, at = [], 0
        for name, part in parts.items():
            fields.append(Field(name, part.dtype, part.shape, at))
            at += -(-fields[-1].nbytes // _ALIGNED) * _ALIGNED
        return cls(tuple(fields), at)

    def room(self, count: int, device: torch.device) -> Tensor:
        """Memory for so many messages, one in each row."""
        return torch.zeros(count, self.nbytes, dtype=torch.uint8, device=device)

    def write(self, message: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Put ``parts`` where :meth:`read` finds them."""
        for field in self.fields:
            part = parts[field.name]
            if (part.shape, part.dtype) != (field.shape, field.dtype):
                raise CodecStateError(
                    f"Part {field.name} of a message is {part.dtype} of shape {list(part.shape)}; "
                    f"ranks read it as {field.dtype} of shape {list(field.shape)}, as at first.",
                    "Let the codec's parts depend on the shape of what it encodes alone.",
                )
            _place(message, field).copy_(part)

    def read(self, message: Tensor) -> dict[str, Tensor]:
        """The parts, as views of the message."""
        return {field.name: _place(message, field) for field in self.fields}


def _place(message: Tensor, field: Field) -> Tensor:
    stretch = message[field.start : field.start + field.nbytes]
    return stretch.view(field.dtype).view(field.shape)


@dataclass(eq=False)
class Meter:
    """Bytes this rank has sent, and what a plain all-reduce would have."""

    sent: float = 0.0
    plain: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent."""
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
