"""Coded: an exchange that makes its buffer smaller on the way.

Every rank encodes its buffer, gathers what the others encoded, and adds it all up in the order of
ranks. So all ranks end with the same bits, and numbers are rounded once, whatever their number.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Work
from torch.nn import functional as F

from ..errors import AveragingTypeError
from ..groups import Group
from .weighted_mean import HEAD, NOBODY, Pending, Standing

_ALIGNED = 8  # bytes; a stretch of a message is read as numbers where it lies
_DRAWS = 1 << 32  # more than a codec makes


class FlatCodec(Protocol):
    """What makes a flat tensor smaller; those of :mod:`paceline.hooks` do."""

    def encode(self, tensor: Tensor) -> Any:
        """The tensor in fewer bytes: a dataclass with ``parts``, which are tensors by name.

        Their sizes depend on the tensor's size only.
        """

    def decode(self, encoded: Any) -> Tensor:
        """The tensor again, as well as can be."""


def check_codec(codec: object) -> None:
    """Refuse what is none."""
    if not all(callable(getattr(codec, name, None)) for name in ("encode", "decode")):
        raise AveragingTypeError(
            f"codec: expected an object with encode and decode, got {type(codec).__name__}.",
            "paceline.hooks has some, for instance Int8().",
        )


class Coded:
    """The buffer travels encoded.

    With ``error_feedback`` what encoding loses is added to the next exchange; it is this rank's
    own. Numbers that are not finite are sent, and not fed back.
    """

    def __init__(self, group: Group, codec: FlatCodec, *, error_feedback: bool) -> None:
        self.group = group
        self._codec = copy.deepcopy(codec)  # its state is of one buffer
        if hasattr(codec, "state_dict"):
            self.load_state_dict({"codec": codec.state_dict()})
        self._feedback = error_feedback
        self._lost: Tensor | None = None

    def start(self, buffer: Tensor, standing: Standing) -> Pending:
        """One all-gather."""
        values = self._corrected(buffer[:-HEAD], standing)
        encoded = self._codec.encode(values)
        if standing.weight:
            self._keep_lost(values, self._decode(encoded, values))
        own = message_of(standing, encoded)
        everyone = own.new_empty(self.group.size() * own.numel())
        work = self.group.all_gather_single(everyone, own, async_op=True)
        return _Gathered(self, work, everyone, buffer, encoded)

    def add_up(self, everyone: Tensor, like: Any, buffer: Tensor) -> Standing:
        """Let the buffer be the mean of what the messages say."""
        values = buffer[:-HEAD].zero_()
        total = weighted_sum(everyone.chunk(self.group.size()), like, self._codec, values)
        if total.weight:
            values.div_(total.weight)
        return total

    def _corrected(self, values: Tensor, standing: Standing) -> Tensor:
        """What to encode: with what was lost before, or zeros, which nobody will decode."""
        if not standing.weight:
            return values.zero_()
        return values if self._lost is None else values.add_(self._lost)

    def _keep_lost(self, values: Tensor, decoded: Tensor) -> None:
        if self._feedback:
            self._lost = without_nonsense(values - decoded[: values.numel()])

    def _decode(self, encoded: Any, like: Tensor) -> Tensor:
        return self._codec.decode(encoded).reshape(-1).to(like.dtype)

    def state_dict(self) -> dict[str, Any]:
        """What encoding has lost so far, and what the codec keeps."""
        keeps = getattr(self._codec, "state_dict", dict)
        return {"lost": self._lost, "codec": keeps()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        lost = state.get("lost")
        self._lost = None if lost is None else lost.clone()
        if state.get("codec"):
            self._codec.load_state_dict(_of_rank(state["codec"], self.group.rank()))  # type: ignore[attr-defined]


class _Gathered:
    """An all-gather under way."""

    def __init__(
        self, exchange: Coded, work: Work, everyone: Tensor, buffer: Tensor, like: Any
    ) -> None:
        self._parts = exchange, work, everyone, buffer, like
        self._standing: Standing | None = None

    def wait(self) -> Standing:
        if self._standing is None:
            exchange, work, everyone, buffer, like = self._parts
            work.wait()
            self._standing = exchange.add_up(everyone, like, buffer)
        return self._standing


def _of_rank(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """A codec's state, such that it rounds otherwise than on other ranks, if at random.

    If all ranks rounded up and down at the same places, their errors would not cancel.
    """
    if "draws" not in state:  # how often it did
        return state
    return {**state, "draws": state["draws"] % _DRAWS + rank * _DRAWS}


def message_of(standing: Standing, encoded: Any) -> Tensor:
    """What one rank sends: how it stands, then what it encoded."""
    parts = tensors_of(encoded)
    return to_bytes([standing.row(torch.float64, parts[0].device), *parts])


def weighted_sum(messages: Sequence[Tensor], like: Any, codec: FlatCodec, out: Tensor) -> Standing:
    """Add what the messages say, times their weights, to ``out``; how their ranks stood.

    A message of weight 0 is not looked at.
    """
    total = NOBODY
    for message in messages:
        standing = Standing(*message[: _ALIGNED * HEAD].view(torch.float64).tolist())
        if standing.weight:
            parts = from_bytes(message[_ALIGNED * HEAD :], tensors_of(like))
            decoded = codec.decode(with_tensors(like, parts))
            out.add_(decoded.reshape(-1).to(out.dtype), alpha=standing.weight)
        total += standing
    return total


def without_nonsense(lost: Tensor) -> Tensor:
    """What is not finite is not sent again: it would be there for ever."""
    return torch.nan_to_num_(lost, nan=0.0, posinf=0.0, neginf=0.0)


def tensors_of(encoded: Any) -> list[Tensor]:
    """The tensors that an encoded one consists of, in order."""
    return list(encoded.parts.values())


def with_tensors(like: Any, tensors: Sequence[Tensor]) -> Any:
    """An encoded tensor like the given one, of other numbers."""
    return dataclasses.replace(like, parts=dict(zip(like.parts, tensors, strict=True)))


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """One message of them all."""
    parts = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
    return torch.cat([F.pad(part, (0, -part.numel() % _ALIGNED)) for part in parts])


def from_bytes(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a message, which have the shapes and types of those in ``like``."""
    sizes = [t.numel() * t.element_size() for t in like]
    parts = message.split([size + -size % _ALIGNED for size in sizes])
    return [
        part[:size].view(t.dtype).view(t.shape)
        for part, size, t in zip(parts, sizes, like, strict=True)
    ]
