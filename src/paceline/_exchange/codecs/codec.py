"""Codec: what gradients look like while they travel.

A codec turns a tensor into a few named parts that take less room (``encode``) and back into a
tensor that is close to it (``decode``). How close is its own business: what is lost is kept by the
hook that uses it and sent with the next gradient (``codec_hook.py``).

**Rows.** Most codecs cut a tensor into rows of ``block`` elements and encode each row by itself,
all of them at once. So the result does not depend on which parameters share a bucket: buckets may
be laid out anew, in this run or in one that resumes it, and not a bit changes.

**Chains.** ``TopK(0.01) | Int8()``: the second codec encodes the ``main`` part of the first, here
the values that were chosen. The other parts travel as they are.

**Numbers that are none.** A NaN or an infinity comes out as something that is not finite, in its
own place or in its whole row. It is never lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...errors import CodecSettingError, CodecStateError
from .dither import mix

Parts = dict[str, Tensor]
State = dict[str, object]


@dataclass(frozen=True)
class Encoded:
    """A tensor on its way: named parts, and what it was."""

    parts: Mapping[str, Tensor]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """What it takes to send the parts."""
        return sum(part.nbytes for part in self.parts.values())


class Codec(ABC):
    """Encodes tensors. Equal codecs on all ranks understand each other."""

    main: str | None = None  # the part that a further codec may encode

    @abstractmethod
    def encode(self, tensor: Tensor) -> Encoded:
        """The tensor in less room; ``tensor`` stays as it is."""

    @abstractmethod
    def decode(self, encoded: Encoded) -> Tensor:
        """A tensor close to the one that was encoded, of its shape and type."""

    def state_dict(self) -> State:
        """What the next ``encode`` depends on besides its argument."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from there."""
        if state:
            raise CodecStateError(f"{self} has no state.", "Load that of an equal codec.")

    def __or__(self, after: Codec) -> Codec:
        """This codec, and ``after`` for its main part."""
        if not isinstance(self, RowCodec) or not isinstance(after, RowCodec):
            raise CodecSettingError(
                f"{self} | {after}", "both work on rows", "Use one of them alone."
            )
        return Chain(self, after)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


class RowCodec(Codec):
    """A codec for which every row of ``block`` elements stands by itself.

    Subclasses say how rows are packed and unpacked, and in their ``repr`` all that this depends on:
    ranks compare it. A part has one row for each row, whatever the row holds.
    """

    block: int = 256
    dense: bool = True  # every element travels, so that a mean is no larger than what it is of

    def __init__(self) -> None:
        self._draws = 0
        self._specs: dict[int, dict[str, tuple[torch.dtype, int]]] = {}

    @abstractmethod
    def pack(self, rows: Tensor, keys: Tensor) -> Parts:
        """``rows`` (float32, left as they are) encoded; ``keys`` choose what is random."""

    @abstractmethod
    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        """Rows of ``width`` elements."""

    def add_to(self, rows: Tensor, parts: Mapping[str, Tensor], *, subtract: bool = False) -> None:
        """Add what was encoded to ``rows``, or take it away from them."""
        rows.add_(self.unpack(parts, rows.shape[1]), alpha=-1 if subtract else 1)

    def encode(self, tensor: Tensor) -> Encoded:
        rows = rows_of(tensor, self.block)
        keys = mix(torch.arange(len(rows), device=rows.device), self._draws)
        self._draws += 1
        return Encoded(self.pack(rows, keys), tensor.shape, tensor.dtype)

    def decode(self, encoded: Encoded) -> Tensor:
        rows = self.unpack(encoded.parts, self.block)
        flat = rows.flatten()[: encoded.shape.numel()]
        return flat.view(encoded.shape).to(encoded.dtype)

    def columns(self, width: int) -> dict[str, tuple[torch.dtype, int]]:
        """Of each part, the type and how many elements it has for a row of ``width``."""
        if width not in self._specs:
            probe = self.pack(torch.zeros(1, width), torch.zeros(1, dtype=torch.int64))
            self._specs[width] = {n: (part.dtype, part.numel()) for n, part in probe.items()}
        return self._specs[width]

    def state_dict(self) -> State:
        return {"draws": self._draws}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._draws = int(state["draws"])  # type: ignore[call-overload]


class Chain(RowCodec):
    """Two codecs: the second encodes the main part of the first."""

    def __init__(self, first: RowCodec, second: RowCodec) -> None:
        super().__init__()
        if first.main is None:
            raise CodecSettingError(
                f"{first} | {second}", f"{first} leaves numbers to encode", "Put it last."
            )
        self.first, self.second = first, second
        self.block, self.dense = first.block, first.dense

    @cached_property
    def main(self) -> str | None:  # type: ignore[override]
        """The main part of the second, by its name within the whole."""
        inner = self.second.main
        return None if inner is None else f"{self.first.main}.{inner}"

    def pack(self, rows: Tensor, keys: Tensor) -> Parts:
        parts = self.first.pack(rows, keys)
        values = parts.pop(self._name)
        inner = self.second.pack(values.float(), keys)
        return {**{f"{self._name}.{name}": part for name, part in inner.items()}, **parts}

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        return self.first.unpack(self._opened(parts, width), width)

    def add_to(self, rows: Tensor, parts: Mapping[str, Tensor], *, subtract: bool = False) -> None:
        self.first.add_to(rows, self._opened(parts, rows.shape[1]), subtract=subtract)

    @property
    def _name(self) -> str:
        assert self.first.main is not None
        return self.first.main

    def _opened(self, parts: Mapping[str, Tensor], width: int) -> Parts:
        """The first codec's parts, its main one decoded."""
        prefix = f"{self._name}."
        inner = {n.removeprefix(prefix): p for n, p in parts.items() if n.startswith(prefix)}
        outer = {n: p for n, p in parts.items() if not n.startswith(prefix)}
        dtype, columns = self.first.columns(width)[self._name]
        return {self._name: self.second.unpack(inner, columns).to(dtype), **outer}

    def __repr__(self) -> str:
        return f"{self.first} | {self.second}"


def rows_of(tensor: Tensor, block: int) -> Tensor:
    """A copy in float32, cut into rows; what is missing at the end is zero."""
    flat = tensor.detach().reshape(-1)
    rows = torch.zeros(-(-flat.numel() // block), block, device=flat.device)
    rows.view(-1)[: flat.numel()].copy_(flat)
    return rows
