"""Reads a recorded run for its report: what is wrong with it becomes an error or a note."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ..._shown import shown, shown_lines
from ...errors import DamagedLogError, RunMissingError
from ..run import BucketPass, Collective, RankLog, StepRecord, log_paths, path_of, read_log

T = TypeVar("T", StepRecord, BucketPass, Collective)

MOST_TOGETHER = 1 << 30  # bytes of all logs
LONGEST = 10 * 366 * 86_400.0  # seconds
RECORD = "Record one with `paceline run --record DIR script.py`, or recorder.save(DIR) on each rank"


@dataclass(frozen=True)
class Run:
    """The logs of one run on rank 0's clock, by rank, and what a reader should know about them."""

    name: str
    logs: tuple[RankLog, ...]
    notes: tuple[str, ...]


def read(directory: Path) -> Run:
    """The run recorded in ``directory``; whoever recorded it, its strings are fit to be shown."""
    logs = [_cleaned(read_log(path)) for path in _paths(directory)]
    logs.sort(key=lambda log: log.rank)
    kept, notes = _of_one_run(logs)
    notes += _missing(kept) + _differing(kept)
    found = tuple(on_one_clock(log) for log in kept)
    _check_length(directory, found)
    return Run(shown(directory.resolve().name), found, tuple(notes))


def _cleaned(log: RankLog) -> RankLog:
    """``log`` without characters that a terminal or a page would obey."""
    names = {name: shown(getattr(log, name)) for name in ("host", "backend", "torch", "paceline")}
    return msgspec.structs.replace(
        log,
        **names,
        notes=[shown_lines(note) for note in log.notes],
        collectives=[_cleaned_call(call) for call in log.collectives],
    )


def _cleaned_call(call: Collective) -> Collective:
    texts = (call.operation, call.group, call.shape, call.line, call.error)
    if all(text.isprintable() for text in texts):
        return call
    fields = ("operation", "group", "shape", "line", "error")
    return msgspec.structs.replace(
        call, **{f: shown(text) for f, text in zip(fields, texts, strict=True)}
    )


def _check_length(directory: Path, logs: Sequence[RankLog]) -> None:
    """Refuse times that cannot be of one run: nothing could be drawn to their scale."""
    spans = [(span, log) for log in logs if (span := times(log))[1] > 0]
    if not spans:
        return
    (began, _), first = min(spans, key=lambda pair: pair[0][0])
    (_, ended), last = max(spans, key=lambda pair: pair[0][1])
    if ended - began > LONGEST:
        raise DamagedLogError(
            str(path_of(directory, last.rank)),
            f"it ends {(ended - began) / (365.25 * 86_400):.0f} years after the beginning of rank "
            f"{first.rank}'s log",
        )


def on_one_clock(log: RankLog) -> RankLog:
    """``log`` with its times on rank 0's clock."""
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
        for event in events
        for field in fields
        if (moment := getattr(event, field)) > 0
    ]
    return (min(moments), max(moments)) if moments else (0.0, 0.0)


_STRETCHES = 64  # of ranks that are listed

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
    found = log_paths(directory)
    if not found:
        raise RunMissingError(str(directory), "it has no log of a rank (rank-00000.json)", RECORD)
    together = sum(path.lstat().st_size for path in found)
    if together > MOST_TOGETHER:
        most = f"{MOST_TOGETHER / 1e9:.1f} GB can be read at a time"
        remedy = "Move the logs of some ranks away; their absence is noted in the report"
        problem = f"its {len(found)} logs have {together / 1e9:.1f} GB, and {most}"
        raise RunMissingError(str(directory), problem, remedy)
    return found


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
    left_out = {o.rank for o in old}
    return [log for log in logs if log.rank not in left_out], [note]


def world_size(logs: Sequence[RankLog]) -> int:
    """How many ranks the run had; of a group that lost some, fewer are left than were numbered."""
    return max(max(log.world_size, log.rank + 1) for log in logs)


def _missing(logs: Sequence[RankLog]) -> list[str]:
    size = world_size(logs)
    here = {log.rank for log in logs}
    absent = [rank for rank in range(size) if rank not in here]
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
    texts = [str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in stretches[:_STRETCHES]]
    texts += ["…"] if len(stretches) > _STRETCHES else []
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(texts)
