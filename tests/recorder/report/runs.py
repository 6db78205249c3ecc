"""Made-up runs for the report's tests: seeded, so that each call gives the same logs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from paceline.recorder.run import BucketPass, Collective, RankLog, StepRecord, write_log

ZERO = 1_790_000_000.0  # a moment in 2026
BUCKETS = (1_048_576, 6_291_456, 6_291_456, 2_621_440)  # bytes
LINE = "train.py:41"


def made_up_run(
    ranks: int = 4,
    steps: int = 40,
    *,
    slow: int | None = None,
    slowness: float = 0.4,
    seed: int = 0,
    hosts: int = 1,
    buckets: Sequence[int] = BUCKETS,
    absent: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> list[RankLog]:
    """Ranks in step: buckets end when the last rank has launched them, and then some."""
    chance = random.Random(seed)
    made = [_Rank(rank, ranks) for rank in range(ranks)]
    now = ZERO
    for number in range(steps):
        now = _one_step(made, number, now, chance, slow, slowness, buckets)
    return [
        one.log(f"node{one.rank * hosts // ranks}", notes if one.rank == 0 else ())
        for one in made
        if one.rank not in absent
    ]


def write_run(directory: Path, logs: Sequence[RankLog]) -> Path:
    for log in logs:
        write_log(directory, log)
    return directory


class _Rank:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.steps: list[StepRecord] = []
        self.buckets: list[BucketPass] = []
        self.calls: list[Collective] = []
        self.sequence = 0

    def call(self, operation: str, nbytes: int, began: float, ended: float, bucket: int) -> None:
        line = LINE if bucket >= 0 else "train.py:57"
        shape = f"float32[{nbytes // 4}]"
        self.calls.append(
            Collective(
                self.sequence,
                operation,
                "world",
                self.world_size,
                nbytes,
                shape,
                line,
                began,
                ended,
                bucket,
            )
        )
        self.sequence += 1

    def log(self, host: str, notes: Sequence[str]) -> RankLog:
        return RankLog(
            self.rank, self.world_size, host, 4000 + self.rank, "shm", "2.13.0", "0.1.0", 0.0,
            self.steps, self.buckets, self.calls, list(notes),
        )  # fmt: skip


def _one_step(
    made: list[_Rank],
    number: int,
    now: float,
    chance: random.Random,
    slow: int | None,
    slowness: float,
    buckets: Sequence[int],
) -> float:
    """Everybody starts at ``now`` and ends at what is returned."""
    speed = [1 + chance.uniform(0, 0.03) + (slowness if r.rank == slow else 0) for r in made]
    forward = [now + 0.012 * s for s in speed]
    part = 0.026 / len(buckets)
    launches = [
        [f + part * s * (i + 1) for i in range(len(buckets))]
        for f, s in zip(forward, speed, strict=True)
    ]
    ends: list[float] = []
    for i, nbytes in enumerate(buckets):
        began = max([row[i] for row in launches] + ends[-1:])
        ends.append(began + nbytes / 2e9 + chance.uniform(0, 2e-4))
    over = [
        _passes(one, number, now, forward[r], launches[r], ends, buckets)
        for r, one in enumerate(made)
    ]
    said = max(over) + 0.0004
    if number % 10 == 9:  # the loss is shared now and then
        for one, end in zip(made, over, strict=True):
            one.call("all_reduce", 4, end + 0.0001, said, -1)
    return said + 0.004


def _passes(
    one: _Rank,
    number: int,
    now: float,
    forward: float,
    launches: list[float],
    ends: list[float],
    buckets: Sequence[int],
) -> float:
    backward_over = reached = launches[-1]
    waited = 0.0
    for i, nbytes in enumerate(buckets):
        waits = ends[i] > reached and ends[i] > backward_over
        begins = reached if waits else 0.0
        waited += ends[i] - begins if waits else 0.0
        reached = max(reached, ends[i])
        filled = launches[i] - 0.0003
        one.buckets.append(BucketPass(number, i, nbytes, filled, launches[i], ends[i], begins))
        one.call("all_reduce", nbytes, launches[i], ends[i], i)
    end = reached + 0.0001
    one.steps.append(StepRecord(number, now, forward, forward + 0.0002, end, waited))
    return end
