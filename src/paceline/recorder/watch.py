"""Watch: one thread for each process that notices a collective which takes too long.

It looks about once a second, and only while there are groups of several ranks. What it finds late
it explains once, on stderr and in the notes of the saved log. Errors say the same.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import statistics
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize

from .._torch.capture import beside_captures
from ..errors import (
    CollectiveTimeoutError,
    MismatchError,
    PacelineError,
    PeerDiedError,
    PeerLeftError,
    RecorderArgumentError,
)
from . import events
from .account import Account, account_of, told
from .comparing import Comparing
from .explain import Explanations, Find, Found
from .host_metrics import METRICS, begin
from .peers import peers
from .saving import RECORD, save_all
from .threads import finish_asking, forget_threads, one_of_ours
from .verdict import Case, Trouble, Verdict, judge, place, skip_between

WARN_AFTER = 10.0  # seconds
TIMES_THE_USUAL = 5
LAST_LOOK = 0.5  # seconds that the end of a group waits for the thread's
AT_EXIT = 2.0  # the same, of the process
LOOKING_UP = 0.1  # for the addresses of a group's ranks: its store may be busy for long
PATIENT = 6  # so many times the warning time, when nobody seems to be missing
_VARIABLE = "PACELINE_WARN_AFTER"


class Watch:
    """What a process knows of the ranks it waits for."""

    def __init__(self) -> None:
        self.peers = peers
        self.warn_after: float | None = None  # None: what the environment says
        self.reset()

    def reset(self) -> None:
        """Begin anew, as a forked child does: no thread, no lock that somebody may hold."""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._lock = threading.RLock()  # a signal's handler may end a group while one is opened
        self._looking = threading.Lock()
        self._mark: events.Entry | None = None  # the latest entry that was looked at
        self._running: list[events.Entry] = []
        self._open: dict[int, events.Board] = {}  # of groups that have not been left, by number
        self._fresh: list[events.Board] = []  # whose peers have not been looked up yet
        self._warned: dict[int, events.Entry] = {}  # by board
        self._ending: Finalize | None = None
        self.explanations = Explanations()
        self.comparing = Comparing(self.peers)

    # -- groups come --------------------------------------------------------------------------

    def opened(self, board: events.Board) -> None:
        """A group has been made."""
        if self._ending is None:
            # Before what groups have to say at exit; a child of multiprocessing has no atexit.
            self._ending = Finalize(None, self.end, exitpriority=100)
            atexit.register(self._ending)
            if where := os.environ.get(METRICS):
                begin(where)
        if board.size < 2 or not board.peers:
            return
        with self._lock:
            self._open[board.number] = board
            self.peers.publish(board)
            if board.announced:
                board.tell = self.peers.announce
            self._fresh.append(board)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._look_forever, name="paceline-recorder", daemon=True
                )
                self._thread.start()
        self.wake()

    def closed(self, board: events.Board) -> None:
        """A group has ended."""
        self._leave(board)
        thread = self._thread
        if self._stop_if_idle() and thread is not None:
            self.wake()
            if thread is not threading.current_thread():
                thread.join(LAST_LOOK)

    def _leave(self, board: events.Board) -> None:
        """Tell the peers that this rank comes no more, and compare its last calls."""
        try:
            with contextlib.suppress(Exception):
                self.peers.take_leave(board)
            with contextlib.suppress(Exception):
                self.comparing.compare(board)
        finally:
            self._open.pop(board.number, None)

    def _leave_dropped(self) -> None:
        """Leave the groups that nobody has shut down, but that are no more."""
        for board in list(self._open.values()):
            if board.group() is None and not board.closed:
                self._leave(board)

    def _stop_if_idle(self) -> bool:
        """Stop the thread and close the port once all groups have been left.

        Not as soon as they are gone: until a rank has compared its calls it has to hear what others
        say when they leave, and until it has said so itself it has to answer them.
        """
        with self._lock:
            if any(number in events.boards for number in list(self._open)):
                return False
            if self.explanations.under_way:  # its end calls this again
                return False
            self._thread = None
            self.peers.rest()
            return True

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def end(self) -> None:
        """The process ends: explain what failed, save what is to be saved, and take leave."""
        self.explanations.finish(AT_EXIT)
        for board in [board for board in list(events.boards.values()) if not board.closed]:
            with contextlib.suppress(Exception):
                self.comparing.compare(board)
        if directory := os.environ.get(RECORD):
            _save(directory)
        with contextlib.suppress(Exception):
            self.peers.part()
        self._open.clear()
        thread, self._thread = self._thread, None
        self.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(AT_EXIT)
        finish_asking(AT_EXIT)

    # -- the thread ---------------------------------------------------------------------------

    @one_of_ours
    def _look_forever(self) -> None:
        while threading.current_thread() is self._thread:
            self._wake.wait(self.tick())
            self._wake.clear()
            with contextlib.suppress(Exception):  # it must not end, nor harm the rank
                self.look()
            self._leave_dropped()
            self._stop_if_idle()

    def tick(self) -> float:
        """Seconds between two looks."""
        return min(1.0, self.warning_time() / 4)

    def look(self) -> None:
        """Explain every call that is late and was not explained yet."""
        with self._looking:
            for board in list(self._fresh):  # another thread may open more meanwhile
                if self._all_known(board):
                    self._fresh.remove(board)
            self.peers.forget_old()
            found = [*self._running, *self._new_entries(), *self._stuck_on_devices()]
            self._running = [entry for entry in found if _runs(entry)]
            oldest: dict[int, events.Entry] = {}
            for entry in self._running:
                oldest.setdefault(entry.board.number, entry)
            for entry in oldest.values():
                self._consider(entry)
            self.comparing.look([board for board in list(events.boards.values()) if _alive(board)])

    def _new_entries(self) -> list[events.Entry]:
        """What was recorded since the last look."""
        latest, found = list(events.calls), list[events.Entry]()
        for entry in reversed(latest):
            if entry is self._mark:
                break
            found.append(entry)
        self._mark = latest[-1] if latest else None
        return found[::-1]

    def _stuck_on_devices(self) -> list[events.Entry]:
        """Calls that were handed to a device long ago, and run there still."""
        boards = [board for board in list(events.boards.values()) if _alive(board)]
        found = [board.reopen(self.warning_time()) for board in boards]
        return [entry for entry in found if entry is not None and entry not in self._running]

    def _all_known(self, board: events.Board) -> bool:
        """Whether there is nothing more to find out about a board's peers."""
        self.peers.known(board, LOOKING_UP)
        return not _alive(board) or self.peers.complete(board)

    def _consider(self, entry: events.Entry) -> None:
        board, age = entry.board, (events.now() - entry.began) / 1e9
        if self._warned.get(board.number) is entry or age < self.warning_time():
            return
        if age < self._threshold(entry):
            return
        verdict = self.explain(entry)
        if verdict.kind is Trouble.NOBODY and age < PATIENT * self.warning_time():
            return
        if not _runs(entry):  # it came while we asked
            return
        self._warned[board.number] = entry
        events.note(board, verdict.text)
        sys.stderr.write(f"paceline: {verdict.text}\n")  # whole, so that ranks do not mix
        sys.stderr.flush()

    # -- how long is too long -----------------------------------------------------------------

    def warning_time(self) -> float:
        """Seconds after which a call is late, at the earliest."""
        if self.warn_after is not None:
            return self.warn_after
        try:
            seconds = float(os.environ.get(_VARIABLE, WARN_AFTER))
        except ValueError:
            return WARN_AFTER
        return seconds if seconds > 0 else math.inf

    def _threshold(self, entry: events.Entry) -> float:
        """Seconds after which ``entry`` is late: at least five times what such calls take here."""
        usual = [
            (e.finished - e.began) / 1e9
            for e in list(events.calls)
            if e.board is entry.board and e.kind == entry.kind and e.finished and not e.error
        ]
        often = statistics.median(usual) if usual else 0.0
        return max(self.warning_time(), TIMES_THE_USUAL * often)

    # -- explanations -------------------------------------------------------------------------

    def explain(self, entry: events.Entry) -> Verdict:
        """Ask all ranks, and say whom this call waits for."""
        board = entry.board
        return judge(self._case(entry), self.peers.hear(board, range(board.size)))

    def _case(self, entry: events.Entry, suspects: Sequence[int] = ()) -> Case:
        """What can be seen from here; the rest is for the others to tell."""
        board = entry.board
        return Case(
            account_of(board, steps=events.STEPS),  # all: others may tell of an old one
            told(entry),
            board.name,
            waited=((entry.finished or events.now()) - entry.began) / 1e9,
            over=bool(entry.error),
            members=board.members,
            suspects=tuple(suspects),
        )

    def failed(self, entry: events.Entry, error: BaseException) -> None:
        """Have added to an error what can be found out about its cause."""
        if entry.board.size < 2 or not entry.board.peers:
            return
        with contextlib.suppress(Exception):
            if isinstance(error, MismatchError):
                self._explain(entry, error, entry.sequence, lambda: self._find_lines(entry, error))
            elif isinstance(error, PeerDiedError | PeerLeftError | CollectiveTimeoutError):
                # An abort is told in full; and if it is this rank that came too late, it knows.
                if not getattr(error, "aborted", False) and entry.board.rank not in error.ranks:
                    kind = (type(error), tuple(error.ranks))
                    self._explain(entry, error, kind, lambda: self._find_verdict(entry, error))
            elif isinstance(error, RuntimeError) and not isinstance(error, PacelineError):
                self._explain(entry, error, RuntimeError, lambda: self._find_text(entry))

    def _explain(
        self,
        entry: events.Entry,
        error: BaseException,
        kind: Hashable,
        prepare: Callable[[], Find],
    ) -> None:
        self.explanations.explain(entry, error, kind, prepare, then=self._stop_if_idle)

    def _find_text(self, entry: events.Entry) -> Find:
        """An engine's error, which names nobody."""
        case, board = self._case(entry), entry.board

        def find() -> Found:
            verdict = judge(case, self.peers.hear(board, range(board.size)))
            return _noted(board, "" if verdict.kind is Trouble.NOBODY else verdict.text)

        return find

    def _find_verdict(
        self, entry: events.Entry, error: PeerDiedError | PeerLeftError | CollectiveTimeoutError
    ) -> Find:
        """Ranks have died, left or not come in time; the engine knows which."""
        case, board = self._case(entry, error.ranks), entry.board
        suspects, gone = tuple(error.ranks), not isinstance(error, CollectiveTimeoutError)

        def find() -> Found:
            said = self.peers.hear(board, range(board.size))
            if gone and not any(isinstance(said.get(rank), Account) for rank in suspects):
                return Found()  # that they are gone is all there is to say
            return _noted(board, judge(case, said).text)

        return find

    def _find_lines(self, entry: events.Entry, error: MismatchError) -> Find:
        """Two ranks have called different things."""
        board, number, mine = entry.board, entry.sequence, account_of(entry.board)
        whole = replace(error)  # to be put into words, whatever becomes of the error meanwhile

        def find() -> Found:
            said = self.peers.hear(board, (whole.rank_a, whole.rank_b))
            said[board.rank] = mine
            one, other = said.get(whole.rank_a), said.get(whole.rank_b)
            line_a, whole.purpose_a = _known(one, number)
            line_b, whole.purpose_b = _known(other, number)
            whole.line_a, whole.line_b = line_a or whole.line_a, line_b or whole.line_b
            if isinstance(one, Account) and isinstance(other, Account):
                skipped = skip_between(one, other, "")
                whole.verdict = "" if skipped is None else skipped[2].strip()
            events.note(board, str(whole))
            names = ("line_a", "line_b", "purpose_a", "purpose_b", "verdict")
            return Found(str(whole), {name: getattr(whole, name) for name in names})

        return find


