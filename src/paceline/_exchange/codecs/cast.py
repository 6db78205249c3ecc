"""Shorter floating-point numbers: fp16, bf16 and the two kinds of fp8; and fp32, which is none.

fp16 and fp8 reach neither far up nor far down, so each row is first multiplied by a power of two
that puts its largest number near the top. That changes no digit, a large gradient does not become
infinite, and a small one does not become zero. Not every short type has infinities, and torch turns
them into large numbers then; so a row with something that is not finite is marked, and comes back
as NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import CodecSettingError
from .codec import Parts, RowCodec

_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_LOW, _HIGH = -100, 100  # exponents of the powers of two: neither they nor 1 over them overflow
_NOT_FINITE = -128  # in the place of an exponent


class Fp32(RowCodec):
    """Sends float32 uncompressed, for comparison or to switch compression off during a run."""

    main = "values"

    def pack(self, rows: Tensor, keys: Tensor) -> Parts:
        return {"values": rows.clone()}

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        return parts["values"].clone()

    def __repr__(self) -> str:
        return "Fp32()"


class Bf16(RowCodec):
    """Sends bfloat16: 2 bytes per element, 8 bits of precision, the range of float32."""

    main = "values"

    def pack(self, rows: Tensor, keys: Tensor) -> Parts:
        return {"values": rows.bfloat16()}

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        return parts["values"].float()

    def __repr__(self) -> str:
        return "Bf16()"


class Scaled(RowCodec):
    """Numbers of a short dtype, with the power of two by which each row was multiplied."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._top = int(torch.frexp(torch.tensor(torch.finfo(dtype).max)).exponent) - 1

    def pack(self, rows: Tensor, keys: Tensor) -> Parts:
        largest = rows.abs().amax(1, keepdim=True)
        exponent = self._top - torch.frexp(largest).exponent
        exponent = exponent.clamp_(_LOW, _HIGH).masked_fill_(~largest.isfinite(), _NOT_FINITE)
        values = torch.mul(rows, _power(exponent)).to(self.dtype)
        return {"values": values, "exponent": exponent.to(torch.int8)}

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        exponent = parts["exponent"].int()
        factor = _power(-exponent).masked_fill_(exponent == _NOT_FINITE, torch.nan)
        return parts["values"].float().mul_(factor)


class Fp16(Scaled):
    """Sends float16: 2 bytes per element, 11 bits of precision, scaled so that none overflows."""

    main = "values"

    def __init__(self) -> None:
        super().__init__(torch.float16)

    def __repr__(self) -> str:
        return "Fp16()"


class Fp8(Scaled):
    """Sends float8: 1 byte per element. ``e4m3`` has 4 bits of precision, ``e5m2`` more range."""

    def __init__(self, kind: str = "e4m3") -> None:
        if kind not in _FP8:
            raise CodecSettingError(f"Fp8({kind!r})", f"kind must be one of {', '.join(_FP8)}")
        super().__init__(_FP8[kind])
        self.kind = kind

    def __repr__(self) -> str:
        return f"Fp8({self.kind!r})"


def _power(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
