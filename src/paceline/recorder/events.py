"""Events: what the ranks of this process did lately, in rings that any layer may write to.

A :class:`Board` is where one rank's end of a group writes its calls, a :class:`Track` where one
wrapped model writes its steps and buckets. Writing must cost next to nothing: an entry is a few
attributes and one append, a line of the user's code is kept as a code object and an offset and is
looked up only when somebody asks. Entries hold no tensor, no group and no model.

All times here are of ``time.perf_counter_ns``; :func:`epoch_ns` turns them into dates.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Protocol

CALLS, STEPS, BUCKETS, BOARDS = 4096, 512, 4096, 64  # how many are kept
SWITCH = "PACELINE_RECORDER"

now = time.perf_counter_ns
_getframe = sys._getframe
_get_ident = threading.get_ident
Names = Callable[[int], Sequence[str]]


class CallFacts(Protocol):
    """What a call on a group tells of itself; ``groups/engine.py`` has the real one."""

    kind: Any
    inputs: Any
    outputs: Any
    reduction: str
    root: int


class DeviceProgress(Protocol):
    """How far a device has come; ``groups/engines/marks.py`` has the real one."""

    def comes(self) -> None: ...
    def is_reached(self) -> bool: ...
    def is_completed(self) -> bool: ...


def is_over(work: Any) -> bool:
    """Whether a work has ended, well or badly; nothing is done about it.

    ``is_completed`` may do what is left to do, and tell of an error.
    """
    look: Callable[[], bool] = getattr(work, "is_over", None) or work.is_completed
    return bool(look())


def _has_ended(work: Any) -> bool:
    """Whether nothing more is to be expected of a work: it is over, or cannot say."""
    try:
        with asking[0]():
            return is_over(work)
    except Exception:  # as each question to a device raises that has failed
        return True


@dataclass(init=False, eq=False, repr=False, slots=True)
class Entry:
    """One call on a group. Its maker sets all of it: a constructor would cost as much again."""

    board: Board
    sequence: int  # among the collectives of the group; 0 for a message between two ranks
    kind: str
    reduction: str
    root: int
    nbytes: int
    shape: Sequence[int]  # of the first tensor
    dtype: Any
    code: CodeType | None  # of the line that made it, with lasti
    lasti: int
    track: Track | None  # of the model whose reducer made it
    bucket: int  # -1 when it is not the reducer's
    purpose: str  # of a call that the library makes by itself; empty: the user's own
    began: int
    finished: int  # 0 while it runs, or when nobody waited for it
    error: str
    on_device: bool  # it was handed to a device, and the host went on
    work: Callable[[], Any] | None  # of a call that was started: a weak reference to it

    def follow(self, work: Any, *, on_device: bool) -> None:
        """The call was started, and ``work`` will know when it ends.

        What a device does later is looked at only if it takes long (:meth:`Board.reopen`).
        """
        self.work = weakref.ref(work)
        if on_device:
            self._goes_on()

    def handed_to(self, marks: DeviceProgress) -> None:
        """The call is in the queue of a device, and ``marks`` know when it ends."""
        self.work = weakref.ref(marks)
        self._goes_on()

    def runs_until(self, work: Any) -> None:
        """The call runs on a device until ``work`` is over, though the host went on."""
        self.on_device, self.work, self.finished = True, weakref.ref(work), 0
        latest = self.board.on_device  # a call that was handed over after this one stays it
        if latest is None or latest.began <= self.began:
            self.board.on_device = self

    def _goes_on(self) -> None:
        self.finished, self.on_device, self.board.on_device = now(), True, self

    def look(self) -> bool:
        """Whether it still runs; notes the end of one that was started, if it has come."""
        if self.finished or self.error:
            return False
        if self.work is None:
            return True
        work = self.work()
        if work is None:  # nobody waits for it, and nobody knows
            return False
        later = self.board.on_device is not self and work is self.board.marks  # a later call's
        if (later or _has_ended(work)) and not self.finished:
            self.finished = now()
        return not self.finished


@dataclass(init=False, eq=False, repr=False, slots=True)
class StepEntry:
    """One pass of a wrapped model."""

    track: Track
    number: int
    code: CodeType | None  # of the line that called forward, with lasti
    lasti: int
    forward_began: int
    forward_ended: int
    backward_began: int
    backward_ended: int
    waited: int  # nanoseconds


@dataclass(init=False, eq=False, repr=False, slots=True)
class BucketEntry:
    """One bucket in one backward pass."""

    track: Track
    step: int
    bucket: int
    nbytes: int
    filled: int
    launched: int
    finished: int
    waited: int  # when waiting for it began; 0: nobody had to
    call: Entry | None


calls: deque[Entry] = deque(maxlen=CALLS)
steps: deque[StepEntry] = deque(maxlen=STEPS)
buckets: deque[BucketEntry] = deque(maxlen=BUCKETS)
notes: deque[tuple[Board | None, str]] = deque(maxlen=64)
boards: dict[int, Board] = {}  # by number, also of groups that have ended


@dataclass
class Past:
    """What is counted for good, though rings and boards forget."""

    steps: int = 0  # the next three: of boards that were let go of
    collectives: int = 0
    bytes_sent: float = 0.0
    notes: int = 0  # all there were


past = Past()
counting = [threading.RLock()]  # what is on a board passes to ``past`` at once

# Set by recorder/watch.py, which this file does not know.
on_board: list[Callable[[Board], None]] = []  # a board has opened
on_close: list[Callable[[Board], None]] = []  # a group has ended here
asking: list[Callable[[], contextlib.AbstractContextManager[None]]] = [contextlib.nullcontext]
on_failure: list[Callable[[Entry, BaseException], None]] = []  # a call has failed

_numbers = itertools.count(1)
_shared: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()
_on: list[bool | None] = [None]


def enabled() -> bool:
    """Whether groups made now are recorded; ``PACELINE_RECORDER=0`` says no."""
    return os.environ.get(SWITCH, "1") != "0" if _on[0] is None else _on[0]


def switch(on: bool | None) -> None:
    """Record groups made from now on, or do not; None leaves it to the environment."""
    _on[0] = on


class Board:
    """Where one rank's end of a group writes its calls."""

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        *,
        members: Sequence[int] = (),
        backend: str = "",
        store: Callable[[], Any] = lambda: None,
        traffic: Any = None,
        peers: bool = True,
        one_process: bool = False,
        announced: bool = False,
        checked: bool = True,
    ) -> None:
        self.number = next(_numbers)
        self.group = weakref.ref(group)
        self.rank, self.size = rank, size
        self.members = tuple(members) or tuple(range(size))
        self.backend = backend
        self.store = store  # where the ranks met, or None; it must not keep the group alive
        self.traffic = traffic
        self.peers = peers  # there are other ranks
        self.one_process = one_process  # which are threads of this process
        self.announced = announced  # calls are told to other ranks: a difference may end a process
        self.checked = checked  # the engine refuses calls that differ between ranks
        self.tell: Callable[[Entry], None] | None = None  # whoever wants to hear of each call
        self.thread = _get_ident()  # that made it, or its latest call: where the rank is
        self.made = 0  # collectives so far
        self.models = 0  # wrapped models that average over it
        self.steps = 0  # of all of them
        self.latest: Entry | None = None
        self.on_device: Entry | None = None  # the latest that was handed to a device
        self.marks: DeviceProgress | None = None  # of the engine, where it uses a device
        self.by: tuple[Track, int] | None = None  # the bucket whose call comes next
        self.purpose = ""  # what the calls that come are for, unless they are the user's own
        self.closed = ""  # the line that ended the group
        self.doing = ""  # why this rank may be long in coming, as in "compiles its first step"
        self.checks = "warn"  # what becomes of calls from different lines; "off": nothing
        self.label = ""

    @property
    def world_rank(self) -> int:
        """This rank as the whole job counts."""
        return self.members[self.rank]

    @property
    def name(self) -> str:
        """The name of the group in messages."""
        if self.label:
            return self.label
        return f"{self.backend}:{','.join(map(str, self.members)) if self.size <= 8 else self.size}"

    def begin(self, call: CallFacts, nbytes: int) -> Entry:
        """A call is about to be made."""
        entry = Entry()
        entry.board, entry.kind = self, call.kind
        if call.kind in ("send", "recv"):
            entry.sequence = 0
        else:
            self.made = entry.sequence = self.made + 1
        tensors = call.inputs or call.outputs
        entry.shape, entry.dtype = (tensors[0].shape, tensors[0].dtype) if tensors else ((), None)
        entry.nbytes, entry.reduction, entry.root = nbytes, call.reduction, call.root
        if self.by is None:
            entry.track, entry.bucket = None, -1
            entry.code, entry.lasti = caller(_getframe(2))
            if entry.code is not None:  # not a thread of the autograd engine
                self.thread = _get_ident()
        else:
            entry.track, entry.bucket = track, _ = self.by
            entry.code, entry.lasti = track.code, track.lasti
        entry.finished, entry.error, entry.on_device, entry.work = 0, "", False, None
        entry.purpose = self.purpose
        entry.began = now()  # others may look at it from here on
        self.latest = entry
        calls.append(entry)
        if self.tell is not None:
            self.tell(entry)
            entry.began = now()
        return entry

    def reopen(self, seconds: float) -> Entry | None:
        """The latest call on a device, if it has not ended there after so long: it runs again."""
        entry = self.on_device
        if entry is None or entry.work is None or entry.error:
            return None
        if now() - entry.began < seconds * 1e9:
            return None
        work, noted = entry.work(), entry.finished
        if work is None or _has_ended(work):
            if self.on_device is entry:  # it has ended, and is not asked for again
                self.on_device = None
            return None
        if entry.finished == noted:  # else somebody has waited for its end meanwhile
            entry.finished = 0
        return entry

    def not_reached(self) -> int:
        """The number of the latest call, if the device still does what came before it; else 0."""
        entry, marks = self.on_device, self.marks
        if entry is None or marks is None:
            return 0
        try:
            with asking[0]():
                return 0 if marks.is_reached() else entry.sequence
        except Exception:  # as each question to a device raises that has failed
            return 0

    def close(self) -> None:
        """The group has ended on this rank."""
        if not self.closed:
            self.closed = line_of(*caller(_getframe(1))) or "its end"
            for told in on_close:
                told(self)


