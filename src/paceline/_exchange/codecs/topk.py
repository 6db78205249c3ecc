"""Only the largest numbers travel, each with its place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import CodecSettingError
from .codec import Parts, RowCodec

_LARGEST_BLOCK = 1 << 15  # a place takes 16 bits


class TopK(RowCodec):
    """Sends the elements of each block with the largest magnitude, and their positions.

    ``ratio`` is the fraction that is sent. It is taken from every block, not from a whole bucket:
    selecting in small rows is much faster, a position needs two bytes instead of four, and a layer
    with small gradients is not skipped forever. Error feedback sends the rest later.
    """

    main = "values"
    dense = False

    def __init__(self, ratio: float, block: int = 4096) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise CodecSettingError(f"TopK({ratio})", "ratio must be above 0 and at most 1")
        if not 8 <= block <= _LARGEST_BLOCK:
            raise CodecSettingError(f"TopK(block={block})", f"block is 8 to {_LARGEST_BLOCK}")
        self.ratio, self.block = ratio, block

    def pack(self, rows: Tensor, keys: Tensor) -> Parts:
        # NaN counts as the largest of all, so it is always chosen.
        places = rows.abs().topk(self._count(rows.shape[1]), dim=1, sorted=False).indices
        return {"values": rows.gather(1, places), "places": places.to(torch.int16)}

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        rows = torch.zeros(len(parts["values"]), width, device=parts["values"].device)
        return rows.scatter_(1, parts["places"].long(), parts["values"])

    def add_to(self, rows: Tensor, parts: Mapping[str, Tensor], *, subtract: bool = False) -> None:
        values = parts["values"].neg() if subtract else parts["values"]
        rows.scatter_add_(1, parts["places"].long(), values)

    def _count(self, width: int) -> int:
        return max(1, round(self.ratio * width))

    def __repr__(self) -> str:
        return f"TopK({self.ratio}, block={self.block})"
