"""A member's side of what is said about rosters, over whatever carries the words."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from ..errors import JobEndedError, MeetingTimeoutError, MembershipError
from .keys import AskKeys, CancelKeys, KeysAnswer
from .listening import Listening
from .questions import Questions
from .roster import NOTHING, HowFar, Roster, RosterChange
from .words import (
    Alive,
    Changed,
    Decided,
    Enrol,
    Enrolled,
    FromMember,
    HasCommitted,
    Leave,
    Meet,
    Opened,
    ProcessId,
    Refused,
    SaysReady,
    ToMember,
    Withdraw,
)

if TYPE_CHECKING:
    from torch.distributed import Store


_LAST_WORD = 10.0  # seconds for the keeper's answer to one that waits no longer


class Membership(ABC):
    """What every implementation of Members shares: who asked what, and what was answered.

    A subclass carries words to the keeper in :meth:`_say`, and calls :meth:`_hear` with what comes
    back, on a thread of its own.
    """

    def __init__(self, process: ProcessId, member: int | None = None):
        self._process = process
        self._lock = threading.Condition()
        self._me = member
        self._roster: Roster | None = None  # the last one that meet gave
        self._in_use = False
        self._meeting: Meet | None = None  # asked, not answered
        self._readiness: SaysReady | None = None
        self._turn = 0
        self._answers: dict[str, Decided | Opened | Refused] = {}
        self._questions = Questions(self._say)
        self._stores: dict[int, Store] = {}
        self._steps = NOTHING
        self._told_steps = NOTHING
        self._over: MembershipError | None = None
        self._listening = Listening()
        self._pending: deque[RosterChange] = deque(maxlen=16)

    @abstractmethod
    def _say(self, word: FromMember | AskKeys | CancelKeys) -> None:
        """Send a word; what is lost on the way is said again when the member enrols again."""

    def store(self, number: int) -> Store:
        """Where the members of a roster find what others left for them, and nobody else's."""
        from .kept_store import KeptStore

        with self._lock:
            self._raise_if_over()
            # C++ holds only its own half of a store: the last few are kept whole here.
            self._stores = {n: s for n, s in self._stores.items() if n > number - 2}
            return self._stores.setdefault(number, KeptStore(number, self._questions))

    @property
    def me(self) -> int:
        """This member's number; -1 before it has one."""
        return -1 if self._me is None else self._me

    def meet(self, how_far: HowFar, timeout: float) -> Roster:
        """Wait for the next roster that this member is in."""
        with self._lock:
            self._raise_if_over()
            self._turn += 1
            word = self._meeting = Meet(how_far, self._turn, timeout)
            self._answers.pop("meet", None)
        self._say(word)
        answer = self._answer_to("meet", timeout) or self._give_up_meeting(word)
        if isinstance(answer, Decided):
            return answer.roster
        raise MeetingTimeoutError(self.me, answer.why, seconds=timeout)

    def ready(self, number: int, trouble: str = "", culprit: int = -1) -> bool:
        """Say whether this member can use the roster's group; True if all can. Else meet again."""
        with self._lock:
            self._raise_if_over()
            word = self._readiness = SaysReady(number, trouble, culprit)
            self._answers.pop("ready", None)
        self._say(word)
        answer = self._answer_to("ready", None)
        return isinstance(answer, Opened) and answer.usable

    def listen(self, heard: Callable[[RosterChange], None]) -> None:
        """Call ``heard``, on another thread, with every change, also with one that is pending."""
        with self._lock:
            self._listening.add(heard, list(filter(self._is_current, self._pending)))

    def tell(self, steps: int) -> None:
        """Say how many steps this member has committed; it is sent along with what comes next."""
        self._steps = steps

    def leave(self, why: str = "", failed: bool = False, finished: bool = False) -> None:
        """Be a member no longer; the others hear ``why``."""
        if self._over is None:
            self._say_steps()
            self._say(Leave(why, failed, finished))
        self._end(MembershipError(self.me, f"it has left: {why or 'by itself'}"))
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the connection without telling the keeper."""

    def _say_steps(self) -> None:
        if self._steps != self._told_steps:
            self._told_steps = self._steps
            self._say(HasCommitted(self._steps))

    def _hear(self, word: ToMember | Alive | KeysAnswer) -> None:
        """Take a word of the keeper."""
        match word:
            case Enrolled():
                self._me = word.member
                self._wake()
            case Decided():
                self._decided(word)
            case Opened():
                self._opened(word)
            case Changed():
                self._changed(word.change)
            case Refused():
                self._refused(word)
            case KeysAnswer():
                self._questions.hear(word)

    def _enrolment(self) -> list[FromMember | AskKeys]:
        """What to say to a keeper that does not know this member, or not any more."""
        with self._lock:
            roster = self._roster
            hello = Enrol(self._process, self._me, roster, self._in_use)
            committed = HasCommitted(self._steps)
            asked = [word for word in (self._meeting, self._readiness) if word is not None]
            return [hello, committed, *asked, *self._questions.still_open()]

    def _decided(self, word: Decided) -> None:
        with self._lock:
            if self._meeting is None or word.turn != self._meeting.turn:
                return  # it was too late for that meeting; the keeper knows
            self._meeting = None
            self._roster, self._in_use = word.roster, False
            self._pending.clear()
            self._answers["meet"] = word
            self._lock.notify_all()

    def _opened(self, word: Opened) -> None:
        with self._lock:
            if self._readiness is None or word.roster != self._readiness.roster:
                return
            self._readiness = None
            self._in_use = word.usable
            self._answers["ready"] = word
            self._lock.notify_all()

    def _changed(self, change: RosterChange) -> None:
        with self._lock:
            if not self._is_current(change):
                return
            self._pending.append(change)
            self._listening.tell(change)
            if change.kind == "end":
                self._over = JobEndedError(self.me, change.why, change.well)
            self._lock.notify_all()

    def _refused(self, word: Refused) -> None:
        if not word.turn:
            kind = JobEndedError if word.ended else MembershipError
            self._end(kind(self.me, word.why, word.well))
            return
        with self._lock:
            if self._meeting is not None and self._meeting.turn == word.turn:
                self._answers["meet"] = word
                self._lock.notify_all()

    def _is_current(self, change: RosterChange) -> bool:
        """Whether it is about the roster that this member has; others are over or to come."""
        number = 0 if self._roster is None else self._roster.number
        return change.kind in ("leave", "end") or change.roster == number

    def _end(self, error: MembershipError) -> None:
        with self._lock:
            if self._over is None:
                self._over = error
            self._lock.notify_all()
        self._questions.end(self._over)
        self._listening.end()

    def _become_nobody(self, error: MembershipError) -> None:
        """In a forked child: drop all resources, and replace locks that may have been held."""
        self._lock = threading.Condition()
        self._over = error
        self._questions.become_nobody(error)

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _raise_if_over(self) -> None:
        if self._over is not None:
            raise self._over

    def _answer_to(self, question: str, timeout: float | None) -> Decided | Opened | Refused | None:
        """Wait for an answer; None if there was none in time."""
        deadline = None if timeout is None else monotonic() + timeout
        with self._lock:
            while question not in self._answers:
                self._raise_if_over()
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    return None
                self._lock.wait(left)
            return self._answers.pop(question)

    def _give_up_meeting(self, word: Meet) -> Decided | Refused:
        """Wait no longer; the answer may have been on its way, or says who was waited for."""
        self._say(Withdraw(word.turn))
        answer = self._answer_to("meet", _LAST_WORD)
        with self._lock:
            self._meeting = None
        if isinstance(answer, Decided | Refused):
            return answer
        return Refused("the keeper does not answer", turn=word.turn)
