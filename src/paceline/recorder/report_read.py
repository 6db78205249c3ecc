"""Reads a recorded run for its report: what is wrong with it becomes an error or a note."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import DamagedLogError, LogVersionError, RunMissingError
from .run import VERSION, BucketPass, Collective, RankLog, Step

T = TypeVar("T", Step, BucketPass, Collective)

RECORD = "Record one with `paceline run --record DIR script.py`, or recorder.save(DIR) on each rank"


@dataclass(frozen=True)
class Run:
    """The logs of one run on rank 0's clock, by rank, and what a reader should know about them."""

    name: str
    logs: tuple[RankLog, ...]
    notes: tuple[str, ...]


class _Form(msgspec.Struct):
    version: int


def read(directory: Path) -> Run:
    """The run recorded in ``directory``."""
    logs = [_read_log(path) for path in _paths(directory)]
    logs.sort(key=lambda log: log.rank)
    kept, notes = _of_one_run(logs)
    notes += _missing(kept) + _differing(kept)
    return Run(directory.resolve().name, tuple(on_one_clock(log) for log in kept), tuple(notes))


def on_one_clock(log: RankLog) -> RankLog:
    """The same log with its times on rank 0's clock."""
    offset = log.clock_offset
    if offset == 0:
        return log
    return msgspec.structs.replace(
        log,
        clock_offset=0.0,
        steps=[_moved(step, _STEP_TIMES, offset) for step in log.steps],
        buckets=[_moved(bucket, _BUCKET_TIMES, offset) for bucket in log.buckets],
        collectives=[_moved(call, _CALL_TIMES, offset) for call in log.collectives],
    )


def times(log: RankLog) -> tuple[float, float]:
    """The first and the last moment in a log; zeros for an empty one."""
    moments = [
        moment
        for events, fields in (
            (log.steps, _STEP_TIMES),
            (log.buckets, _BUCKET_TIMES),
            (log.collectives, _CALL_TIMES),
        )
        for event in (*events[:1], *events[-64:])  # in order, but for what overlaps
        for field in fields
        if (moment := getattr(event, field)) > 0
    ]
    return (min(moments), max(moments)) if moments else (0.0, 0.0)


_STEP_TIMES = ("forward_began", "forward_ended", "backward_began", "backward_ended")
_BUCKET_TIMES = ("filled", "launched", "finished", "waited")
_CALL_TIMES = ("began", "finished")


def _moved(event: T, fields: Iterable[str], offset: float) -> T:
    """``event`` later by ``offset``; a time of 0 means that it did not happen, and stays."""
    moved = {f: at + offset for f in fields if (at := getattr(event, f)) > 0}
    return msgspec.structs.replace(event, **moved)


def _paths(directory: Path) -> list[Path]:
    if not directory.exists():
        raise RunMissingError(str(directory), "there is no such folder", RECORD)
    if not directory.is_dir():
        remedy = "Give the folder that holds the run's rank-00000.json"
        raise RunMissingError(str(directory), "this is a file, not the folder of a run", remedy)
    found = sorted(directory.glob("rank-*.json"))
    if not found:
        raise RunMissingError(str(directory), "no rank's log (rank-00000.json) lies in it", RECORD)
    return found


def _read_log(path: Path) -> RankLog:
    raw = path.read_bytes()
    try:
        form = msgspec.json.decode(raw, type=_Form)
        if form.version != VERSION:
            raise LogVersionError(str(path), found=form.version, known=VERSION)
        return msgspec.json.decode(raw, type=RankLog)
    except msgspec.DecodeError as problem:
        raise DamagedLogError(str(path), str(problem).rstrip(".")) from problem


def _of_one_run(logs: Sequence[RankLog]) -> tuple[list[RankLog], list[str]]:
    """Leave out what an earlier run of another size has left in the folder."""
    newest = max(logs, key=lambda log: times(log)[1])
    began = times(newest)[0]
    old = [o for o in logs if o.world_size != newest.world_size and times(o)[1] < began]
    if not old:
        return list(logs), []
    sizes = " and ".join(str(size) for size in sorted({o.world_size for o in old}))
    note = (
        f"The folder also holds logs of an older run, of world size {sizes} "
        f"({listed(o.rank for o in old)}). They are left out."
    )
    return [log for log in logs if log not in old], [note]


def _missing(logs: Sequence[RankLog]) -> list[str]:
    size = max(log.world_size for log in logs)
    absent = sorted(set(range(size)) - {log.rank for log in logs})
    if not absent:
        return []
    there, they = ("is no log", "it") if len(absent) == 1 else ("are no logs", "they")
    return [
        f"There {there} of {listed(absent)} of {size}. What {they} did is not in this report; if "
        f"{they} made others wait, it shows only as waiting for the data."
    ]


def _differing(logs: Sequence[RankLog]) -> list[str]:
    notes = []
    for what in ("torch", "paceline", "backend"):
        found: dict[str, list[int]] = {}
        for log in logs:
            found.setdefault(getattr(log, what), []).append(log.rank)
        if len(found) > 1:
            each = "; ".join(f"{value} on {listed(ranks)}" for value, ranks in found.items())
            notes.append(f"The ranks do not have the same {what}: {each}.")
    return notes


def listed(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 7``."""
    numbers = sorted(ranks)
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and stretches[-1][-1] == number - 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in stretches]
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(texts)
