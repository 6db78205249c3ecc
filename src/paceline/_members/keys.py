"""Keys and values that the members of one roster leave for each other. Pure: no socket, no clock.

Behaves as torch's stores do, except that a roster that is over answers everybody at once: whoever
waits for a key of a member that has died is freed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

KeyOp = Literal[
    "set", "get", "wait", "check", "add", "compare_set", "delete", "count", "append", "push"
    , "pop", "length", "list"
]  # fmt: skip
# How many keys and values a question has; those that are not here may have any number of keys.
_ONE_KEY: dict[str, int] = {
    "add": 0, "compare_set": 2, "delete": 0, "append": 1, "push": 1, "pop": 0, "length": 0
}  # fmt: skip
CHANGING = frozenset({"set", "add", "compare_set", "delete", "append", "push", "pop"})


class AskKeys(msgspec.Struct, frozen=True, tag=True):
    """What a member asks of the keys of a roster. No question of one member has another's id."""

    id: int
    roster: int
    op: KeyOp
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0


class CancelKeys(msgspec.Struct, frozen=True, tag=True):
    """It waits no longer for the answer."""

    id: int


class KeysAnswer(msgspec.Struct, frozen=True, tag=True):
    """What was asked for, or why there is none."""

    id: int
    values: tuple[bytes, ...] = ()
    number: int = 0
    keys: tuple[str, ...] = ()
    error: Literal["", "empty", "value", "over", "full"] = ""
    why: str = ""


class Answered(NamedTuple):
    """An answer, to which question, and whose it was."""

    who: int
    question: AskKeys
    answer: KeysAnswer


