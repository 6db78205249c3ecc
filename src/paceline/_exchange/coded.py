"""CodedMean: the weighted mean of a buffer that travels encoded.

What ``weighted_mean.py`` sends as it is goes along a route of its codec here. Ranks are weighted,
and how they stand travels at the end of the buffer, as it is.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from ..groups import Group
from .codecs import Codec
from .feedback import Held
from .journey import Journey
from .routes import Route, RouteSetting
from .row_layout import ParamSpan, RowLayout
from .weighted_mean import HEAD, Averaging, Pending, Standing, WeightedMean
from .wire import Meter, MeteredGroup

_VALUES = "values"


class CodedMean(WeightedMean):
    """The buffer travels encoded; as it is where the codec gains nothing by flat tensors.

    With ``error_feedback`` what encoding loses is added to the next exchange; it is this rank's
    own. Numbers that are not finite are sent, and not fed back. ``one_stage``: other exchanges may
    be begun before this one is awaited, so all its collectives begin at once.
    """

    def __init__(
        self, group: Group, codec: Codec, *, error_feedback: bool, one_stage: bool
    ) -> None:
        super().__init__(group)
        self._codec = copy.deepcopy(codec)  # its state is of one buffer
        self._feedback, self._one_stage = error_feedback, one_stage
        self._lost: Held = {}  # by this rank's own encoding
        self._lost_of_means: Held = {}  # by this rank's encoding of averages, for all
        self._step = 0
        self._place = group.rank(), group.size()

    def start(self, buffer: Tensor, standing: Standing) -> Pending:
        """Encode what is to be averaged, with what was lost before, and send it."""
        size = buffer.numel() - HEAD
        if not size or not self._codec.gains((size,)):
            return super().start(buffer, standing)
        self._look_around()
        buffer[-HEAD:] = standing.row(buffer.dtype, buffer.device)
        steps = self._route(buffer).travel(buffer, self._step, share=standing.weight, now=False)
        self._step += 1
        return Averaging(Journey(steps), buffer, divides=False)

    def _look_around(self) -> None:
        """Drop what belongs to the old ranks, if the group has other members now."""
        place = self.group.rank(), self.group.size()
        if place != self._place:
            self._place = place
            self._lost_of_means.clear()
            self._codec.restart()

    def _route(self, buffer: Tensor) -> Route:
        """Made for each exchange: they are rare, and a route's messages take room."""
        size = buffer.numel() - HEAD
        spans = (ParamSpan(_VALUES, 0, (size,), 0), ParamSpan("standing", 1, (HEAD,), size))
        layout = RowLayout(spans[:1], spans[1:], self._codec.block)
        line = MeteredGroup(self.group, Meter(), buffer.device)
        held = self._lost if self._feedback else None
        setting = RouteSetting(
            layout, line, buffer, held, self._lost_of_means, True, self._one_stage
        )
        return self._codec.route(setting)

    def state_dict(self) -> dict[str, Any]:
        """What encoding has lost so far, what the codec keeps, how many exchanges there were."""
        lost, here = self._lost.get(_VALUES), self._lost_of_means.get(_VALUES)
        return {
            "lost": None if lost is None else lost.clone(),
            "lost_here": None if here is None else here.clone(),
            "codec": self._codec.state_dict(),
            "step": self._step,
            "ranks": self.group.size(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; on other ranks, without what belongs to their parts."""
        same = state.get("ranks") == self.group.size()
        self._lost = _held(state.get("lost"))
        self._lost_of_means = _held(state.get("lost_here") if same else None)
        self._step = int(state.get("step", 0))
        if state.get("codec"):
            self._codec.load_state_dict(state["codec"])


def _held(lost: Tensor | None) -> Held:
    return {} if lost is None else {_VALUES: lost.clone()}
