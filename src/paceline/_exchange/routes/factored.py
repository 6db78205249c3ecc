"""The route of thin matrices: ranks average the left factors, then the right ones (PowerSGD)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...errors import CodecSettingError
from ..low_rank import left_factors, orthonormal, right_factors
from ..row_layout import spans_of
from .route import Route, RouteSetting, Works


class FactorMemory(Protocol):
    """Where the search for the factors of each parameter begins."""

    def start(self, matrix: Tensor, name: str) -> Tensor:
        """A thin matrix, the same on all ranks, with as many rows as ``matrix`` has columns."""

    def keep(self, name: str, right: Tensor) -> None:
        """The mean over ranks of the right factor that this step found."""


class FactorRoute(Route):
    """Two averages of thin matrices; the bytes do not grow with the number of ranks."""

    def __init__(self, codec: FactorMemory, setting: RouteSetting) -> None:
        if setting.weighted or setting.one_stage:
            raise CodecSettingError(
                str(codec),
                "ranks count alike, and wait for two averages",
                "Use another one here.",
            )
        super().__init__(setting)
        self.codec = codec

    def travel(self, buffer: Tensor, step: int, *, share: float, now: bool) -> Iterator[Works]:
        matrices = self._matrices(buffer, share)
        starts = [self.codec.start(m, name) for name, m in matrices.items()]
        lefts = left_factors(list(matrices.values()), starts)
        sums = torch.cat([self._small(buffer), *(left.flatten() for left in lefts)])
        yield [self.line.add_up(sums, now=now)]
        small, rest = sums.split([self.layout.spare, sums.numel() - self.layout.spare])
        self._give_small(buffer, small)
        lefts = [orthonormal(p) for p in _shaped(rest.div_(self.line.ranks).float(), lefts)]
        own = right_factors(list(matrices.values()), lefts)
        sums = torch.cat([right.flatten() for right in own]) if own else sums[:0]
        yield [self.line.add_up(sums, now=now)]
        rights = _shaped(sums.div_(self.line.ranks), own)
        stretches = spans_of(buffer, self.layout.large)
        for name, left, right, out in zip(matrices, lefts, rights, stretches, strict=True):
            out.copy_((left @ right.t()).flatten())
            self.codec.keep(name, right)
        if self.feedback and share:
            for matrix, left, right in zip(matrices.values(), lefts, own, strict=True):
                matrix.sub_(left @ right.t())  # what this rank has said of the mean
            self.memory.settle()

    def _matrices(self, buffer: Tensor, share: float) -> dict[str, Tensor]:
        """The matrices that this rank contributes, as views of its memory."""
        flats = self.memory.stretches
        if share:
            self.memory.add(spans_of(buffer, self.layout.large))
        else:
            flats = [torch.zeros_like(flat) for flat in flats]
        spans = zip(self.layout.large, flats, strict=True)
        return {span.name: flat.view(span.shape[0], -1) for span, flat in spans}


def _shaped(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
