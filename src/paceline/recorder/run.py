"""A recorded run on disk: one JSON file for each rank, and nothing else needs to be there.

``RUN/rank-00000.json``, ``RUN/rank-00001.json`` and so on, each a :class:`RankLog`. All times are
seconds since the Unix epoch on the rank's own clock; add ``clock_offset`` to compare ranks.
"""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from ..errors import DamagedLogError, LogVersionError

VERSION = 1
MOST_RANKS = 1_000_000
MOST_BYTES = 64 << 20  # of one log; what the recorder keeps is under 5 MB
_EVENTS = msgspec.Meta(max_length=100_000)  # some 20 times what the recorder keeps

# Checked when a log is read, since it may come from anybody. Numbers are whole in a browser too,
# and moments are dates: before the year 10000.
Count = Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]


class Collective(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call on a group; ``finished`` is 0 while it runs, or when nobody waited for it."""

    sequence: Count  # of the group's collectives, equal on all ranks; 0 for send and recv
    operation: str
    group: str
    ranks: Count  # how many take part
    nbytes: Count
    shape: str  # as in "float32[1024, 64]", of the first tensor
    line: str  # of the user's code, as in "train.py:41"; of a bucket, where backward was called
    began: Seconds
    finished: Seconds = 0.0
    bucket: Count = -1
    error: str = ""


class BucketPass(msgspec.Struct, frozen=True, omit_defaults=True):
    """One bucket in one backward pass; ``waited`` is when waiting for it began."""

    step: Count
    bucket: Count
    nbytes: Count
    filled: Seconds
    launched: Seconds
    finished: Seconds
    waited: Seconds = 0.0  # 0: nobody had to wait


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pass of a wrapped model; it lasts until the next one's forward begins."""

    number: Count
    forward_began: Seconds
    forward_ended: Seconds
    backward_began: Seconds = 0.0
    backward_ended: Seconds = 0.0  # the averages are there
    waited: Seconds = 0.0  # seconds of it spent waiting for other ranks


class RankLog(msgspec.Struct, frozen=True):
    """The latest events of one rank, oldest first."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    host: str
    pid: Count
    backend: str
    torch: str
    paceline: str
    clock_offset: Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]  # to be on rank 0's clock
    steps: Annotated[list[StepRecord], _EVENTS]
    buckets: Annotated[list[BucketPass], _EVENTS]
    collectives: Annotated[list[Collective], _EVENTS]
    notes: Annotated[list[str], _EVENTS] = []  # verdicts and warnings, in words
    version: int = VERSION


def path_of(directory: Path, rank: int) -> Path:
    """Where a rank's log lies."""
    return directory / f"rank-{rank:05d}.json"


def write_log(directory: Path, log: RankLog) -> Path:
    """Put a rank's log into ``directory``, whole or not at all."""
    path = path_of(directory, log.rank)
    write_whole(path, msgspec.json.encode(log))
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and never through a link that lies in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each writer has a draft of its own: others may write the same file at the same time.
    draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    with suppress(FileNotFoundError):
        draft.unlink()
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(content)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def read_run(directory: Path) -> list[RankLog]:
    """Return the logs of all ranks in ``directory``, by rank."""
    logs = [read_log(path) for path in log_paths(directory)]
    return sorted(logs, key=lambda log: log.rank)


def log_paths(directory: Path) -> list[Path]:
    """The logs in ``directory``."""
    return sorted(directory.glob("rank-*.json"))


class _Form(msgspec.Struct):
    version: Count


_FORMS, _LOGS = msgspec.json.Decoder(_Form), msgspec.json.Decoder(RankLog)


def read_log(path: Path) -> RankLog:
    """One rank's log, which may come from anybody: what is wrong with it is one error."""
    raw = _read(path)
    try:
        form = _FORMS.decode(raw)
        if form.version != VERSION:
            raise LogVersionError(str(path), found=form.version, known=VERSION)
        log = _LOGS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise DamagedLogError(str(path), str(problem).rstrip(".")) from None
    except RecursionError:
        raise DamagedLogError(str(path), "its values are nested too deeply") from None
    if path.name != path_of(path.parent, log.rank).name:
        raise DamagedLogError(str(path), f"it is the log of rank {log.rank} by its content")
    return log


def _read(path: Path) -> bytes:
    """A file's bytes; only of a plain file, since a pipe or a device may have no end."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        problem = "it is a link" if path.is_symlink() else str(error.strerror)
        raise DamagedLogError(str(path), problem) from None
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise DamagedLogError(str(path), "it is not a regular file")
        if about.st_size > MOST_BYTES:
            most = f"a log has {MOST_BYTES / 1e6:.0f} MB at most"
            raise DamagedLogError(str(path), f"it has {about.st_size / 1e6:.1f} MB, and {most}")
        with open(file, "rb", closefd=False) as opened:
            return opened.read(MOST_BYTES)  # and no more, should it grow meanwhile
    finally:
        os.close(file)
