"""Route: the way of one bucket, encoded, to its mean over ranks.

A route is an iterator: it begins collectives, hands out their works, and goes on when they are
done. All of it runs on the thread that asks, and buckets advance in turn, so that every rank makes
the same calls in the same order. Every rank ends with the same bits.

``rows.py`` has the routes of codecs that encode rows, ``factored.py`` that of thin matrices. A
codec says which one its messages take (``Codec.route``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from ..._torch import foreach
from ..feedback import Feedback, Held
from ..row_layout import RowLayout, spans_of
from ..wire import MeteredGroup

Works = Sequence[TorchWork]


@dataclass(frozen=True, eq=False)
class RouteSetting:
    """Which bucket a route is for, and whom it goes to.

    ``held`` has what encoding lost of each parameter, None without error feedback; ``owned`` has it
    of the averages that this rank encodes for all.
    """

    layout: RowLayout
    line: MeteredGroup
    like: Tensor  # a buffer: its type and device
    held: Held | None
    owned: Held = field(default_factory=dict)
    weighted: bool = False  # ranks count by their share, and small parameters are added up
    one_stage: bool = False  # ranks may wait at different times: all collectives begin at once


class Route(ABC):
    """How buckets of one layout are averaged."""

    def __init__(self, setting: RouteSetting) -> None:
        self.layout, self.line, self.weighted = setting.layout, setting.line, setting.weighted
        self.device = setting.like.device
        self.feedback = setting.held is not None
        self.memory = Feedback(setting.layout, setting.held, self.device)
        # Small parameters are added up in at least this precision.
        self.exact = torch.float64 if setting.like.dtype == torch.float64 else torch.float32

    @abstractmethod
    def travel(self, buffer: Tensor, step: int, *, share: float, now: bool) -> Iterator[Works]:
        """Make ``buffer`` the mean over ranks.

        ``share``: how much this rank counts; with 0 it neither says anything nor sends what is left
        from before. Where the setting is not weighted all others count alike. ``now``: nothing else
        is under way.
        """

    def hand_over(self, held: Held) -> None:  # noqa: B027 - most have nothing of the kind
        """Give up this route: what only it would have sent is in ``held`` from now on."""

    def _small(self, buffer: Tensor) -> Tensor:
        """The small parameters' gradients, in one tensor."""
        parts = spans_of(buffer, self.layout.small)
        return torch.cat(parts).to(self.exact) if parts else buffer.new_empty(0, dtype=self.exact)

    def _give_small(self, buffer: Tensor, total: Tensor) -> None:
        """Put their mean into the buffer, or their sum; ``total`` is that over all ranks."""
        parts = spans_of(buffer, self.layout.small)
        if parts:
            found = total if self.weighted else total.div_(self.line.ranks)
            foreach.copy_(parts, list(found.split([part.numel() for part in parts])))

    def _give_large(self, buffer: Tensor, mean: Tensor) -> None:
        parts = spans_of(buffer, self.layout.large)
        if parts:
            foreach.copy_(parts, self.layout.stretches(mean))
