"""Pure: who came last, and what that cost the others.

No rank can end a step before the slowest has launched its last bucket. Until that moment a rank
that waits, for whichever bucket, waits for the slowest: the earlier buckets too may lie still while
it computes, since it has a part in moving them. After that moment it waits for the data. So the
waiting of each step is cut in two there, and the first part is charged to who launched last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

from ..run import BucketPass, Collective, RankLog

Key = tuple[int, int, int]  # step, bucket, and which pass, where there are several such
Passes = Mapping[Key, Mapping[int, BucketPass]]  # the inner one by rank
Finals = Mapping[tuple[int, int], tuple[float, int]]  # (step, which pass) → moment, rank
Calls = Sequence[Mapping[int, Collective]]  # each by rank


@dataclass(frozen=True)
class LateStep:
    """Who launched last in one step, and the seconds that all other ranks together lost to it."""

    number: int
    rank: int
    lost: float


@dataclass(frozen=True)
class Blame:
    """What lateness cost: by step, by rank that came late, and by rank that waited."""

    steps: tuple[LateStep, ...]
    cost: Mapping[int, float]  # rank → seconds that others lost to it
    lost: Mapping[int, float]  # rank → seconds that it lost to others
    waited: Mapping[int, float]  # rank → seconds that it waited for buckets, for any reason
    by_bucket: Mapping[int, float]  # bucket → seconds that all ranks together waited for it

    def last_in(self) -> Mapping[int, int]:
        """In how many steps each rank launched last."""
        return Counter(step.rank for step in self.steps)


@dataclass(frozen=True)
class Wait:
    """One bucket or call that ranks stood waiting for; the numbers are of who waited longest."""

    rank: int
    ranks: tuple[int, ...]  # all that waited
    step: int  # -1 outside of steps
    what: str  # "bucket 3", or the operation
    nbytes: int
    shape: str
    line: str
    seconds: float
    late_rank: int  # who came last; -1 where the others' logs do not say
    late_seconds: float  # how much of it passed before that


def waiting(one: BucketPass) -> float:
    """Seconds that a rank stood waiting for this bucket."""
    return max(0.0, one.finished - one.waited) if one.waited > 0 else 0.0


def passes(logs: Sequence[RankLog]) -> Passes:
    """The ranks' records of the same bucket in the same pass, together."""
    together: dict[Key, dict[int, BucketPass]] = {}
    for log in logs:
        seen: Counter[tuple[int, int]] = Counter()
        for one in log.buckets:
            name = (one.step, one.bucket)
            together.setdefault((*name, seen[name]), {})[log.rank] = one
            seen[name] += 1
    return together


def final_launches(together: Passes) -> Finals:
    """Where the waiting of each pass is cut: who launched its last bucket last, and when."""
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for (step, _, nth), by_rank in together.items():
        if len(by_rank) > 1:
            latest = max((one.launched, rank) for rank, one in by_rank.items())
            found[step, nth] = max(found.get((step, nth), latest), latest)
    return found


def blame(together: Passes) -> Blame:
    """Cut all waiting for buckets at the last launch, and charge the first part."""
    finals = final_launches(together)
    cost, lost, waited, by_bucket, lost_in = (defaultdict[int, float](float) for _ in range(5))
    for (step, bucket, nth), by_rank in together.items():
        moment, late = finals.get((step, nth), (0.0, -1))
        for rank, one in by_rank.items():
            waited[rank] += waiting(one)
            by_bucket[bucket] += waiting(one)
            if rank != late >= 0:
                for account, key in ((cost, late), (lost, rank), (lost_in, step)):
                    account[key] += before(one, moment)
    last = {step: rank for (step, _), (_, rank) in sorted(finals.items())}
    steps = tuple(LateStep(step, rank, lost_in[step]) for step, rank in last.items())
    return Blame(steps, dict(cost), dict(lost), dict(waited), dict(by_bucket))


def before(one: BucketPass, moment: float) -> float:
    """Seconds of waiting for this bucket that passed before ``moment``."""
    if one.waited <= 0:
        return 0.0
    return max(0.0, min(one.finished, moment) - one.waited)


