"""Error feedback: what encoding loses in one step is sent with the next ones.

The rows that are encoded are the gradient and what is left from before; when they have been encoded
the part that the others will read is taken away again, and the rest stays where it is. So the sum
over steps of what was sent is the sum of the gradients, less what still lies here.

What is left belongs to parameters, not to buckets: ``held`` has it by name, as stretches of the
rows, and goes on having it when buckets are laid out anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch import foreach
from ..errors import CodecStateError
from .row_layout import RowLayout

Held = dict[str, Tensor]


class Feedback:
    """The rows of one bucket, and what is left in them between steps."""

    def __init__(self, layout: RowLayout, held: Held | None, device: torch.device) -> None:
        self.rows = torch.zeros(layout.rows, layout.block, device=device)
        self.stretches = layout.stretches(self.rows)
        self._fillers = layout.fillers(self.rows)
        self._keeps = held is not None
        if held is not None:
            for span, stretch in zip(layout.large, self.stretches, strict=True):
                take_over(held, span.name, stretch)

    def add(self, gradients: Sequence[Tensor]) -> Tensor:
        """The rows to encode: these gradients, and what is left."""
        if not self.stretches:
            return self.rows
        if self._keeps:
            foreach.add_(self.stretches, list(gradients))
        else:
            foreach.copy_(self.stretches, list(gradients))
        return self.rows

    def settle(self) -> None:
        """Once what was sent is subtracted: set padding and NaNs to zero."""
        for filler in self._fillers:
            filler.zero_()
        forget_nonsense(self.rows)


def take_over(held: Held, name: str, place: Tensor) -> None:
    """Keep in ``place`` from now on what is left of a parameter."""
    before = held.get(name)
    if before is not None:
        if before.numel() != place.numel():
            raise CodecStateError(
                f"{name} has {place.numel()} elements to keep errors of, and the state that was "
                f"loaded has {before.numel()}.",
                "Load the state of a run with the same model.",
            )
        place.copy_(before.view_as(place))
    held[name] = place


def forget_nonsense(rows: Tensor) -> None:
    """Set what is not finite to zero; it was sent once, and would spoil every later step."""
    if rows.device.type != "cpu" or not bool(rows.sum().isfinite()):
        rows.nan_to_num_(0.0, 0.0, 0.0)