def open_board(
    group: Any, rank: int, size: int, *, shared: bool = False, **facts: Any
) -> Board | None:
    """A board for ``group``; None when nothing is to be recorded.

    ``shared``: the one that was opened for the same group before, if there is one.
    """
    if not enabled():
        return None
    if shared and group in _shared:
        return _shared[group]
    board = Board(group, rank, size, **facts)
    if shared:
        _shared[group] = board
    _forget_old()
    boards[board.number] = board
    for told in on_board:
        told(board)
    return board


STANDING_IN = "a call of Join, for a rank that has run out"
SHARD_SUMS = "the wrapper's sums over the shards of a step"
# Calls whose lines tell nothing of their order: it depends on a rank's data where it makes them.
ANYWHERE = frozenset({STANDING_IN, SHARD_SUMS})


@contextlib.contextmanager
def calls_for(board: Board | None, purpose: str) -> Iterator[None]:
    """Say of the calls made inside that the library makes them, and what for."""
    if board is None:
        yield
        return
    before, board.purpose = board.purpose, purpose
    try:
        yield
    finally:
        board.purpose = before


def _forget_old() -> None:
    """Groups may come and go; the latest that have ended are kept for questions."""
    known = boards.copy()  # in one go: another thread may open a board meanwhile
    gone = [n for n, board in known.items() if board.closed or board.group() is None]
    for number in gone[: max(0, len(gone) - BOARDS)]:
        with counting[0]:
            board = boards.pop(number, None)
            if board is not None:
                sent = 0 if board.traffic is None else board.traffic.bytes_sent
                past.steps += board.steps
                past.collectives += board.made
                past.bytes_sent += sent


