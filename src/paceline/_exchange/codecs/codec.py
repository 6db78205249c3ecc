"""Codec: what tensors look like while they travel.

A codec turns a tensor into a few named parts that take less room (``encode``) and back into a
tensor that is close to it (``decode``). How close is its own business: what is lost is kept by
whoever uses it and sent with the next tensor (``feedback.py``).

**A codec of your own.** A class with ``encode`` and ``decode`` is one, and a ``repr`` that says all
they depend on: ranks compare it. Each tensor is encoded for itself then, and the messages of all
ranks go to all ranks. A subclass of :class:`Codec` may say more: what gains by it (``gains``), what
it remembers, which route its messages take to a mean (``route``). A subclass of :class:`RowCodec`
encodes all tensors of a bucket in one call. Nothing has to be registered.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import CodecSettingError, CodecStateError
from ..dither import mix
from ..routes import Route, RouteSetting, row_route
from ..row_layout import RowLayout

Parts = dict[str, Tensor]
State = dict[str, object]


@dataclass(frozen=True)
class Encoded:
    """An encoded tensor: its named parts, and the shape and dtype of the original."""

    parts: Mapping[str, Tensor]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes to send."""
        return sum(part.nbytes for part in self.parts.values())


class Encodes(Protocol):
    """The methods that every codec has."""

    def encode(self, tensor: Tensor) -> Any:
        """A float32 tensor in fewer bytes: a dataclass with ``parts``, which are tensors by name.

        Their shapes and types depend on those of the tensor alone.
        """

    def decode(self, encoded: Any) -> Tensor:
        """A tensor close to the one that was encoded."""


class Codec(ABC):
    """Encodes tensors before they are sent, and decodes them. All ranks use equal codecs."""

    block: int = 256  # elements; memory for what encoding loses is cut into rows so long

    @abstractmethod
    def encode(self, tensor: Tensor) -> Encoded:
        """Return ``tensor`` in encoded form, without changing it.

        The shapes and dtypes of the parts may depend only on the shape and dtype of ``tensor``.
        """

    @abstractmethod
    def decode(self, encoded: Encoded) -> Tensor:
        """Return a tensor close to the one that was encoded, with its shape and dtype."""

    def gains(self, shape: Sequence[int]) -> bool:
        """Return whether to encode a tensor of this shape; others are sent as they are."""
        return True

    def route(self, setting: RouteSetting) -> Route:
        """Return how encoded buckets are averaged; by default every rank sends to every rank."""
        return row_route(EachByItself(self, setting.layout), setting, dense=False)

    def restart(self) -> None:  # noqa: B027 - most have nothing to forget
        """Drop state that was learned together with other ranks, because the ranks have changed."""

    def state_dict(self) -> State:
        """Return what the next ``encode`` depends on besides its argument."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue like the codec that returned ``state``."""
        if state:
            raise CodecStateError(f"{self} has no state.", "Load the state of an equal codec.")

    def __or__(self, after: Codec) -> Codec:
        """This codec, and ``after`` for its main part."""
        raise CodecSettingError(f"{self} | {after}", "both work on rows", "Use one of them alone.")

    def __repr__(self) -> str:
        """All that encoding depends on, which ranks compare: here, the public attributes."""
        told = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in told.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