def longest_waits(
    logs: Sequence[RankLog], together: Passes, calls: Calls, most: int = 25
) -> tuple[Wait, ...]:
    """The longest waits for buckets, and the longest calls made by the user's own code."""
    by_rank, finals = {log.rank: log for log in logs}, final_launches(together)
    lengths: list[tuple[float, Key | int]] = [
        *((max(map(waiting, each.values())), key) for key, each in together.items()),
        *((max(map(lasting, each.values())), place) for place, each in enumerate(calls)),
    ]
    chosen = nlargest(most, (x for x in lengths if x[0] > 0), key=lambda length: length[0])
    return tuple(
        _call_wait(calls[key], by_rank)
        if isinstance(key, int)
        else _bucket_wait(key, together[key], by_rank, finals)
        for _, key in chosen
    )


def lasting(call: Collective) -> float:
    """Seconds that a call of the user's own took; 0 for one that carried a bucket."""
    return max(0.0, call.finished - call.began) if call.bucket < 0 else 0.0


def _bucket_wait(
    key: Key, each: Mapping[int, BucketPass], logs: Mapping[int, RankLog], finals: Finals
) -> Wait:
    rank = max(each, key=lambda r: waiting(each[r]))
    one, (moment, late) = each[rank], finals.get((key[0], key[2]), (0.0, -1))
    call = BucketLines(logs[rank]).find(one)
    return Wait(
        rank=rank,
        ranks=tuple(r for r in each if waiting(each[r]) > 0),
        step=key[0],
        what=f"bucket {key[1]}",
        nbytes=one.nbytes,
        shape=call.shape if call else "",
        line=call.line if call else "",
        seconds=waiting(one),
        late_rank=late,
        late_seconds=before(one, moment) if rank != late else 0.0,
    )


def _call_wait(each: Mapping[int, Collective], logs: Mapping[int, RankLog]) -> Wait:
    rank = max(each, key=lambda r: lasting(each[r]))
    late = max(each, key=lambda r: each[r].began)
    call, steps = each[rank], logs[rank].steps
    place = bisect_right([step.forward_began for step in steps], call.began)
    return Wait(
        rank=rank,
        ranks=tuple(r for r in each if lasting(each[r]) > 0),
        step=steps[place - 1].number if place else -1,
        what=call.operation,
        nbytes=call.nbytes,
        shape=call.shape,
        line=call.line,
        seconds=lasting(call),
        late_rank=late if len(each) > 1 else -1,
        late_seconds=max(0.0, min(call.finished, each[late].began) - call.began),
    )


class BucketLines:
    """Finds the call that carried a bucket, for the line of the user's code in it."""

    def __init__(self, log: RankLog) -> None:
        self._calls: defaultdict[int, list[Collective]] = defaultdict(list)
        for call in sorted(log.collectives, key=lambda call: call.began):
            if call.bucket >= 0:
                self._calls[call.bucket].append(call)
        self._began = {b: [call.began for call in calls] for b, calls in self._calls.items()}

    def find(self, one: BucketPass) -> Collective | None:
        """The call that carried ``one``; None where it was not recorded."""
        # A launch is noted just before its call begins, or just after.
        place = bisect_right(self._began.get(one.bucket, ()), one.finished)
        call = self._calls[one.bucket][place - 1] if place else None
        return call if call and call.began >= one.filled else None


def calls_together(logs: Sequence[RankLog]) -> Calls:
    """The ranks' records of the same call, together, oldest first.

    Groups may share a name, and messages between two ranks have no number. Where more ranks claim a
    call than take part in it, or they name different operations, each record stands for itself.
    """
    together: dict[tuple[str, int, int], dict[int, Collective]] = {}
    for log in logs:
        seen: Counter[tuple[str, int]] = Counter()
        for call in log.collectives:
            name = (call.group, call.sequence)
            together.setdefault((*name, seen[name]), {})[log.rank] = call
            seen[name] += 1
    found: list[Mapping[int, Collective]] = []
    for by_rank in together.values():
        found.extend([by_rank] if _is_one(by_rank) else ({r: c} for r, c in by_rank.items()))
    return sorted(found, key=lambda by_rank: min(call.began for call in by_rank.values()))


def _is_one(by_rank: Mapping[int, Collective]) -> bool:
    """Whether records that carry the same name and number can be of one call."""
    first = next(iter(by_rank.values()))
    return len(by_rank) == 1 or (
        first.sequence > 0
        and len(by_rank) <= first.ranks
        and all(c.operation == first.operation and c.ranks == first.ranks for c in by_rank.values())
    )