def note(board: Board | None, text: str) -> None:
    """Keep a verdict or a warning for the log."""
    past.notes += 1
    notes.append((board, text))


def failed(entry: Entry, error: BaseException) -> None:
    """A call ended with ``error``, which whoever listens may add to."""
    if entry.error:
        return
    entry.finished, entry.error = now(), type(error).__name__
    for told in on_failure:
        told(entry, error)


class Track:
    """Where one wrapped model writes its steps and buckets.

    ``names`` gives the parameters of a bucket; it must not keep the model alive.
    """

    def __init__(self, board: Board, names: Names) -> None:
        self.board = board
        board.models = self.model = board.models + 1
        self.names = names
        self.steps = 0
        self.step: StepEntry | None = None
        self.code: CodeType | None = None  # where the latest backward pass was called
        self.lasti = -1

    def forward_begins(self) -> None:
        """A step begins."""
        entry = StepEntry()
        self.steps = entry.number = self.steps + 1
        self.board.steps += 1
        entry.track = self
        entry.code, entry.lasti = caller(_getframe(1))
        entry.forward_ended = entry.backward_began = entry.backward_ended = entry.waited = 0
        entry.forward_began = now()  # others may look at it from here on
        self.step = entry
        steps.append(entry)

    def forward_ends(self) -> None:
        """The model's output is there."""
        if self.step is not None and not self.step.forward_ended:
            self.step.forward_ended = now()

    def backward_begins(self) -> None:
        """Gradients come."""
        self.code, self.lasti = caller(_getframe(1))
        step = self.step
        if step is not None:
            if self.code is None:  # a thread of the autograd engine
                self.code, self.lasti = step.code, step.lasti
            step.backward_began = step.backward_began or now()

    def backward_ends(self, waited: int = 0) -> None:
        """The averages are there, or the pass had none to make."""
        if self.step is not None and self.step.backward_began:
            self.step.backward_ended = now()
            self.step.waited += waited

    def bucket_filled(self, index: int) -> BucketEntry:
        """A bucket has all its gradients."""
        entry = BucketEntry()
        entry.track = self
        entry.step, entry.bucket, entry.nbytes = self.steps, index, 0
        entry.launched = entry.finished = entry.waited = 0
        entry.call = None
        entry.filled = now()  # others may look at it from here on
        buckets.append(entry)
        return entry


