"""Members and keepers that get no turn for a while: on a busy host, or stopped by somebody."""

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline._doors.unix import connect_private
from paceline._members import client, keeper
from paceline._members.council import Rules
from paceline._members.frames import pack
from paceline._members.words import Alive, Enrol, ProcessId


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.late = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(client, "monotonic", found)
    monkeypatch.setattr(keeper, "monotonic", found)
    return found


def test_a_member_that_gets_no_turn_does_not_take_its_keeper_for_silent(clock: Clock) -> None:
    ours, theirs = socket.socketpair()
    wakes, waker = socket.socketpair()
    with ours, theirs, wakes, waker:
        link = client._Link(ours, wakes)
        try:
            clock.late += 30.0  # such as a thread that keeps Python's lock
            assert link.wait(0.0) == []
            assert 29.0 < link.paused < 31.0
            clock.late += 0.4
            assert link.wait(0.0) == []
            assert link.paused == 0.0
            with pytest.raises(ConnectionError, match="the keeper says nothing"):
                for _ in range(100):  # it looks often enough, and nobody answers
                    clock.late += 0.4
                    link.wait(0.0)
        finally:
            link._selector.close()


def test_a_member_that_finds_its_keeper_gone_after_a_pause_asks_for_the_next(clock: Clock) -> None:
    ours, theirs = socket.socketpair()
    member = object.__new__(client.SocketMember)
    member._keeper_within, member._heard_at, member._over = 60.0, clock(), None
    member._words, member._closing, member._path, member._me = deque(), False, "", None
    member._wakes, waker = socket.socketpair()
    ended = list[object]()
    member._end = ended.append  # type: ignore[method-assign, assignment]
    with theirs, member._wakes, waker:
        member._link = client._Link(ours, member._wakes)
        theirs.close()
        clock.late += 300.0
        member._talk()
        assert not ended
        assert member._link is None
        member._heard_at -= 61.0  # this long it had its turns
        member._give_up_after(OSError("nobody"))
        assert len(ended) == 1


class Stalled:
    """A selector; the keeper gets no turn after it has looked, and ``meanwhile`` happens."""

    def __init__(self, selector: Any, meanwhile: Callable[[], None]) -> None:
        self._selector, self._meanwhile = selector, meanwhile
        self.waited = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)

    def select(self, timeout: float) -> Any:
        if self.waited:
            return self._selector.select(0)
        self.waited = True
        self._meanwhile()
        return []


def test_a_keeper_that_gets_no_turn_hears_what_has_come_before_it_finds_anybody_silent(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serves = keeper.Keeper(tmp_path / "job" / "keeper.socket", Rules(), silent_after=4.0)
    silent = list[int]()
    monkeypatch.setattr(
        serves._service.council, "silent", lambda member, why, now: silent.append(member)
    )
    with connect_private(tmp_path / "job" / "keeper.socket", 60.0) as member:
        member.sendall(pack(Enrol(ProcessId(os.uname().nodename, os.getpid()))))
        while not serves._service._heard_at:
            serves.turn()

        def stall() -> None:
            member.sendall(pack(Alive()))
            clock.late += 4.5

        serves._selector = Stalled(serves._selector, stall)
        serves.turn()
        assert not silent
        clock.late += 4.5  # now it says nothing
        serves.turn()
        assert silent == [0]
    serves.close()