class Keys:
    """The keys of one roster. Questions that wait are answered by what others ask later."""

    def __init__(self, roster: int, quota: int = 1 << 28):
        self.roster = roster
        self.over = ""
        self._quota = quota  # bytes of all keys and values
        self._held = 0
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waiting: dict[tuple[int, int], AskKeys] = {}
        self._ops: dict[str, Callable[[AskKeys], KeysAnswer | None]] = {
            "set": self._set, "get": self._get, "wait": self._wait, "check": self._check,
            "add": self._add, "compare_set": self._compare_set, "delete": self._delete,
            "count": self._count, "append": self._append, "push": self._push, "pop": self._pop,
            "length": self._length, "list": self._list,
        }  # fmt: skip

    def ask(self, who: int, question: AskKeys) -> list[Answered]:
        """Answer, or let it wait; gives all answers that there are now, in order."""
        if self.over or question.roster != self.roster:
            why = self.over or f"roster {question.roster} is over"
            return [Answered(who, question, KeysAnswer(question.id, error="over", why=why))]
        answer = self._answer(question)
        if answer is None:
            self._waiting[who, question.id] = question
            return []
        answered = [Answered(who, question, answer)]
        return answered + self._wake() if question.op in CHANGING else answered

    def cancel(self, who: int, question: int) -> None:
        """Nobody waits for that answer any more."""
        self._waiting.pop((who, question), None)

    def forget(self, who: int) -> None:
        """A member is gone or asks again: it waits for nothing."""
        self._waiting = {asked: q for asked, q in self._waiting.items() if asked[0] != who}

    def close(self, why: str) -> list[Answered]:
        """Let everybody who waits go, and answer nobody any more."""
        waiting, self._waiting = self._waiting, {}
        self.over = why
        self._values.clear()
        self._queues.clear()
        return [
            Answered(who, question, KeysAnswer(question.id, error="over", why=why))
            for (who, _), question in waiting.items()
        ]

    def as_questions(self) -> list[AskKeys]:
        """Give questions that make the same keys anew."""
        r, queues = self.roster, self._queues.items()
        values = [AskKeys(0, r, "set", (k,), (v,)) for k, v in self._values.items()]
        return values + [AskKeys(0, r, "push", (k,), (v,)) for k, queue in queues for v in queue]

    def _wake(self) -> list[Answered]:
        """Answer those who waited for what has just come; one that pops wakes nobody."""
        answered = []
        for (who, number), question in list(self._waiting.items()):
            answer = self._answer(question)
            if answer is not None:
                del self._waiting[who, number]
                answered.append(Answered(who, question, answer))
        return answered

    def _answer(self, question: AskKeys) -> KeysAnswer | None:
        try:
            _check_numbers(question)
            return self._ops[question.op](question)
        except _NotPossibleError as error:
            return KeysAnswer(question.id, error=error.kind, why=error.why)

    def _put(self, key: str, value: bytes) -> None:
        before = len(self._values[key]) if key in self._values else -len(key)
        self._reserve(len(value) - before)
        self._values[key] = value

    def _reserve(self, more: int) -> None:
        if self._held + more > self._quota:
            raise _NotPossibleError("full", f"the roster's keys hold {self._held} bytes already")
        self._held += more

    def _drop(self, key: str) -> bool:
        value = self._values.pop(key, None)
        self._held -= 0 if value is None else len(value) + len(key)
        return value is not None

    def _set(self, q: AskKeys) -> KeysAnswer:
        if len(q.keys) != len(q.values):
            raise _NotPossibleError("value", "there must be as many keys as values")
        for key, value in zip(q.keys, q.values, strict=True):
            self._put(key, value)
        return KeysAnswer(q.id)

    def _get(self, q: AskKeys) -> KeysAnswer | None:
        if not all(key in self._values for key in q.keys):
            return None
        return KeysAnswer(q.id, tuple(self._values[key] for key in q.keys))

    def _has(self, key: str) -> bool:
        return key in self._values or bool(self._queues.get(key))

    def _wait(self, q: AskKeys) -> KeysAnswer | None:
        return KeysAnswer(q.id) if all(map(self._has, q.keys)) else None

    def _check(self, q: AskKeys) -> KeysAnswer:
        return KeysAnswer(q.id, number=int(all(map(self._has, q.keys))))

    def _add(self, q: AskKeys) -> KeysAnswer:
        total = _as_number(self._values.get(q.keys[0], b"")) + q.number
        total = (total + (1 << 63)) % (1 << 64) - (1 << 63)  # as 64 bits wrap
        self._put(q.keys[0], str(total).encode())
        return KeysAnswer(q.id, number=total)

    def _compare_set(self, q: AskKeys) -> KeysAnswer:
        key, (expected, desired) = q.keys[0], q.values
        value = self._values.get(key)
        if value is None and expected:
            return KeysAnswer(q.id, (expected,))
        if value in (None, expected):
            self._put(key, desired)
            value = desired
        return KeysAnswer(q.id, (value or b"",))

    def _delete(self, q: AskKeys) -> KeysAnswer:
        return KeysAnswer(q.id, number=int(self._drop(q.keys[0])))

    def _count(self, q: AskKeys) -> KeysAnswer:
        return KeysAnswer(q.id, number=len(self._values))

    def _append(self, q: AskKeys) -> KeysAnswer:
        self._put(q.keys[0], self._values.get(q.keys[0], b"") + q.values[0])
        return KeysAnswer(q.id)

    def _push(self, q: AskKeys) -> KeysAnswer:
        self._reserve(len(q.values[0]))
        self._queues.setdefault(q.keys[0], deque()).append(q.values[0])
        return KeysAnswer(q.id)

    def _pop(self, q: AskKeys) -> KeysAnswer | None:
        queue = self._queues.get(q.keys[0])
        if not queue:
            if q.number:
                return None
            raise _NotPossibleError("empty", "queue is empty")
        value = queue.popleft()
        self._held -= len(value)
        if not queue:
            del self._queues[q.keys[0]]
        return KeysAnswer(q.id, (value,))

    def _length(self, q: AskKeys) -> KeysAnswer:
        return KeysAnswer(q.id, number=len(self._queues.get(q.keys[0], ())))

    def _list(self, q: AskKeys) -> KeysAnswer:
        return KeysAnswer(q.id, keys=tuple(self._values))


class _NotPossibleError(Exception):
    """A question that has no answer; the member that asked hears why."""

    def __init__(self, kind: Literal["empty", "value", "full"], why: str):
        super().__init__(why)
        self.kind = kind
        self.why = why


def _check_numbers(question: AskKeys) -> None:
    values = _ONE_KEY.get(question.op)
    if values is not None and (len(question.keys), len(question.values)) != (1, values):
        raise _NotPossibleError("value", f"{question.op} takes one key and {values} values")


def _as_number(value: bytes) -> int:
    """Read a number as torch's stores do: what follows its digits does not matter."""
    if not value:
        return 0
    found = re.match(rb"\s*([+-]?\d{1,20})", value)
    if found is None or not -(1 << 63) <= int(found[1]) < 1 << 63:
        raise _NotPossibleError("value", f"{value[:40]!r} is not a number that can be added to")
    return int(found[1])
