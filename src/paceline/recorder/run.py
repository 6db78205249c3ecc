"""A recorded run on disk: one JSON file for each rank, and nothing else needs to be there.

``RUN/rank-00000.json``, ``RUN/rank-00001.json`` and so on, each a :class:`RankLog`. All times are
seconds since the Unix epoch on the rank's own clock; add ``clock_offset`` to compare ranks.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

VERSION = 1


class Collective(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call on a group; ``finished`` is 0 while it runs, or when nobody waited for it."""

    sequence: int  # of the group's collectives, equal on all ranks; 0 for send and recv
    operation: str
    group: str
    ranks: int  # how many take part
    nbytes: int
    shape: str  # as in "float32[1024, 64]", of the first tensor
    line: str  # of the user's code, as in "train.py:41"; of a bucket, where backward was called
    began: float
    finished: float = 0.0
    bucket: int = -1
    error: str = ""


class BucketPass(msgspec.Struct, frozen=True, omit_defaults=True):
    """One bucket in one backward pass; ``waited`` is when waiting for it began."""

    step: int
    bucket: int
    nbytes: int
    filled: float
    launched: float
    finished: float
    waited: float = 0.0  # 0: nobody had to wait


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pass of a wrapped model; it lasts until the next one's forward begins."""

    number: int
    forward_began: float
    forward_ended: float
    backward_began: float = 0.0
    backward_ended: float = 0.0  # the averages are there
    waited: float = 0.0  # seconds of it spent waiting for other ranks


class RankLog(msgspec.Struct, frozen=True):
    """What one rank recorded: the latest events, oldest first."""

    rank: int
    world_size: int
    host: str
    pid: int
    backend: str
    torch: str
    paceline: str
    clock_offset: float  # seconds to add to be on rank 0's clock
    steps: list[Step]
    buckets: list[BucketPass]
    collectives: list[Collective]
    notes: list[str] = []  # verdicts and warnings, in words
    version: int = VERSION


def path_of(directory: Path, rank: int) -> Path:
    """Where a rank's log lies."""
    return directory / f"rank-{rank:05d}.json"


def write_log(directory: Path, log: RankLog) -> Path:
    """Put a rank's log into ``directory``, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    path = path_of(directory, log.rank)
    draft = path.with_suffix(".part")
    draft.write_bytes(msgspec.json.encode(log))
    draft.replace(path)
    return path


def read_run(directory: Path) -> list[RankLog]:
    """All ranks' logs in ``directory``, by rank."""
    found = sorted(directory.glob("rank-*.json"))
    logs = [msgspec.json.decode(path.read_bytes(), type=RankLog) for path in found]
    return sorted(logs, key=lambda log: log.rank)
