"""Pure: a run as a trace that ui.perfetto.dev and chrome://tracing open.

One process for each rank. Its threads: ``passes`` (forward, backward, and the waiting in it), then
as many ``buckets`` and ``calls`` threads as are needed for slices that overlap. An arrow leads
from the launch of a bucket, in backward, to its flight and on to where its end was noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

from ..run import BucketPass, Collective, RankLog, StepRecord
from .late import BucketLines, waiting

Event = dict[str, Any]
PASSES, BUCKETS, CALLS = 1, 100, 200  # the first thread of each kind
MOST_EVENTS = 400_000  # about 60 MB; a browser opens it


def trace(logs: Sequence[RankLog], began: float, most_events: int = MOST_EVENTS) -> Event:
    """The whole trace; where it would be too large, the latest events of each rank alike."""
    share = max(1, most_events // (6 * max(1, len(logs))))
    kept = [_latest(log, share) for log in logs]
    left_out = sum(_count(log) for log in logs) - sum(_count(log) for log in kept)
    flows = iter(range(1, 1 << 62))
    events = [event for log in kept for event in _rank(log, began, flows)]
    about = {"began": began, "events_left_out": left_out}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def rows(stretches: Sequence[tuple[float, float]]) -> list[int]:
    """A row for each stretch, so that none overlap in a row; ``stretches`` are sorted by begin."""
    taken: list[tuple[float, int]] = []  # until when, which row
    free: list[int] = []
    chosen = []
    for began, ended in stretches:
        while taken and taken[0][0] <= began:
            heappush(free, heappop(taken)[1])
        chosen.append(heappop(free) if free else len(taken))
        heappush(taken, (ended, chosen[-1]))
    return chosen


def _latest(log: RankLog, most: int) -> RankLog:
    changed = {name: getattr(log, name)[-most:] for name in ("steps", "buckets", "collectives")}
    return RankLog(**{**{f: getattr(log, f) for f in log.__struct_fields__}, **changed})


def _count(log: RankLog) -> int:
    return len(log.steps) + len(log.buckets) + len(log.collectives)


def _rank(log: RankLog, zero: float, flows: Iterator[int]) -> Iterator[Event]:
    yield _named(log.rank, 0, "process_name", f"rank {log.rank} ({log.host}, pid {log.pid})")
    yield {
        "ph": "M",
        "pid": log.rank,
        "name": "process_sort_index",
        "args": {"sort_index": log.rank},
    }
    yield _named(log.rank, PASSES, "thread_name", "passes")
    yield from _passes(log, zero)
    yield from _buckets(log, zero, flows)
    yield from _calls(log, zero)


def _passes(log: RankLog, zero: float) -> Iterator[Event]:
    for step in log.steps:
        about: Event = {"step": step.number}
        if step.forward_ended > 0:
            yield _slice(
                log.rank, PASSES, "forward", step.forward_began, step.forward_ended, zero, about
            )
        if step.backward_ended > step.backward_began > 0:
            began, ended = step.backward_began, step.backward_ended
            about = {**about, "waited_us": _us(step.waited)}
            yield _slice(log.rank, PASSES, "backward", began, ended, zero, about)


def _buckets(log: RankLog, zero: float, flows: Iterator[int]) -> Iterator[Event]:
    found = sorted((b for b in log.buckets if b.launched > 0), key=lambda one: one.launched)
    chosen = rows([(one.launched, _end(one.launched, one.finished)) for one in found])
    for row in range(max(chosen, default=-1) + 1):
        yield _named(log.rank, BUCKETS + row, "thread_name", f"buckets {row + 1}")
    lines = BucketLines(log)
    backward = _Backwards(log.steps)
    for one, row in zip(found, chosen, strict=True):
        call = lines.find(one)
        about = {
            "step": one.step, "bytes": one.nbytes, "line": call.line if call else "",
            "filled_us": _us(one.filled - zero), "waited_us": _us(waiting(one)),
        }  # fmt: skip
        end = _end(one.launched, one.finished)
        thread, name = BUCKETS + row, f"bucket {one.bucket}"
        yield _slice(log.rank, thread, name, one.launched, end, zero, about)
        yield from _wait(log.rank, one, backward, zero)
        yield from _arrow(log.rank, thread, one, zero, next(flows))


class _Backwards:
    """Finds the backward pass of a step, for slices that must lie inside it."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        self._of = {s.number: (s.backward_began, s.backward_ended) for s in steps}

    def clip(self, step: int, began: float, ended: float) -> tuple[float, float]:
        first, last = self._of.get(step, (0.0, 0.0))
        return max(began, first), min(ended, last)


def _wait(rank: int, one: BucketPass, backward: _Backwards, zero: float) -> Iterator[Event]:
    if waiting(one) <= 0:
        return
    began, ended = backward.clip(one.step, one.waited, one.finished)
    if ended > began:
        about = {"bucket": one.bucket, "step": one.step}
        yield _slice(rank, PASSES, f"wait for bucket {one.bucket}", began, ended, zero, about)


def _arrow(rank: int, thread: int, one: BucketPass, zero: float, flow: int) -> Iterator[Event]:
    if one.finished <= 0:
        return
    base = {"name": "bucket", "cat": "bucket", "id": flow, "pid": rank}
    launched, finished = _us(one.launched - zero), _us(one.finished - zero)
    yield {**base, "ph": "s", "tid": PASSES, "ts": launched}
    yield {**base, "ph": "t", "tid": thread, "ts": launched}
    yield {**base, "ph": "f", "bp": "e", "tid": PASSES, "ts": finished}


def _calls(log: RankLog, zero: float) -> Iterator[Event]:
    found = sorted((c for c in log.collectives if c.bucket < 0), key=lambda call: call.began)
    chosen = rows([(call.began, _end(call.began, call.finished)) for call in found])
    for row in range(max(chosen, default=-1) + 1):
        yield _named(log.rank, CALLS + row, "thread_name", f"calls {row + 1}")
    for call, row in zip(found, chosen, strict=True):
        end = _end(call.began, call.finished)
        about = _about(call)
        yield _slice(log.rank, CALLS + row, call.operation, call.began, end, zero, about)


def _about(call: Collective) -> Event:
    names = ("sequence", "group", "ranks", "nbytes", "shape", "line", "error")
    return {name: value for name in names if (value := getattr(call, name)) != ""}


def _end(began: float, ended: float) -> float:
    """Where a slice ends; one whose end nobody saw is drawn as a moment."""
    return max(began, ended)


def _slice(
    rank: int, thread: int, name: str, began: float, ended: float, zero: float, about: Event
) -> Event:
    start = _us(began - zero)
    lasted = round(_us(ended - zero) - start, 3)
    return {
        "ph": "X", "pid": rank, "tid": thread, "name": name, "ts": start, "dur": lasted,
        "cat": name.partition(" ")[0], "args": about,
    }  # fmt: skip


def _named(rank: int, thread: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
