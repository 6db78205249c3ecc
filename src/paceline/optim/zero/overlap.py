"""Steps inside the backward pass, for ``overlap_with_ddp=True``.

A communication hook tells of every bucket whose averages are known, and this rank's part of its
parameters is stepped at once. Each parameter is cut into as many parts as there are ranks, so that
every bucket has work for every rank, whatever the buckets are. After the last one, all parameters
are shared with one gather.

As in torch, the first two passes of a wrapper step nothing (three with a static graph).
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..._exchange import memory_like
from ...groups import Group
from .pieces import PartPiece
from .rows import Staged
from .stretches import Slice, even_bounds


class _OverlapStatus(enum.IntEnum):
    """The states of the optimizer, by torch's names."""

    UNINITIALIZED = 0
    DDP_HAS_REBUILT_BUCKETS = 1
    INITIALIZED = 2


class _OverlapInfo:
    """What torch's hooks ask for."""

    def __init__(self) -> None:
        self.status = _OverlapStatus.UNINITIALIZED
        self.shard_buckets = False


class Overlap:
    """The passes of one wrapper, and what is stepped in them."""

    def __init__(self, params: Mapping[int, Tensor], group: Group) -> None:
        ranks = range(group.size())
        bounds = {n: even_bounds(p.numel(), group.size()) for n, p in params.items()}
        owned = [
            [Slice(n, b[rank], b[rank + 1]) for n, b in bounds.items() if b[rank] < b[rank + 1]]
            for rank in ranks
        ]
        self.row = Staged(owned, params, group)
        # Never the parameters themselves: those may have gradients of other buckets in .grad.
        self.pieces = {s.param: PartPiece(params[s.param], s, 0) for s in owned[group.rank()]}
        self.info = _OverlapInfo()
        self._numbers = {param: number for number, param in params.items()}
        self._ddp: Any = None
        self._passes = 0
        self._lock = threading.Lock()

    def begin(self, ddp: Any, shard_buckets: bool) -> None:
        """A hook was made for ``ddp``."""
        self._ddp, self.info.shard_buckets = ddp, shard_buckets

    def take(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], step: Any, is_last: bool
    ) -> None:
        """One bucket's averages; ``step`` steps whatever has a gradient, and shares if it is last.

        A call with ``is_last`` comes after the others of its pass, at the same point on all ranks.
        """
        with self._lock:
            if self.info.status is _OverlapStatus.INITIALIZED:
                lent = self._lend(parameters, gradients)
                try:
                    step()
                finally:
                    for piece in lent:
                        piece.drop_grad()
                if is_last and self.row.awake:
                    self.row.share()
            if is_last:
                self._count()

    def _lend(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[PartPiece]:
        lent = []
        for param, grad in zip(parameters, gradients, strict=True):
            piece = self.pieces.get(self._numbers.get(param, -1))
            if piece is None:
                continue
            part = piece.slices[0]
            piece.lend_grad()  # looks where the parameter is now
            piece.tensor.grad = memory_like(grad, param)[part.start : part.stop]
            lent.append(piece)
        return lent

    def _count(self) -> None:
        self._passes += 1
        if self._passes >= (3 if getattr(self._ddp, "static_graph", False) else 2):
            self.info.status = _OverlapStatus.INITIALIZED
