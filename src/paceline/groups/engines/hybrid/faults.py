"""Reports of faults, through the store: gloo says that something broke, but not what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
from torch.distributed import Store

from ....errors import CollectiveTimeoutError, GroupError, PeerDiedError, PeerLeftError
from ...engine import Call

_T = TypeVar("_T")

_SECONDS = 1.0  # how long the news may take; the store may be gone with the rank that had it
_REPORTING = 0.5  # seconds that the last rank has to say that it is here, once it is freed
_ALL_REPORTING = 3.0  # the same while several have not: they cannot all be the one that is missing


class Note(msgspec.Struct, frozen=True):
    """A fault, as the rank that noticed it tells the others."""

    kind: str
    ranks: list[int]
    reporter: int
    seconds: float = 0.0

    @classmethod
    def of(cls, fault: GroupError) -> Note:
        """The news of ``fault``."""
        ranks = list(fault.ranks)
        if isinstance(fault, PeerDiedError):
            return cls("died", ranks, fault.rank)
        if isinstance(fault, CollectiveTimeoutError):
            return cls("late", ranks, fault.rank, fault.seconds)
        aborted = isinstance(fault, PeerLeftError) and fault.aborted
        return cls("aborted" if aborted else "left", ranks, fault.rank)


_NOTES = msgspec.msgpack.Decoder(Note)  # by the thread that imports; see _transport/agreement.py


class News:
    """What one rank hears and tells of faults in its group; the first fault is what counts."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def tell(self, fault: GroupError) -> None:
        """Let the others know."""
        note = msgspec.msgpack.encode(Note.of(fault))
        _within(_SECONDS, lambda: self._store.compare_set("first", "", note))  # type: ignore[arg-type]

    def here(self, call: Call) -> None:
        """Let the others know that this rank had come to the collective that broke the group."""
        if call.kind not in ("send", "recv"):
            _within(_SECONDS, lambda: self._store.set(f"here/{self._rank}", "yes"))

    def ask(self) -> None:
        """Let the others know that one of them finds out who is missing, before they are freed."""
        _within(_SECONDS, lambda: self._store.set("asking", "yes"))

    def missing(self, size: int) -> list[int]:
        """The ranks that do not say so, though nothing holds them any more; waits a moment."""
        return _within(_ALL_REPORTING + _SECONDS, lambda: self._await_ranks(size)) or []

    def _await_ranks(self, size: int) -> list[int]:
        away = [rank for rank in range(size) if rank != self._rank]
        start = time.monotonic()
        while away and time.monotonic() < start + (
            _REPORTING if len(away) == 1 else _ALL_REPORTING
        ):
            away = [rank for rank in away if not self._store.check([f"here/{rank}"])]
            time.sleep(0.005)
        return away

    def of_others(self, call: Call, seconds: float = _SECONDS) -> GroupError | None:
        """The fault that another rank wrote down, as the error of ``call`` here."""
        most = seconds + _ALL_REPORTING + 2 * _SECONDS
        if not (news := _within(most, lambda: self._read(seconds))):
            return None
        note = _NOTES.decode(news)
        if note.reporter == self._rank:
            return None
        at = (self._rank, call.kind, call.sequence, note.ranks)
        if note.kind == "died":
            return PeerDiedError(*at, reporter=note.reporter)
        if note.kind == "late":
            return CollectiveTimeoutError(*at, seconds=note.seconds, reporter=note.reporter)
        return PeerLeftError(*at, aborted=note.kind == "aborted")

    def _read(self, seconds: float) -> bytes:
        """The first fault, if it is told within ``seconds``, or soon after a rank asks around."""
        until, asking = time.monotonic() + seconds, False
        while True:
            over = time.monotonic() >= until  # who was held up so long looks all the same
            if self._store.check(["first"]):
                return bytes(self._store.get("first"))
            if not asking and self._store.check(["asking"]):
                asking, until = True, time.monotonic() + _ALL_REPORTING + _SECONDS
            elif over:
                return b""
            time.sleep(0.005)


def _within(seconds: float, ask: Callable[[], _T]) -> _T | None:
    """What ``ask`` returns; None if it fails or takes longer."""
    answers: list[_T] = []

    def run() -> None:
        with suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=run, name="paceline-news", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
