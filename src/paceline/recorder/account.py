"""Account: what a rank reports about itself, in a form that can be sent.

A rank that waits compares accounts of all ranks (``verdict.py``). Nothing here is a tensor or a
pickle: numbers, words, and lines of the user's code.
"""

from __future__ import annotations

import linecache
import os
import socket
import threading
from collections.abc import Mapping
from enum import Enum
from types import FrameType

import msgspec

from . import events
from .threads import frames

CALLS, STEPS, FRAMES = 32, 16, 400  # the latest that are told
NAMES = 6  # of a bucket's parameters
DROPPED = "a line that dropped it"  # of a group that was not shut down, but is no more
_WAITING = ("groups", "_reducer", "_transport", "join")  # folders of ours where one waits


class Told(msgspec.Struct, frozen=True):
    """One collective of the group."""

    sequence: int  # 0 for a message between two ranks
    operation: str
    shape: str  # for people
    dtype: str
    count: int  # elements of the first tensor
    reduction: str
    root: int
    line: str
    running: bool
    bucket: int = -1
    names: list[str] = []
    more: int = 0  # parameters that are not named
    error: str = ""  # that it ended with
    purpose: str = ""  # of a call that the library made by itself
    on_device: bool = False  # it was handed to a device, and the host goes on


class Went(msgspec.Struct, frozen=True):
    """One step of a wrapped model."""

    model: int
    number: int
    line: str  # of the forward
    backward: bool  # whether one followed


class Silence(Enum):
    """Why a rank does not answer."""

    ENDED = "ended"  # it no longer listens
    MUTE = "mute"  # somebody does, and says nothing
    UNKNOWN = "unknown"  # it has left no address


class Spot(msgspec.Struct, frozen=True):
    """Where a thread is."""

    line: str  # train.py:41
    function: str
    text: str  # the line itself


class Account(msgspec.Struct, frozen=True):
    """What a rank has done in a group, and where it is now."""

    rank: int
    pid: int
    host: str
    made: int  # collectives so far
    calls: list[Told]
    steps: list[Went]
    user: Spot | None = None  # the innermost line of the user's code
    deepest: Spot | None = None  # the innermost of all
    inside: bool = False  # it is in a call of ours
    closed: str = ""  # the line that ended the group here
    elsewhere: str = ""  # a call of another group that it waits in
    ended: str = ""  # how its process ended, when these are its last words
    time: float = 0.0  # seconds since the epoch
    doing: str = ""  # why it may be long in coming
    not_reached: int = 0  # a call that it has made, while its device does what came before
    heard: bool = False  # put together from what it told before

    def call(self, sequence: int) -> Told | None:
        """The call of that number, if it is among the latest."""
        return next((c for c in self.calls if c.sequence == sequence and sequence), None)


def account_of(
    board: events.Board, ended: str = "", calls: int = CALLS, steps: int = STEPS
) -> Account:
    """What the rank of ``board`` has to tell now: its latest calls and steps.

    Steps without a backward pass are told though they are older: it may be missed much later.
    """
    # Whether it has ended comes first: a call that ends it must be among those that are told.
    closed = board.closed or ("" if board.group() is not None else DROPPED)
    mine = [entry for entry in list(events.calls) if entry.board is board][-calls:]
    # A variable for the frame may hold this very function, and all that its callers hold: an engine
    # that they have just closed would keep its threads until the garbage collector comes by.
    user, deepest, inside, waits = _where(None if ended else _frame_of(board))
    return Account(
        rank=board.rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        made=board.made,
        calls=[told(entry) for entry in mine],
        steps=_steps(board, steps),
        user=user,
        deepest=deepest,
        inside=inside,
        closed=closed,
        elsewhere=_elsewhere(board, waits),
        ended=ended,
        doing=board.doing,
        not_reached=0 if ended else board.not_reached(),
        time=(events.now() + events.epoch_ns()) / 1e9,
    )


def told(entry: events.Entry) -> Told:
    """A call, as other ranks hear of it."""
    names = list(entry.track.names(entry.bucket)) if entry.track is not None else []
    count = 1
    for size in entry.shape:
        count *= size
    return Told(
        sequence=entry.sequence,
        operation=entry.kind,
        shape=events.shape_of(entry),
        dtype="" if entry.dtype is None else str(entry.dtype),
        count=count,
        reduction=entry.reduction,
        root=entry.root,
        line=events.line_of(entry.code, entry.lasti),
        running=entry.look(),
        bucket=entry.bucket,
        names=names[:NAMES],
        more=max(0, len(names) - NAMES),
        error=entry.error,
        purpose=entry.purpose,
        on_device=entry.on_device,
    )


def _steps(board: events.Board, most: int) -> list[Went]:
    kept = [entry for entry in list(events.steps) if entry.track.board is board]
    without = [entry for entry in kept[:-most] if not entry.backward_began]
    found = [*without[-most:], *kept[-most:]]
    return [
        Went(
            entry.track.model,
            entry.number,
            events.line_of(entry.code, entry.lasti),
            entry.backward_began > 0,
        )
        for entry in found
    ]


def _elsewhere(board: events.Board, waits: bool) -> str:
    """A call of another group that the same rank waits in: the oldest that runs.

    One that was only started counts if the rank ``waits`` for something.
    """
    for entry in list(events.calls):
        same = entry.board.thread == board.thread and entry.board is not board
        if same and (waits or entry.work is None) and entry.look():
            where = events.line_of(entry.code, entry.lasti)
            return f"{entry.kind} of the group {entry.board.name} at {where}"
    return ""


# -- where a thread is ------------------------------------------------------------------------


def _frame_of(board: events.Board) -> FrameType | None:
    """The thread that uses the group, else the main one."""
    return _first_of(frames(), board.thread, threading.main_thread().ident or 0)


def _first_of(threads: Mapping[int, FrameType], *numbers: int) -> FrameType | None:
    """The first of some threads that is there.

    A function of its own, which none of the frames can be inside of: nothing here holds itself.
    """
    return next((threads[number] for number in numbers if number in threads), None)


def _where(frame: FrameType | None) -> tuple[Spot | None, Spot | None, bool, bool]:
    """The user's line, the innermost one, whether ours come between the two, and one that waits."""
    deepest = None if frame is None else spot(frame)
    inside, waits, library = False, False, None
    for _ in range(FRAMES):
        if frame is None:
            break
        kind = events.whose(frame.f_code.co_filename)
        if kind == events.USER:
            return spot(frame), deepest, inside, waits
        if kind == events.LIBRARY and library is None:
            library = spot(frame)
        ours = _is_waiting_place(frame.f_code.co_filename)
        inside, waits = inside or ours, waits or (ours and frame.f_code.co_name == "wait")
        frame = frame.f_back
    return library, deepest, inside, waits


def _is_waiting_place(filename: str) -> bool:
    folder = os.path.dirname(os.path.dirname(__file__))
    return any(filename.startswith(os.path.join(folder, name)) for name in _WAITING)


def spot(frame: FrameType) -> Spot:
    """Where a frame is."""
    number, filename = frame.f_lineno or 0, frame.f_code.co_filename
    text = linecache.getline(filename, number).strip()
    return Spot(f"{events.shown(filename)}:{number}", frame.f_code.co_name, text[:120])
