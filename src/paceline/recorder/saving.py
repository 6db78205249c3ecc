"""The rings as a file: what a rank recorded, put into the form of ``run.py``."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from . import clocks, events
from .run import BucketPass, Collective, RankLog, StepRecord, write_log

RECORD = "PACELINE_RECORD"  # the folder that every rank saves to at its end


def save(directory: str | Path, *, rank: int | None = None) -> Path:
    """Write what this rank has recorded to a file in ``directory``, and return its path.

    All ranks use the same folder; each writes its own file. ``rank`` is needed only if one process
    has several ranks (threads).
    """
    return write_log(Path(directory), rank_log(rank))


def save_all(directory: str | Path) -> list[Path]:
    """Call :func:`save` for every rank of this process."""
    return [save(directory, rank=rank) for rank in ranks_here()]


def ranks_here() -> list[int]:
    """The rank of this process in the job; several where ranks are threads, none without groups."""
    boards = [board for board in list(events.boards.values()) if board.peers]
    size = max((board.size for board in boards), default=0)
    largest = [board for board in boards if board.size == size]
    threads = {board.world_rank for board in largest if board.one_process}
    if threads:
        return sorted(threads)
    if boards and dist.is_available() and dist.is_initialized():
        with suppress(ValueError):  # it has ended since
            return [dist.get_rank()]  # a group that was wrapped knows its own numbers only
    return [largest[0].world_rank] if largest else []


def rank_log(rank: int | None = None) -> RankLog:
    """Return what this rank has recorded, oldest first."""
    here = ranks_here()
    if rank is None:
        rank = here[0] if here else int(os.environ.get("RANK", "0"))
    shift = events.epoch_ns()
    board = _largest(rank)
    several = len(here) > 1

    def own(of: events.Board | None) -> bool:
        return of is None or not several or of.world_rank == rank

    return RankLog(
        rank=rank,
        world_size=max(board.size if board else 1, rank + 1),  # fewer are left of a larger group
        host=socket.gethostname(),
        pid=os.getpid(),
        backend=board.backend if board else "",
        torch=str(torch.__version__),
        paceline=_version(),
        clock_offset=clocks.offset(board) if board else 0.0,
        steps=[_step(e, shift) for e in list(events.steps) if own(e.track.board)],
        buckets=[_bucket(e, shift) for e in list(events.buckets) if own(e.track.board)],
        collectives=[_collective(e, shift) for e in list(events.calls) if own(e.board)],
        notes=[text for of, text in list(events.notes) if own(of)],
    )


def _largest(rank: int) -> events.Board | None:
    known = list(events.boards.values())
    boards = [board for board in known if board.world_rank == rank] or known
    return max(boards, key=lambda board: (board.size, -board.number), default=None)


def _version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "unknown"


def seconds(time: int, shift: int) -> float:
    """A recorded time as seconds since the epoch; 0 stays 0."""
    return (time + shift) / 1e9 if time else 0.0


def _step(entry: events.StepEntry, shift: int) -> StepRecord:
    return StepRecord(
        entry.number,
        seconds(entry.forward_began, shift),
        seconds(entry.forward_ended or entry.forward_began, shift),
        seconds(entry.backward_began, shift),
        seconds(entry.backward_ended, shift),
        entry.waited / 1e9,
    )


def _bucket(entry: events.BucketEntry, shift: int) -> BucketPass:
    return BucketPass(
        entry.step,
        entry.bucket,
        entry.nbytes,
        seconds(entry.filled, shift),
        seconds(entry.launched or entry.filled, shift),
        seconds(entry.finished, shift),
        seconds(entry.waited, shift),
    )


def _collective(entry: events.Entry, shift: int) -> Collective:
    entry.look()
    return Collective(
        entry.sequence,
        entry.kind,
        entry.board.name,
        entry.board.size,
        entry.nbytes,
        events.shape_of(entry),
        events.line_of(entry.code, entry.lasti),
        seconds(entry.began, shift),
        seconds(entry.finished, shift),
        entry.bucket,
        entry.error,
    )
