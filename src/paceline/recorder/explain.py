"""Explanations: why a call failed, found out while the error is already on its way.

Asking the other ranks takes milliseconds, or seconds where one of them is stopped. Nobody waits for
that: an error is raised after :data:`ON_PATH` at the latest, and a thread asks. What it finds goes
into the error's fields; whoever turns the error into text before that (a traceback, a log) has the
explanation printed later, on its own and once. The end of the process waits for it.

Calls that fail together share one explanation: of a model with many buckets all do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from ..errors import ExplainedError
from . import events
from .threads import in_thread

ON_PATH = 0.005  # seconds after a failure until the error is raised, explained or not
IN_TEXT = 0.02  # the same until it is put into words
SHARED = 1.0  # seconds that an explanation also serves for failures of the same kind
AT_ONCE = 8  # explanations under way; failures beyond them get none


@dataclass(frozen=True)
class Found:
    """The explanation as text, and as fields of an error."""

    text: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


Find = Callable[[], Found]


class SearchPhase(Enum):
    """Life of an explanation, in order."""

    SOUGHT = auto()  # the other ranks are being asked
    MISSED = auto()  # the same, and an error was put into words without it
    FOUND = auto()  # it is in the fields of the errors
    PRINTED = auto()  # the same, after it had been printed on its own


class Explanation:
    """What one failure is explained with; :meth:`seek` is to run in a thread."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._process = os.getpid()
        self._began = time.monotonic()
        self._ended = 0.0
        self._phase = SearchPhase.SOUGHT
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._found = Found()
        self._errors: list[weakref.ref[ExplainedError]] = []

    @property
    def printed(self) -> bool:
        """Whether it has been printed on its own, so that no text needs to repeat it."""
        return self._phase is SearchPhase.PRINTED

    @property
    def text(self) -> str:
        """What there is to say; empty while it is sought, and where there is nothing."""
        return self._found.text

    @property
    def serves(self) -> bool:
        """Whether a failure of the same kind that comes now is explained by it too."""
        return not self._done.is_set() or time.monotonic() < self._ended + SHARED

    def wait(self, seconds: float) -> None:
        """Wait until it is found, for at most so long."""
        self._done.wait(seconds)

    def wait_on_path(self) -> None:
        """Wait before the error is raised; failures that share it wait once."""
        self._done.wait(max(0.0, self._began + ON_PATH - time.monotonic()))

    def wait_for_text(self) -> None:
        """Wait a moment; if that was not enough, it will be printed when it is found."""
        if self._done.wait(max(0.0, self._began + IN_TEXT - time.monotonic())):
            return
        if os.getpid() != self._process:  # a forked child, where nobody seeks, and the lock may be
            return  # somebody's who is not there
        with self._lock:
            if self._phase is SearchPhase.SOUGHT:
                self._phase = SearchPhase.MISSED

    def attach(self, error: BaseException) -> None:
        """Let ``error`` have it, now or when it is found."""
        if isinstance(error, ExplainedError):
            with self._lock:
                self._errors.append(weakref.ref(error))
                _fill_in(error, self._found)
            error.explained_by(self)
        else:  # torch's, which has no field for it
            error.args = (_GrowingText(error.args[0] if error.args else "", self), *error.args[1:])

    def seek(self) -> None:
        """Find it, hand it to the errors, and print it if one of them was in words before."""
        found = Found()
        with contextlib.suppress(Exception):  # what cannot be found out must not harm the rank
            found = self._find()
        with self._lock:
            self._found, missed = found, self._phase is SearchPhase.MISSED
            for held in self._errors:
                if (error := held()) is not None:
                    _fill_in(error, found)
            self._phase = SearchPhase.PRINTED if missed and self.text else SearchPhase.FOUND
        if self.printed:
            with contextlib.suppress(Exception):  # stderr may be closed by now
                sys.stderr.write(f"paceline: {self.text}\n")  # whole, so that ranks do not mix
                sys.stderr.flush()
        self._ended = time.monotonic()
        self._done.set()

    def give_up(self) -> None:
        """Nobody can seek it: there is nothing to say."""
        self._find = Found
        self.seek()


class Explanations:
    """The explanations of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: dict[tuple[int, Hashable], Explanation] = {}  # by board and kind of failure
        self._sought: set[Explanation] = set()

    @property
    def under_way(self) -> bool:
        """Whether one is being sought."""
        return bool(self._sought)

    def explain(
        self,
        entry: events.Entry,
        error: BaseException,
        kind: Hashable,
        prepare: Callable[[], Find],
        then: Callable[[], object],
    ) -> None:
        """Have ``error`` explained, by what was found for the same ``kind`` of failure or anew.

        ``prepare`` notes what can only be seen now, and returns what finds the rest in a thread,
        where ``then`` is called in the end.
        """
        explanation, new = self._explanation_of(entry.board, kind, prepare)
        if explanation is None:
            return
        try:
            explanation.attach(error)
            if new:
                in_thread(self._seek, explanation, then)
        except BaseException as failure:  # no room for a thread, an interrupt: nobody seeks it
            if new:
                explanation.give_up()
                self._sought.discard(explanation)
            if not isinstance(failure, Exception):
                raise
            return  # the error itself counts for more
        explanation.wait_on_path()

    def _explanation_of(
        self, board: events.Board, kind: Hashable, prepare: Callable[[], Find]
    ) -> tuple[Explanation | None, bool]:
        with self._lock:
            latest = self._latest.get((board.number, kind))
            if latest is not None and latest.serves:
                return latest, False
            if len(self._sought) >= AT_ONCE:
                return None, False
            self._latest = {k: found for k, found in self._latest.items() if found.serves}
            explanation = Explanation(prepare())
            self._latest[board.number, kind] = explanation
            self._sought.add(explanation)
            return explanation, True

    def _seek(self, explanation: Explanation, then: Callable[[], object]) -> None:
        try:
            explanation.seek()
        finally:
            self._sought.discard(explanation)
            then()

    def finish(self, seconds: float) -> None:
        """Wait until nothing is being sought, for at most so long."""
        until = time.monotonic() + seconds
        for explanation in list(self._sought):
            explanation.wait(max(0.0, until - time.monotonic()))


class _GrowingText(str):
    """The text of an error of torch's, which says more once more is known."""

    explanation: Explanation

    def __new__(cls, text: object, explanation: Explanation) -> _GrowingText:
        made = super().__new__(cls, text)
        made.explanation = explanation
        return made

    def __str__(self) -> str:
        self.explanation.wait_for_text()
        plain = str.__str__(self)
        if self.explanation.printed or not self.explanation.text:
            return plain
        return f"{plain}\npaceline: {self.explanation.text}"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def _fill_in(error: ExplainedError, found: Found) -> None:
    for name, value in found.fields.items():
        setattr(error, name, value)