class EachByItself:
    """Any codec as one of rows: each tensor that lies in them is encoded for itself."""

    def __init__(self, codec: Codec, layout: RowLayout) -> None:
        self._codec, self._layout = codec, layout
        self._like: list[Encoded] = []  # what the codec made last: all but the parts is the same
        self._device = torch.device("cpu")  # of the rows it was made of; there may be no part

    def pack(self, rows: Tensor, keys: Tensor) -> Parts:
        """Every tensor's parts, by its place and their names."""
        self._device = rows.device
        pairs = zip(self._layout.large, self._layout.stretches(rows), strict=True)
        self._like = [self._codec.encode(flat.view(span.shape)) for span, flat in pairs]
        parts = enumerate(encoded.parts for encoded in self._like)
        return {f"{at}.{name}": part for at, own in parts for name, part in own.items()}

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        """The rows that these tensors lie in; what fills them up is zero."""
        rows = torch.zeros(self._layout.rows, width, device=self._device)
        for at, flat in enumerate(self._layout.stretches(rows)):
            own = {name: parts[f"{at}.{name}"] for name in self._like[at].parts}
            found = self._codec.decode(replace(self._like[at], parts=own))
            flat.copy_(found.reshape(flat.shape))
        return rows

    def add_to(self, rows: Tensor, parts: Mapping[str, Tensor], *, subtract: bool = False) -> None:
        """Add the decoded tensors to ``rows``, or take them away."""
        rows.add_(self.unpack(parts, rows.shape[1]), alpha=-1 if subtract else 1)


class Adapted(Codec):
    """A codec around any object with ``encode`` and ``decode``."""

    def __init__(self, inner: Encodes) -> None:
        self.inner = inner

    def encode(self, tensor: Tensor) -> Encoded:
        encoded: Encoded = self.inner.encode(tensor)
        return encoded

    def decode(self, encoded: Encoded) -> Tensor:
        tensor: Tensor = self.inner.decode(encoded)
        return tensor

    def state_dict(self) -> State:
        keeps = getattr(self.inner, "state_dict", dict)
        return dict(keeps())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        if hasattr(self.inner, "load_state_dict"):
            self.inner.load_state_dict(state)
        else:
            super().load_state_dict(state)

    def __repr__(self) -> str:
        return repr(self.inner)


def is_codec(given: object) -> bool:
    """Whether it can encode and decode."""
    return all(callable(getattr(given, name, None)) for name in ("encode", "decode"))


def as_codec(given: Encodes) -> Codec:
    """``given`` as a :class:`Codec`; it has ``encode`` and ``decode``."""
    return given if isinstance(given, Codec) else Adapted(given)


class RowCodec(Codec):
    """A codec that encodes each row of ``block`` elements separately.

    Subclasses define how rows are packed and unpacked. Their ``repr`` must contain every setting,
    because ranks compare it. Each part has one row for each row of the input.
    """

    main: str | None = None  # the part that a further codec may encode
    dense: bool = True  # every element travels, so that a mean is no larger than what it is of

    def __init__(self) -> None:
        self._draws = 0
        self._specs: dict[int, dict[str, tuple[torch.dtype, int]]] = {}

    @abstractmethod
    def pack(self, rows: Tensor, keys: Tensor) -> Parts:
        """Return ``rows`` (float32, unchanged) in encoded form; ``keys`` seed what is random."""

    @abstractmethod
    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        """Return the decoded rows, of ``width`` elements each."""

    def add_to(self, rows: Tensor, parts: Mapping[str, Tensor], *, subtract: bool = False) -> None:
        """Add the decoded values to ``rows``, or subtract them."""
        rows.add_(self.unpack(parts, rows.shape[1]), alpha=-1 if subtract else 1)

    def route(self, setting: RouteSetting) -> Route:
        """Every rank sends to every rank; many ranks average dense rows in two stages."""
        return row_route(self, setting, dense=self.dense)

    def __or__(self, after: Codec) -> Codec:
        """This codec, and ``after`` for its main part."""
        return Chain(self, after) if isinstance(after, RowCodec) else super().__or__(after)

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
        """Return the dtype of each part, and its number of elements for a row of ``width``."""
        if width not in self._specs:
            probe = self.pack(torch.zeros(1, width), torch.zeros(1, dtype=torch.int64))
            self._specs[width] = {n: (part.dtype, part.numel()) for n, part in probe.items()}
        return self._specs[width]

    def state_dict(self) -> State:
        return {"draws": self._draws}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._draws = int(state["draws"])  # type: ignore[call-overload]


class Chain(RowCodec):
    """Two codecs: the second one encodes the main part of the first."""

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
