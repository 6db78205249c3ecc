"""A member's open questions about keys: who waits on this side for which answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count

from ..errors import MembershipError
from .keys import AskKeys, CancelKeys, KeyOp, KeysAnswer


class Questions:
    """Questions of any thread; answers come on another one."""

    def __init__(self, say: Callable[[AskKeys | CancelKeys], None]):
        self._say = say
        self._lock = threading.Lock()
        self._ids = count(1)
        self._open: dict[int, tuple[AskKeys, threading.Event]] = {}
        self._answers: dict[int, KeysAnswer] = {}
        self._over: MembershipError | None = None

    def ask(
        self,
        roster: int,
        op: KeyOp,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        number: int = 0,
        timeout: float | None = None,
    ) -> KeysAnswer | None:
        """Wait for the answer, at most so many seconds; None if there was none."""
        question = AskKeys(next(self._ids), roster, op, tuple(keys), tuple(values), number)
        came = threading.Event()
        with self._lock:
            if self._over is not None:
                raise self._over
            self._open[question.id] = question, came
        self._say(question)
        came.wait(timeout)
        with self._lock:
            self._open.pop(question.id, None)
            answer = self._answers.pop(question.id, None)
            if answer is None and self._over is not None:
                raise self._over
        if answer is None:
            self._say(CancelKeys(question.id))
        return answer

    def hear(self, answer: KeysAnswer) -> None:
        """Take an answer; nobody may wait for it any more."""
        with self._lock:
            if answer.id in self._open:
                self._answers[answer.id] = answer
                self._open[answer.id][1].set()

    def still_open(self) -> list[AskKeys]:
        """What a new keeper has to be asked again, in the order it was asked."""
        with self._lock:
            return [question for question, _ in self._open.values()]

    def become_nobody(self, error: MembershipError) -> None:
        """In a forked child: forget all questions."""
        self._lock, self._over = threading.Lock(), error
        self._open.clear()

    def end(self, error: MembershipError) -> None:
        """Let all who wait go, with this error."""
        with self._lock:
            self._over = error
            for _, came in self._open.values():
                came.set()
