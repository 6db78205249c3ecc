"""A few numbers of what was recorded: for a progress bar, TensorBoard, a metrics endpoint."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from . import events


@dataclass(frozen=True)
class Summary:
    """A summary of the last steps of this rank."""

    step_seconds: float  # from one forward to the next: the median; 0 while it is not known
    wait_share: float  # of that time, spent in waiting for other ranks: 0 to 1
    steps: int  # how many it is about


def summary(steps: int = 50, *, rank: int | None = None) -> Summary:
    """Return a summary of the last ``steps`` steps of this rank.

    ``rank`` is needed only if this process has several ranks.
    """
    if steps < 1:
        raise ValueError(f"summary: steps is {steps}; it takes at least one.")
    found = [e for e in list(events.steps) if rank in (None, e.track.board.world_rank)]
    lasting = _latest_model(found)[-steps - 1 :]
    if len(lasting) < 2:
        return Summary(0.0, 0.0, 0)
    times = [b.forward_began - a.forward_began for a, b in itertools.pairwise(lasting)]
    waited = sum(entry.waited for entry in lasting[:-1])
    total = sum(times)
    return Summary(statistics.median(times) / 1e9, min(1.0, waited / total), len(times))


def _latest_model(found: list[events.StepEntry]) -> list[events.StepEntry]:
    """Steps of the model that ran last; a process may have several."""
    return [entry for entry in found if entry.track is found[-1].track]


@dataclass(frozen=True)
class Totals:
    """What this process has done since it started."""

    steps: int
    collectives: int
    bytes_sent: float


def totals() -> Totals:
    """Return the numbers of steps, collectives and bytes, over all groups of this process."""
    with events.counting[0]:
        boards, past = list(events.boards.values()), events.past
        sent = [board.traffic.bytes_sent for board in boards if board.traffic is not None]
        return Totals(
            past.steps + sum(board.steps for board in boards),
            past.collectives + sum(board.made for board in boards),
            past.bytes_sent + sum(sent),
        )
