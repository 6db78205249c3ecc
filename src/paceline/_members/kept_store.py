"""A torch store whose keys lie with the keeper, one for each roster."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from .keys import KeyOp, KeysAnswer
from .questions import Questions

_EmptyError = getattr(dist, "QueueEmptyError", dist.DistStoreError)


class KeptStore(Store):
    """Where the members of a roster find what others left for them.

    Every call raises ``DistStoreError`` as soon as the roster is over, also one that waits. C++
    looks up some methods by other names than Python does; both are here. The queues cannot be
    reached through a ``PrefixStore``, which torch has only for stores of its own.
    """

    def __init__(self, roster: int, questions: Questions):
        super().__init__()
        self._roster = roster
        self._questions = questions

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a value."""
        self._ask("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self._ask("get", [key]).values[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._ask("wait", keys, timeout=timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", keys).number)

    def add(self, key: str, value: int) -> int:
        """Add to a number, which begins with 0; the sum."""
        return self._ask("add", [key], number=value).number

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Replace a value if it is the expected one, none if that is empty; what is there then."""
        values = [_bytes(expected_value), _bytes(desired_value)]
        return self._ask("compare_set", [key], values).values[0]

    def delete_key(self, key: str) -> bool:
        """Drop a key; whether it was there."""
        return bool(self._ask("delete", [key]).number)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._ask("count").number

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes at the end of a value."""
        self._ask("append", [key], [_bytes(value)])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values."""
        return list(self._ask("get", keys).values)

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Leave several values at once."""
        if len(keys) != len(values):
            raise dist.DistStoreError("multi_set needs as many values as keys")
        self._ask("set", keys, [_bytes(value) for value in values])

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self._ask("push", [key], [_bytes(value)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue."""
        return self._ask("pop", [key], number=int(block)).values[0]

    def queue_len(self, key: str) -> int:
        """How many values a queue has."""
        return self._ask("length", [key]).number

    def list_keys(self) -> list[str]:
        """All keys."""
        return list(self._ask("list").keys)

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set are there: they are."""
        return True

    def clone(self) -> Store:
        """Give a store of the same keys; any thread may use either."""
        return self

    deleteKey = delete_key
    getNumKeys = num_keys

    def _ask(
        self,
        op: KeyOp,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        number: int = 0,
        timeout: timedelta | None = None,
    ) -> KeysAnswer:
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        seconds = limit.total_seconds()
        answer = self._questions.ask(self._roster, op, keys, values, number, seconds)
        if answer is None:
            waited = f"wait timeout after {round(seconds * 1000)}ms, keys: {', '.join(keys)}"
            raise dist.DistStoreError(waited)
        return _checked(answer, self._roster)


def _checked(answer: KeysAnswer, roster: int) -> KeysAnswer:
    match answer.error:
        case "":
            return answer
        case "empty":
            raise _EmptyError(answer.why)
        case "value":
            raise ValueError(answer.why)
        case _:
            raise dist.DistStoreError(f"store of roster {roster}: {answer.why}")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
