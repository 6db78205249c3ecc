"""Pure: from the logs of a run to the facts its report tells. No file, no clock, no page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ..run import RankLog, StepRecord
from .late import (
    Blame,
    Calls,
    Wait,
    blame,
    calls_together,
    longest_waits,
    passes,
    waiting,
)
from .read import times, world_size


@dataclass(frozen=True)
class RankFacts:
    """One rank's share in the run; seconds."""

    rank: int
    host: str
    pid: int
    steps: int
    median_step: float
    median_work: float  # a step without its waiting
    wait_share: float
    last_in: int  # steps in which it launched last
    cost: float  # seconds that the others lost to it
    charged_seconds: float  # of its steps, those whose buckets were recorded


@dataclass(frozen=True)
class SizeBand:
    """Calls of one operation whose messages are about the same size."""

    operation: str
    low: int  # bytes, included
    high: int  # bytes, not included
    calls: int
    nbytes: int  # in all of them, on one rank
    seconds: float  # median, from the last rank's start to the last rank's end
    rate: float  # median bytes a second of them; 0 where nobody saw the end


@dataclass(frozen=True)
class RunFacts:
    """What a report tells about a run."""

    world_size: int
    ranks: tuple[RankFacts, ...]
    hosts: tuple[str, ...]
    backends: tuple[str, ...]
    torch: tuple[str, ...]
    paceline: tuple[str, ...]
    began: float
    ended: float
    first_step: int
    last_step: int
    steps: int  # recorded, on the rank that has most
    median_step: float
    charged_seconds: float  # of all ranks together, in steps whose buckets were recorded
    wait_share: float
    late_share: float  # of that, for ranks that came late; the rest was for the data
    hidden_share: float  # of the time buckets travelled, nobody waited in
    blame: Blame
    sizes: tuple[SizeBand, ...]
    waits: tuple[Wait, ...]


def gather(logs: Sequence[RankLog]) -> RunFacts:
    """All facts of a run; ``logs`` share one clock."""
    together, calls = passes(logs), calls_together(logs)
    charged = blame(together)
    last_in = charged.last_in()
    ranks = tuple(_of_rank(log, charged, last_in.get(log.rank, 0)) for log in logs)
    spans = [span for log in logs if (span := times(log))[1] > 0]
    numbers = [step.number for log in logs for step in log.steps]
    lasted = [pair for log in logs for pair in durations(log)]
    seconds = sum(each for _, each in lasted)
    wait_share = _share(sum(step.waited for step, _ in lasted), seconds)
    return RunFacts(
        world_size=world_size(logs),
        ranks=ranks,
        hosts=_distinct(log.host for log in logs),
        backends=_distinct(log.backend for log in logs),
        torch=_distinct(log.torch for log in logs),
        paceline=_distinct(log.paceline for log in logs),
        began=min((began for began, _ in spans), default=0.0),
        ended=max((ended for _, ended in spans), default=0.0),
        first_step=min(numbers, default=0),
        last_step=max(numbers, default=0),
        steps=max(len(log.steps) for log in logs),
        median_step=_median([r.median_step for r in ranks if r.steps]),
        charged_seconds=sum(one.charged_seconds for one in ranks),
        wait_share=wait_share,
        late_share=wait_share * _share(_sum(charged.lost), _sum(charged.waited)),
        hidden_share=hidden(logs),
        blame=charged,
        sizes=size_bands(calls),
        waits=longest_waits(logs, together, calls),
    )


def durations(log: RankLog) -> list[tuple[StepRecord, float]]:
    """The steps that trained and their seconds, up to the next one's forward.

    The last step has no next, so it is left out, unless it is the only one.
    """
    following = [(a, _later(a.forward_began, b.forward_began)) for a, b in pairwise(log.steps)]
    found = [(step, seconds) for step, seconds in following if step.backward_began > 0]
    last = [
        (s, _later(s.forward_began, s.backward_ended)) for s in log.steps[-1:] if s.backward_ended
    ]
    return found or last


def _later(began: float, ended: float) -> float:
    """Seconds in between, none where the order is wrong; by whole nanoseconds, as clocks count."""
    return max(0.0, round(ended - began, 9))


def hidden(logs: Sequence[RankLog]) -> float:
    """The share of the buckets' travelling time that ranks did not spend waiting for them."""
    ended = [[b for b in log.buckets if 0 < b.launched <= b.finished] for log in logs]
    travelled = sum(_covered([(b.launched, b.finished) for b in each]) for each in ended)
    waited = sum(min(waiting(b), b.finished - b.launched) for each in ended for b in each)
    return max(0.0, 1 - waited / travelled) if travelled > 0 else 0.0


def size_bands(together: Calls) -> tuple[SizeBand, ...]:
    """Messages by operation and size, small before large."""
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for by_rank in together:
        calls = list(by_rank.values())
        nbytes = max(call.nbytes for call in calls)
        began, ended = max(c.began for c in calls), max(c.finished for c in calls)
        key = (calls[0].operation, band(nbytes)[0])
        found.setdefault(key, []).append((nbytes, _later(began, ended)))
    return tuple(_band(name, low, calls) for (name, low), calls in sorted(found.items()))


def band(nbytes: int) -> tuple[int, int]:
    """The half decade that a size falls in: 0 to 1, 1 to 3, 3 to 10, 10 to 30 …"""
    if nbytes < 1:
        return 0, 1
    decade = 10 ** (len(str(nbytes)) - 1)
    return (decade, 3 * decade) if nbytes < 3 * decade else (3 * decade, 10 * decade)


def _band(operation: str, low: int, calls: Sequence[tuple[int, float]]) -> SizeBand:
    seen = [(nbytes, seconds) for nbytes, seconds in calls if seconds > 0]
    rates = [nbytes / seconds for nbytes, seconds in seen]
    return SizeBand(
        operation, low, band(low)[1], len(calls), sum(nbytes for nbytes, _ in calls),
        _median([seconds for _, seconds in seen]), _median(rates),
    )  # fmt: skip


def _of_rank(log: RankLog, charged: Blame, last_in: int) -> RankFacts:
    lasted = durations(log)
    work = [max(0.0, all_of_it - step.waited) for step, all_of_it in lasted]
    charged_steps = {step.number for step in charged.steps}
    return RankFacts(
        rank=log.rank,
        host=log.host,
        pid=log.pid,
        steps=len(log.steps),
        median_step=_median([seconds for _, seconds in lasted]),
        median_work=_median(work),
        wait_share=_share(sum(s.waited for s, _ in lasted), sum(each for _, each in lasted)),
        last_in=last_in,
        cost=charged.cost.get(log.rank, 0.0),
        charged_seconds=sum(each for step, each in lasted if step.number in charged_steps),
    )


def _covered(stretches: list[tuple[float, float]]) -> float:
    """Seconds that lie in at least one stretch."""
    total = reached = 0.0
    for began, ended in sorted(stretches):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _sum(account: Mapping[int, float]) -> float:
    return sum(account.values())


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0
