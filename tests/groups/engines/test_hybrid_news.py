"""Who is missing, asked by way of a store: the ranks that answer late are not named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from paceline.errors import CollectiveTimeoutError, PeerLeftError
from paceline.groups.engine import Call
from paceline.groups.engines.hybrid import faults
from paceline.groups.engines.hybrid.faults import News

LOOKS = 20  # times that the store is looked into before anybody else has written


class LateStore(HashStore):
    """Another rank writes only after this one has looked many times, as on a busy machine."""

    def __init__(self, write: Callable[[HashStore], None]) -> None:
        super().__init__()
        self._write, self._looks = write, 0

    def check(self, keys: list[str]) -> bool:
        self._looks += 1
        if self._looks == LOOKS:
            self._write(self)
        return super().check(keys)


def _call() -> Call:
    return Call("barrier", sequence=2, timeout=1.0)


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_REPORTING", 0.0)
    monkeypatch.setattr(faults, "_ALL_REPORTING", 30.0)


def test_only_the_rank_that_never_answers_is_missing() -> None:
    def answer(store: HashStore) -> None:
        for rank in (1, 2):
            News(store, rank).here(_call())

    assert News(LateStore(answer), 0).missing(4) == [3]


def test_a_rank_that_was_freed_waits_for_the_one_that_asks_around() -> None:
    def tell(store: HashStore) -> None:
        News(store, 0).tell(CollectiveTimeoutError(0, "barrier", 2, [3], seconds=1.0))

    store = LateStore(tell)
    News(store, 0).ask()
    error = News(store, 1).of_others(_call(), seconds=0.001)
    assert isinstance(error, CollectiveTimeoutError)
    assert list(error.ranks) == [3]


def test_what_was_told_is_found_by_a_rank_that_was_held_up_until_its_time_was_over() -> None:
    store = HashStore()
    News(store, 0).tell(PeerLeftError(0, "abort", 0, [0], aborted=True))
    assert isinstance(News(store, 1).of_others(_call(), seconds=0.0), PeerLeftError)


def test_nobody_is_waited_for_when_nobody_asks() -> None:
    assert News(HashStore(), 1).of_others(_call(), seconds=0.001) is None
