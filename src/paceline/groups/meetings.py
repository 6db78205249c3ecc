"""Meetings: how ranks that go on together come to one new engine, or all to none.

Ranks that call ``new_group``, ``split``, ``merge`` or ``reconfigure`` may do so after different
numbers of failed tries. So nobody counts its own: the meetings of the same ranks for the same
purpose are numbered in the store, and whoever comes joins the first that is open.

**A meeting** has two words in the store, each written once, by ``compare_set``, so that all ranks
read the same. The *gate* says that it is full, written by the last to come, or who left before; a
meeting that has a gate is closed to newcomers. Ranks that find it left by another go to the next
meeting for as long as they have time. After the gate the ranks open their engines. The *outcome*
says go when all have, or who could not and why; until then nobody uses its engine. So no rank goes
on in a group that another has given up.

**The rank that holds the store** may end as soon as it has its group, and the store with it. In
``new_group``, ``split`` and ``merge`` it stays until all have read the outcome: rank 0, or, where
ranks are not known by their numbers, every rank. When opening has failed it stays for a moment, so
that all hear whose fault it was. Survivors (``reconfigure``) wait for nobody.

Keys of a meeting are used by it alone: what a former one left behind, of the same ranks or of dead
ones, is never read again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import msgspec
from torch.distributed import DistNetworkError, PrefixStore, Store

from .._transport import reaching_store
from ..errors import RendezvousError

_FULL, _GO = "full", "go"
_GRACE = timedelta(seconds=2)
READING = timedelta(seconds=30)  # for a rank that dies, or is stopped, before it has read
_LONGEST = 2000  # characters of a reason
_REMEDY = (
    "Look at the output of the missing ranks. It can be called again, by each rank as often as it "
    "needs to: they meet once all wait with the same members."
)


class Ends(Protocol):
    """What ranks open in a meeting: an engine, or a group."""

    def abort(self) -> None: ...
    def shutdown(self) -> None: ...


E = TypeVar("E", bound=Ends)


class Left(msgspec.Struct, frozen=True, tag=True):
    """Who ended a meeting before its time, and why."""

    who: str
    why: str
    final: bool  # there is no point in meeting again


class Arrival(msgspec.Struct, frozen=True):
    """What somebody who comes tells the others: for how many ranks, and something of its own."""

    ranks: int
    note: bytes


_CARDS = msgspec.msgpack.Decoder(Arrival)  # by the thread that imports; see _transport/agreement.py
_WORDS: msgspec.json.Decoder[str | Left] = msgspec.json.Decoder(str | Left)


@dataclass(frozen=True)
class Place:
    """A place in a meeting: which one it is, and how many ranks came before."""

    number: int
    before: int


class _Late(Exception):
    """The timeout has passed."""


class Meetings:
    """All meetings of ``size`` ranks under ``key``, as ``name``, one of them, sees them.

    ``names`` are those of all, where they are known beforehand. To come has the time of
    ``timeout``, and so have reading the cards and opening.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        size: int,
        timeout: timedelta,
        *,
        rank: int,
        name: str,
        names: Sequence[str] = (),
    ) -> None:
        self._store, self._key = PrefixStore(key, store), key
        self._asked = PrefixStore("asked", store)  # by name: under which key it waits
        self._size, self._rank, self._name, self._names = size, rank, name, names
        self._seconds = timeout.total_seconds()
        self._start_clock()
        self._seen: set[str] = set()  # names of those that came to a meeting this one waited in

    # -- coming -------------------------------------------------------------------------------

    def arrive(self, ranks: int = 1, note: bytes = b"") -> Place:
        """Come to the first meeting that is open, with so many ranks; returns when it is full.

        ``note`` is for all to read (:meth:`cards`).
        """
        with reaching_store(self._rank):
            return self._arrive(Arrival(ranks, note))

    def _arrive(self, card: Arrival) -> Place:
        self._asked.set(self._name, self._key)
        while True:
            number = self._first_open()
            meeting = PrefixStore(str(number), self._store)
            try:
                before = self._enter(meeting, card)
                gate = self._await(meeting, "gate")
            except _Late:
                gate = self._settle(meeting, "gate", Left(self._name, "its time was over", False))
                if gate != _FULL:
                    raise self._nobody(meeting) from None
            except BaseException as error:
                self._settle(meeting, "gate", Left(self._name, _reason(error), True))
                raise
            if gate == _FULL:
                return Place(number, before)
            self._look_around(meeting)
            if isinstance(gate, Left) and gate.final:
                raise self._ended(gate)

    def _look_around(self, meeting: Store) -> None:
        """Note who is here: a rank that left because of its own timeout is not missing."""
        self._seen.update(name for name in self._names if meeting.check([f"here/{name}"]))

    def _first_open(self) -> int:
        """Of those where nobody is under this name: another thread of this rank may wait there."""
        number = self._store.add("closed", 0)  # may lag: who counts may die before it does
        while self._store.check([f"{number}/gate"]) or not self._is_first_at(number):
            number += 1
        return number

    def _is_first_at(self, number: int) -> bool:
        return self._store.add(f"{number}/here/{self._name}", 1) == 1

    def _enter(self, meeting: Store, card: Arrival) -> int:
        before = meeting.add("came", card.ranks) - card.ranks
        _put(meeting, f"card/{before}", card)
        if before + card.ranks > self._size:
            raise RendezvousError(
                f"{before + card.ranks} ranks came to a meeting of {self._size}",
                "Give the number of all ranks together.",
                self._rank,
            )
        if before + card.ranks == self._size:
            self._settle(meeting, "gate", _FULL)
        return before

    def cards(self, place: Place) -> list[Arrival]:
        """The cards of all that came to a meeting, in their order."""
        self._start_clock()  # whoever came last may have used up the time of all
        meeting, found, at = PrefixStore(str(place.number), self._store), [], 0
        with reaching_store(self._rank):
            while at < self._size:
                meeting.wait([f"card/{at}"], self._left())  # written after it was counted
                found.append(_CARDS.decode(meeting.get(f"card/{at}")))
                at += found[-1].ranks
        return found

    def hear(self, store: Store, key: str) -> bytes:
        """What another rank says in ``store``, as long as there is time for the meeting."""
        with reaching_store(self._rank):
            try:
                store.wait([key], self._left() + _GRACE)  # the other may use all of its own time
            except DistNetworkError:
                raise
            except (RuntimeError, ValueError) as error:
                what = f"after {self._seconds:g} s no message from another rank of this group"
                raise RendezvousError(what, _REMEDY, self._rank) from error
            return store.get(key)

    # -- opening ------------------------------------------------------------------------------

    def open(
        self, place: Place, opener: Callable[[Store], E], *, see_off: bool = False
    ) -> tuple[Store, E]:
        """Open an engine in the meeting's corner of the store; returns when every rank has.

        With ``see_off`` a rank that may hold the store returns when every rank knows that.
        """
        self._start_clock()  # whoever came last may have used up the time of all
        meeting = PrefixStore(str(place.number), self._store)
        room = PrefixStore("room", meeting)
        try:
            engine = opener(room)
        except BaseException as error:
            self._settle(meeting, "outcome", Left(self._name, _reason(error), True))
            if see_off and isinstance(error, Exception):
                self._see_off(meeting, _GRACE)
            raise
        try:
            with reaching_store(self._rank):
                if meeting.add("opened", 1) == self._size:
                    self._settle(meeting, "outcome", _GO)
                outcome = self._hear_outcome(meeting)
            if see_off and outcome == _GO:
                self._see_off(meeting, READING)
        except BaseException as error:
            self._settle(meeting, "outcome", Left(self._name, _reason(error), True))
            _end(engine)
            raise
        if isinstance(outcome, Left):
            _end(engine)
            if see_off:
                self._see_off(meeting, _GRACE)
            raise self._ended(outcome)
        return room, engine

    def _hear_outcome(self, meeting: Store) -> str | Left:
        try:
            return self._await(meeting, "outcome")
        except _Late:
            return self._settle(meeting, "outcome", Left(self._name, "its time was over", True))

    def _see_off(self, meeting: Store, patience: timedelta) -> None:
        """Count who knows the outcome; whoever may hold the store waits until all do."""
        with contextlib.suppress(Exception):  # all have what they came for
            if meeting.add("read", 1) == self._size:
                meeting.set("all read", "")
            if self._name == "0" or not self._names:
                meeting.wait(["all read"], patience)

    # -- the words of a meeting ---------------------------------------------------------------

    def _settle(self, meeting: Store, word: str, value: str | Left) -> str | Left:
        """Write ``word`` unless it is written already; what it says."""
        data = msgspec.json.encode(value).decode()
        with contextlib.suppress(RuntimeError):  # the store may be gone, which the caller finds
            written = meeting.compare_set(word, "", data).decode()
            if written == data:
                meeting.set(word, data)  # a HashStore wakes those that wait only now
                if word == "gate":
                    self._store.add("closed", 1)
            return _WORDS.decode(written)
        return value

    def _await(self, meeting: Store, word: str) -> str | Left:
        try:
            meeting.wait([word], self._left())
        except (RuntimeError, ValueError) as error:
            if "timeout" not in str(error) and time.monotonic() < self._end:
                raise
            raise _Late from error
        return _WORDS.decode(meeting.get(word))

    def _start_clock(self) -> None:
        self._end = time.monotonic() + self._seconds

    def _left(self) -> timedelta:
        """The time until the timeout; torch's stores read zero as "for ever"."""
        return timedelta(seconds=max(self._end - time.monotonic(), 0.001))

    # -- errors -------------------------------------------------------------------------------

    def _nobody(self, meeting: Store) -> RendezvousError:
        self._look_around(meeting)
        late = [name for name in self._names if name not in self._seen]
        if late:
            what = f"no sign of {'; '.join(map(self._whereabouts, late))}"
        elif self._names:
            what = "all ranks arrived, but not at the same time"
        else:
            what = f"{meeting.add('came', 0)} of {self._size} ranks came"
        return RendezvousError(f"after {self._seconds:g} s {what}", _REMEDY, self._rank)

    def _whereabouts(self, name: str) -> str:
        if not self._asked.check([name]):
            return f"rank {name}"
        key = self._asked.get(name).decode()
        return f"rank {name}" if key == self._key else f"rank {name}, which waits for {key}"

    def _ended(self, left: Left) -> RendezvousError:
        return RendezvousError(f"rank {left.who} failed: {left.why}", _REMEDY, self._rank)


def _put(store: Store, key: str, value: object) -> None:
    store.set(key, msgspec.msgpack.encode(value))  # type: ignore[arg-type]  # the stub says str


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST]


def _end(engine: Ends) -> None:
    """Free whoever waits for this rank's engine, and give it back."""
    engine.abort()
    engine.shutdown()