def _noted(board: events.Board, text: str) -> Found:
    if text:
        events.note(board, text)
    return Found(text, {"verdict": text})


def _alive(board: events.Board) -> bool:
    return not board.closed and board.group() is not None and board.size > 1


def _runs(entry: events.Entry) -> bool:
    try:
        return _alive(entry.board) and entry.look()
    except Exception:  # a work of somebody else's, which cannot say
        return False


def _known(said: object, sequence: int) -> tuple[str, str]:
    """The line that made a call, and what the library made it for."""
    call = said.call(sequence) if isinstance(said, Account) else None
    return ("", "") if call is None else (place(call.line), call.purpose)


watch = Watch()


def install() -> None:
    """Register for groups and failures."""
    events.on_board.append(lambda board: watch.opened(board))
    events.on_close.append(lambda board: watch.closed(board))
    events.on_failure.append(lambda entry, error: watch.failed(entry, error))
    events.asking[0] = beside_captures
    os.register_at_fork(after_in_child=_anew)


def configure(*, warn_after: float | None = None, on: bool | None = None) -> None:
    """Set after how many seconds a collective is late, and whether new groups are recorded.

    None leaves a setting to the environment: ``PACELINE_WARN_AFTER`` (10 by default; 0 is never)
    and ``PACELINE_RECORDER``.
    """
    if warn_after is not None and not _is_time(warn_after):
        raise RecorderArgumentError("warn_after", "a number of seconds above 0", repr(warn_after))
    if on is not None and not isinstance(on, bool):
        raise RecorderArgumentError("on", "True, False or None", repr(on))
    watch.warn_after = warn_after
    events.switch(on)
    watch.wake()


def finish_explaining(seconds: float = AT_EXIT) -> None:
    """Wait until the errors raised so far have been explained, for at most this many seconds.

    An error is raised at once, while the other ranks are still being asked. A process waits for
    this at its end; call it if you store the text of an error instead of printing it.
    """
    watch.explanations.finish(seconds)


def _is_time(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value > 0  # type: ignore[operator]


def _save(directory: str) -> None:
    """Save at the end of the process, which must not fail for it, but says so."""
    try:
        save_all(directory)
    except Exception as error:
        print(f"paceline: nothing was recorded into {directory}: {error}", file=sys.stderr)


def _anew() -> None:
    """A forked child is another process: no thread of ours runs in it."""
    watch.peers.drop()
    forget_threads()
    watch.reset()
