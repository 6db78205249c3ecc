"""Operations that were started and that nobody has waited for: when they are let go of."""

from __future__ import annotations

import threading
import weakref
from ctypes import addressof
from types import SimpleNamespace
from typing import Any

from paceline._transport.clib import Operation
from paceline._transport.shm import Shm, _Resources


def operations(count: int) -> dict[int, Operation]:
    made = [Operation() for _ in range(count)]
    return {addressof(operation): operation for operation in made}


def test_one_that_the_engine_does_not_have_yet_is_kept_and_the_others_go() -> None:
    under_way = operations(3)
    first = next(iter(under_way))
    under_way[first].starting = True
    shm: Any = SimpleNamespace(
        _lock=threading.Lock(),
        _calls=SimpleNamespace(pl_test=lambda _address: 1),
        _resources=SimpleNamespace(operations=under_way),
    )
    Shm._forget_finished(shm)
    assert list(under_way) == [first]


def look(under_way: dict[int, Operation], asked: list[bool]) -> Any:
    """Answers that all is done; meanwhile another thread waits for the others and drops them."""
    alive = {address: weakref.ref(operation) for address, operation in under_way.items()}

    def done(address: int, *_patience: int) -> int:
        asked.append(alive[address]() is not None)
        under_way.clear()
        return 0

    return done


def test_operations_live_while_the_engine_is_asked_about_them() -> None:
    under_way, asked = operations(3), list[bool]()
    calls = SimpleNamespace(pl_test=look(under_way, asked))
    resources = SimpleNamespace(operations=under_way)
    shm: Any = SimpleNamespace(_lock=threading.Lock(), _calls=calls, _resources=resources)
    Shm._forget_finished(shm)
    assert asked == [True] * 3

    under_way, asked = operations(3), []
    calls = SimpleNamespace(pl_wait=look(under_way, asked))
    ending: Any = SimpleNamespace(operations=under_way, calls=calls)
    _Resources._end_operations(ending, 0, at_once=False)
    assert asked == [True] * 3
