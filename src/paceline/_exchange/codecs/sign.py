"""One bit for each number: its sign. The block's mean size is sent with them, in 16 bits.

By itself that is far from the gradient; with error feedback, what a step gets wrong is made good in
the steps after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from ...errors import CodecSettingError
from .codec import Parts, RowCodec

_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: their bits, in the highest byte


class Sign(RowCodec):
    """Sends 1 bit per element, its sign, and the mean magnitude of each block.

    Small blocks cost little (a quarter of a bit per element for blocks of 64) and gain much: a row
    of an embedding that got no gradient does not take over the magnitude of its neighbours.
    """

    def __init__(self, block: int = 64) -> None:
        super().__init__()
        if block < 8 or block % 8:
            raise CodecSettingError(f"Sign(block={block})", "block must be a multiple of 8")
        self.block = block

    def pack(self, rows: Tensor, keys: Tensor) -> Parts:
        scale = rows.abs().mean(1, keepdim=True).bfloat16()
        return {"scale": scale, "bits": pack_bits(rows >= 0)}

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        return unpack_signs(parts["bits"])[:, :width].mul_(parts["scale"].float())

    def __repr__(self) -> str:
        return f"Sign(block={self.block})"


def pack_bits(flags: Tensor) -> Tensor:
    """Eight flags of a row in each byte; the first one is the lowest bit."""
    short = -flags.shape[1] % 8
    if short:
        flags = torch.nn.functional.pad(flags, (0, short))
    eights = flags.contiguous().view(torch.uint8).view(torch.int64)
    return ((eights * _GATHER) >> 56).to(torch.uint8)


def unpack_signs(packed: Tensor) -> Tensor:
    """1 for each bit that is set and -1 for the others, in float32."""
    table = _signs(str(packed.device))
    rows, eights = packed.shape
    return table.index_select(0, packed.reshape(-1).int()).view(rows, 8 * eights)


@lru_cache(maxsize=8)
def _signs(device: str) -> Tensor:
    bits = torch.arange(256)[:, None] >> torch.arange(8)
    return ((bits & 1) * 2.0 - 1).to(device)
