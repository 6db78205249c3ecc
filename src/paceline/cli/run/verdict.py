"""Which rank failed first, what came of it for the others, and how that is told. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

_WIDTH = 240  # characters of another rank's message
LONE = 10.0  # seconds after which it is said that a rank has ended while others run


class FailureReport(msgspec.Struct, frozen=True):
    """How a script failed, as its rank wrote it down (``script.py``)."""

    rank: int
    when: float  # on the host's monotonic clock, as RankEnding.when
    kind: str
    message: str
    traceback: str
    place: str
    consequence: bool  # of another rank's failure, by its kind


@dataclass(frozen=True)
class RankEnding:
    """How a rank's process ended, as its launcher saw it."""

    code: int  # negative: killed by that signal
    when: float  # on the host's monotonic clock: others are set, or jump
    stopped: bool = False  # by us, because another rank had failed


@dataclass(frozen=True)
class LaunchVerdict:
    """The first failure, and one line for each of the others."""

    rank: int
    code: int  # what the launcher ends with
    headline: str
    others: tuple[str, ...]
    traceback: str
    consequence: bool  # of something that is not among these ranks


def read_reports(folder: Path) -> dict[int, FailureReport]:
    """The notes that ranks have left in ``folder``."""
    reports = {}
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, msgspec.DecodeError):  # the script may have been at the folder
            report = msgspec.json.decode(path.read_bytes(), type=FailureReport)
            reports[report.rank] = report
    return reports


def judge(
    endings: Mapping[int, RankEnding],
    reports: Mapping[int, FailureReport],
    size: int,
    noun: str = "rank",
) -> LaunchVerdict | None:
    """Tell the first failure from its consequences; None when nothing failed.

    ``noun`` says what has the numbers; members of an elastic job are not counted by ``size``.

    Ranks that only noticed another's end come after those that failed of themselves: a rank may
    close its group on the way out, and the others then raise before it has ended.
    """
    failed = [rank for rank, end in endings.items() if _failed(end, reports.get(rank))]
    if not failed:
        return None
    first = min(failed, key=lambda rank: _order(endings[rank], reports.get(rank)))
    report = reports.get(first)
    what = describe(endings[first], report)
    return LaunchVerdict(
        first,
        exit_code(endings[first], report),
        f"{noun} {first}{f' of {size}' if size else ''} failed first: {what}",
        tuple(_tell_others(endings, reports, first, noun)),
        report.traceback if report else "",
        report is not None and report.consequence,
    )


def why_again(verdict: LaunchVerdict | None, machines: int) -> str:
    """Why all ranks start again; what is only a consequence has its cause on another host."""
    if verdict is None:
        return "another host starts its ranks again"
    if verdict.consequence and machines > 1:
        return "a rank of another host has failed"
    return verdict.headline


def _failed(end: RankEnding, report: FailureReport | None) -> bool:
    return report is not None or (end.code != 0 and not end.stopped)


def _order(end: RankEnding, report: FailureReport | None) -> tuple[bool, float]:
    return (report.consequence, report.when) if report else (False, end.when)


def exit_code(end: RankEnding, report: FailureReport | None) -> int:
    """What a shell would show for it: signals from 128 on."""
    if end.stopped or end.code == 0:  # it failed and then hung, or was stopped on its way out
        return 1
    return 128 - end.code if end.code < 0 else end.code


def describe(end: RankEnding, report: FailureReport | None) -> str:
    """A rank's failure in one line."""
    at = f" (at {report.place})" if report and report.place else ""
    if report and report.kind != "SystemExit":
        return f"{one_line(report)}{at}"
    if report and report.message:
        return f"it ended with: {_short(report.message)}{at}"
    if end.code < 0:
        hint = " (out of memory? see dmesg)" if end.code == -signal.SIGKILL else ""
        return f"it was killed by {signal_name(-end.code)}{hint}"
    return f"it ended with exit code {end.code}{at}"


def one_line(report: FailureReport) -> str:
    """The kind of error and the first line of its message."""
    return f"{report.kind}: {_short(report.message)}" if report.message else report.kind


def _short(message: str) -> str:
    line = " ".join(message.split("\n", 1)[0].split())
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"


def _tell_others(
    endings: Mapping[int, RankEnding], reports: Mapping[int, FailureReport], first: int, noun: str
) -> Iterator[str]:
    """One line for each kind of ending; ranks with the same one share a line."""
    only_noticed = first in reports and reports[first].consequence
    fates: dict[str, list[int]] = {}
    lines: dict[str, str] = {}
    for rank in sorted(endings.keys() - {first}):
        fate, line = _fate(endings[rank], reports.get(rank), only_noticed)
        fates.setdefault(fate, []).append(rank)
        lines.setdefault(fate, line)
    for fate, ranks in fates.items():
        if fate:
            yield f"{named(ranks, noun)} {lines[fate]}"


def _fate(end: RankEnding, report: FailureReport | None, only_noticed: bool) -> tuple[str, str]:
    """What happened to another rank: a key to group by, and the text."""
    if report and report.kind == "KeyboardInterrupt":
        return "stopped", "then was stopped"
    if report and report.kind != "SystemExit":
        return report.kind, f"then failed with {one_line(report)}"
    if end.stopped:
        return "stopped", "then was stopped"
    if end.code != 0:
        words = f"then failed: {describe(end, report)}"
        return words, words
    # That others ended well matters only where the failure is that they were missed.
    return ("ended", "had ended before, with exit code 0") if only_noticed else ("", "")


def tell_lone(
    endings: Mapping[int, RankEnding], running: list[int], without: Collection[int], now: float
) -> str:
    """That ranks have ended well while others run, which may wait for them; empty if none has.

    Nobody waits for a rank ``without`` which the others go on.
    """
    gone = sorted(rank for rank, end in endings.items() if not end.code and rank not in without)
    if not gone or not running or now - max(endings[rank].when for rank in gone) < LONE:
        return ""
    waiting = ", maybe waiting for it" if len(gone) == 1 else ""
    left = f"{named(running)} still run{'' if len(running) > 1 else 's'}"
    return f"{named(gone)} ended {LONE:g} s ago with exit code 0; {left}{waiting}"


def named(ranks: list[int], noun: str = "rank") -> str:
    """``rank 3``, or ``ranks 0, 2-4``."""
    return f"{noun}{'s' if len(ranks) > 1 else ''} {runs(ranks)}"


def runs(ranks: list[int]) -> str:
    """Numbers as text, with consecutive ones as ranges.

    >>> runs([0, 2, 3, 4, 7])
    '0, 2-4, 7'
    """
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][-1] == rank - 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ', '}{run[-1]}"
        for run in found
    )


def signal_name(number: int) -> str:
    """``SIGSEGV`` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
