"""Eight bits for each number, and one scale for each block of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import CodecSettingError
from ..dither import mix, noise
from .codec import Parts, RowCodec

_STEPS = 127
_TINY = 1e-36  # a smaller scale has no inverse; such a block counts as zero


class Int8(RowCodec):
    """Sends 8 bits per element, as multiples of 1/127 of the largest value in its block.

    Rounding is stochastic and therefore unbiased: errors cancel over ranks and steps. With
    ``stochastic=False`` values are rounded to nearest.
    """

    def __init__(self, block: int = 256, *, stochastic: bool = True, seed: int = 0) -> None:
        super().__init__()
        if block < 8 or block % 8:
            raise CodecSettingError(f"Int8(block={block})", "block must be a multiple of 8")
        self.block, self.stochastic, self.seed = block, stochastic, seed

    def pack(self, rows: Tensor, keys: Tensor) -> Parts:
        scale = rows.abs().amax(1, keepdim=True).div_(_STEPS)
        inverse = torch.where(scale > _TINY, scale.reciprocal(), 0)
        steps = rows * inverse
        if self.stochastic:
            steps.add_(noise(mix(keys, self.seed), rows.shape[1])).floor_()
        else:
            steps.round_()
        return {"scale": scale, "steps": steps.to(torch.int8)}

    def unpack(self, parts: Mapping[str, Tensor], width: int) -> Tensor:
        # A scale that is not finite makes the block so, whatever became of its steps.
        return parts["steps"].float().mul_(parts["scale"])

    def __repr__(self) -> str:
        rounding = "" if self.stochastic else ", stochastic=False"
        seed = f", seed={self.seed}" if self.seed else ""
        return f"Int8(block={self.block}{rounding}{seed})"
