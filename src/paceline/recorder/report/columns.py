"""Pure: a run's events as columns of whole microseconds, small enough to lie in the page.

Times are written as the distance from the event before, or from the start of the event, so that
most numbers have few digits; ``assets/store.js`` adds them up again. Strings are numbers of a
table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..run import RankLog
from .late import BucketLines, waiting

NEVER = -1  # in place of a duration: it did not happen, or nobody saw its end


class Names:
    """Gives each string a number."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Its number: one for each name, counted from 0."""
        return self.known.setdefault(name, len(self.known))


def columns(logs: Sequence[RankLog], began: float, ended: float) -> dict[str, Any]:
    """What the page draws; ``began`` is the moment that all times count from."""
    names = Names()
    ranks = [
        {
            "rank": log.rank,
            "host": log.host,
            "steps": _steps(log, began),
            "buckets": _buckets(log, began, names),
            "calls": _calls(log, began, names),
        }
        for log in logs
    ]
    return {"span": micro(ended - began), "ranks": ranks, "names": list(names.known)}


def micro(seconds: float) -> int:
    """Whole microseconds."""
    return round(seconds * 1e6)


def _steps(log: RankLog, zero: float) -> dict[str, list[int]]:
    steps = sorted(log.steps, key=lambda step: step.forward_began)
    return {
        "number": [step.number for step in steps],
        "began": _distances(step.forward_began - zero for step in steps),
        "forward": [_after(step.forward_began, step.forward_ended) for step in steps],
        "backward": [_after(step.forward_began, step.backward_began) for step in steps],
        "ended": [_after(step.forward_began, step.backward_ended) for step in steps],
        "waited": [micro(step.waited) for step in steps],
    }


def _buckets(log: RankLog, zero: float, names: Names) -> dict[str, list[int]]:
    buckets = sorted((b for b in log.buckets if b.launched > 0), key=lambda one: one.launched)
    lines = BucketLines(log)
    calls = [lines.find(one) for one in buckets]
    return {
        "step": [one.step for one in buckets],
        "bucket": [one.bucket for one in buckets],
        "nbytes": [one.nbytes for one in buckets],
        "launched": _distances(one.launched - zero for one in buckets),
        "queued": [max(0, micro(one.launched - (one.filled or one.launched))) for one in buckets],
        "flight": [_after(one.launched, one.finished) for one in buckets],
        "waited": [micro(waiting(one)) for one in buckets],
        "line": [names.number(call.line if call else "") for call in calls],
    }


def _calls(log: RankLog, zero: float, names: Names) -> dict[str, list[int]]:
    """Those that carried no bucket: the user's own, and what paceline says besides."""
    calls = sorted((c for c in log.collectives if c.bucket < 0), key=lambda call: call.began)
    return {
        "operation": [names.number(call.operation) for call in calls],
        "shape": [names.number(call.shape) for call in calls],
        "line": [names.number(call.line) for call in calls],
        "error": [names.number(call.error) for call in calls],
        "nbytes": [call.nbytes for call in calls],
        "sequence": [call.sequence for call in calls],
        "began": _distances(call.began - zero for call in calls),
        "lasted": [_after(call.began, call.finished) for call in calls],
    }


def _after(began: float, moment: float) -> int:
    return max(0, micro(moment - began)) if moment > 0 else NEVER


def _distances(seconds: Iterable[float]) -> list[int]:
    found, before = [], 0
    for moment in map(micro, seconds):
        found.append(moment - before)
        before = moment
    return found