def shape_of(entry: Entry) -> str:
    """The first tensor of a call, as ``float32[1024, 64]``; empty for a barrier."""
    if entry.dtype is None:
        return ""
    return f"{str(entry.dtype).removeprefix('torch.')}{list(entry.shape)}"


# -- lines of the user's code -----------------------------------------------------------------

USER, LIBRARY, INSIDE = 0, 1, 2  # whose a frame is
_kinds: dict[str, int] = {}  # of source files


def _places() -> tuple[tuple[str, int], ...]:
    """Folders and whose code they hold, the most telling first."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    torchs = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or ours)
    paths = sysconfig.get_paths()
    found = [(ours + os.sep, INSIDE), (torchs + os.sep, INSIDE)]
    found += [(paths[name] + os.sep, LIBRARY) for name in ("purelib", "platlib")]
    found += [(paths["stdlib"] + os.sep, INSIDE), ("<frozen", INSIDE), ("<eval_with_key", INSIDE)]
    if compiled := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        found.append((os.path.join(os.path.abspath(compiled), ""), INSIDE))
    return tuple(found)


def whose(filename: str) -> int:
    """Whether a file is the user's, a library's, or torch's, Python's and ours."""
    kind = _kinds.get(filename)
    if kind is None:
        found = (kind for place, kind in _places() if filename.startswith(place))
        kind = _kinds[filename] = next(found, _by_name(filename))
    return kind


def _by_name(filename: str) -> int:
    """Whose a file is that lies in no place we know."""
    folders = filename.split(os.sep)[:-1]
    if any(name.startswith("torchinductor_") for name in folders):  # what torch.compile has written
        return INSIDE
    return LIBRARY if {"site-packages", "dist-packages"}.intersection(folders) else USER


def caller(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """The innermost frame of the user's code, from ``frame`` outwards; of a library's if none."""
    second: tuple[CodeType | None, int] = (None, -1)
    kinds = _kinds
    while frame is not None:
        code = frame.f_code
        kind = kinds.get(code.co_filename)
        if kind is None:
            kind = whose(code.co_filename)
        if kind == USER:
            return code, frame.f_lasti
        if kind == LIBRARY and second[0] is None:
            second = code, frame.f_lasti
        frame = frame.f_back
    return second


def line_of(code: CodeType | None, lasti: int) -> str:
    """A place in the code as ``train.py:41``; empty when there is none."""
    if code is None:
        return ""
    number = code.co_firstlineno
    for start, end, line in code.co_lines():
        if start <= lasti < end and line is not None:
            number = line
    return f"{shown(code.co_filename)}:{number}"


def shown(filename: str) -> str:
    """A path as a reader wants it: short when it lies below the current folder."""
    try:
        here = os.getcwd() + os.sep
    except OSError:  # the folder has been deleted
        return filename
    return filename.removeprefix(here)


# -- clocks and forks -------------------------------------------------------------------------


def epoch_ns() -> int:
    """What to add to a time here to have nanoseconds since the Unix epoch."""
    tries = []
    for _ in range(5):
        before = now()
        wall = time.time_ns()
        after = now()
        tries.append((after - before, wall - (before + after) // 2))
    return min(tries)[1]


def forget() -> None:
    """Forget everything; a forked child is not the rank that its parent is."""
    calls.clear()
    steps.clear()
    buckets.clear()
    notes.clear()
    boards.clear()
    counting[0] = threading.RLock()  # the parent's may be somebody's who is not there
    past.steps = past.collectives = past.notes = 0
    past.bytes_sent = 0.0


os.register_at_fork(after_in_child=forget)
