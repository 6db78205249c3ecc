"""Which host has the keeper: an election in a store that outlives any host (etcd).

The keeper's *seat* is a key with a lease: its host's address, and the number of its **term**. Who
finds no seat takes it, with the next term; of several at once one does. Beside it lies the *state*
of the job, what the next keeper must know: numbers that must never be given twice, and the last
roster. A keeper writes the state before anybody hears of what is new in it, and only if the seat is
still its own and the state as it left it. So a keeper that was given up, whatever its clock says,
gives no number and decides no roster; besides, it ends before its lease does (:class:`TermRight`).
"""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import TypeVar

import msgspec

from .._etcd import Condition, Etcd, KeptKey, Put
from ..errors import StoreAnswerError, TermOverError
from .roster import HowFar, Roster

SHARE = 0.8  # of a lease that a keeper relies on
RETRY = 0.1  # seconds between two attempts
RESIGNED = 75  # exit code of a keeper that may not decide any more
REMEMBERED = 3600  # seconds that an ended job is


class KeeperSeat(msgspec.Struct, frozen=True):
    """Where the keeper is."""

    job: str
    term: int
    host: str
    address: str
    port: int


class KeptJob(msgspec.Struct, frozen=True):
    """What outlives every keeper of a job."""

    job: str  # told from another one of the same name
    term: int = 0
    next_member: int = 0
    last_roster: int = 0
    roster: Roster | None = None
    ended: str = ""
    well: bool = False


class ChosenTerm(msgspec.Struct, frozen=True):
    """What a keeper needs to show that it is the one that was chosen."""

    prefix: str
    job: str
    term: int
    lease: int
    seconds: int  # of the lease
    created: int  # the revision that made the seat


@dataclass(frozen=True)
class SeenTerms:
    """The store at one moment."""

    state: KeptJob | None
    changed: int  # the revision of the state; 0: there is none
    seat: KeeperSeat | None
    created: int  # the revision that made the seat; 0: there is none


class KeeperTerms:
    """The keepers of one job, in the store."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self.etcd, self.prefix = etcd, prefix
        self._seat, self._state = f"{prefix}/keeper", f"{prefix}/state"

    def look(self) -> SeenTerms:
        """See who has the seat, and the state."""
        found = self.etcd.read(self._seat, self._state)
        seat, state = found.get(self._seat), found.get(self._state)
        return SeenTerms(
            None if state is None else _decoded(state, KeptJob),
            0 if state is None else state.changed,
            None if seat is None else _decoded(seat, KeeperSeat),
            0 if seat is None else seat.created,
        )

    def take(self, seen: SeenTerms, me: KeeperSeat, seconds: int) -> ChosenTerm | None:
        """Take a seat that was seen to be empty; None if another was quicker.

        Raises StoreLostError; the seat may be taken then, for nobody, until its lease ends.
        """
        state = next_state(seen.state)
        lease = self.etcd.grant(seconds)
        seat = msgspec.structs.replace(me, job=state.job, term=state.term)
        puts = {
            self._seat: Put(msgspec.json.encode(seat), lease),
            self._state: Put(msgspec.json.encode(state)),
        }
        empty = [Condition(self._seat, created=0), Condition(self._state, changed=seen.changed)]
        created = self.etcd.write(puts, empty)
        if created is None:
            self.etcd.revoke(lease)
            return None
        return ChosenTerm(self.prefix, state.job, state.term, lease, seconds, created)

    def write(self, held: ChosenTerm, state: KeptJob, changed: int) -> int | None:
        """Write the state, if the seat is still that one's and nobody else has written."""
        lease = self.etcd.grant(REMEMBERED) if state.ended else 0
        mine = [
            Condition(self._seat, created=held.created),
            Condition(self._state, changed=changed),
        ]
        return self.etcd.write({self._state: Put(msgspec.json.encode(state), lease)}, mine)


def next_state(before: KeptJob | None) -> KeptJob:
    """The state that a new term begins with: that of a job that goes on, or of a new one."""
    if before is None or before.ended:
        return KeptJob(secrets.token_hex(8), 1 if before is None else before.term + 1)
    return msgspec.structs.replace(before, term=before.term + 1)


class TermRight:
    """The right of this process to decide: a lease that a thread keeps, and the state.

    Raises TermOverError, at once or later, when the right has ended.
    """

    def __init__(self, terms: KeeperTerms, held: ChosenTerm) -> None:
        self._terms, self._held = terms, held
        self._until = -inf
        self._why = ""
        self._closing = threading.Event()
        self._begin(monotonic() + held.seconds)
        self.state, self._changed = self._find_state()
        self._thread = threading.Thread(target=self._keep, name="paceline-lease", daemon=True)
        self._thread.start()

    def _begin(self, until: float) -> None:
        """Renew the lease for the first time: nobody here knows how old it is."""
        while self._until < 0 and not self._why and monotonic() < until:
            self._renew()
            self._closing.wait(0 if self._until > 0 else RETRY)
        self.check()

    def check(self) -> None:
        """Raise if this process may not decide any more."""
        if self._why:
            raise TermOverError(self._held.term, self._why)
        if monotonic() >= self._until:
            raise TermOverError(self._held.term, "its lease could not be renewed in time")

    @property
    def until(self) -> float:
        """When the right ends unless the lease is renewed, on the monotonic clock."""
        return self._until

    def write(self, next_member: int, last_roster: int, roster: Roster | None) -> None:
        """Write what is about to be told; it is safe from the loss of any host then."""
        self._write(
            msgspec.structs.replace(
                self.state, next_member=next_member, last_roster=last_roster, roster=_short(roster)
            )
        )

    def end(self, why: str, well: bool) -> None:
        """Write that the job has ended."""
        self._write(msgspec.structs.replace(self.state, ended=why or "it has ended", well=well))

    def close(self) -> None:
        """Give the seat up, if it can be reached."""
        self._closing.set()
        self._thread.join()
        with suppress(OSError):  # it ends by itself
            self._terms.etcd.revoke(self._held.lease)

    def _write(self, state: KeptJob) -> None:
        """Write until it is known to be written; the lease ends before the patience does."""
        while True:
            self.check()
            try:
                changed = self._terms.write(self._held, state, self._changed)
                if changed is None:
                    changed = self._written_already(state)
                break
            except OSError:
                self._closing.wait(RETRY)
        self.state, self._changed = state, changed

    def _written_already(self, state: KeptJob) -> int:
        """The revision of a write whose answer was lost; raises if another keeper has the seat."""
        seen = self._terms.look()
        if seen.created == self._held.created and seen.state == state:
            return seen.changed
        self._why = "another keeper was chosen"
        raise TermOverError(self._held.term, self._why)

    def _find_state(self) -> tuple[KeptJob, int]:
        while True:
            self.check()
            try:
                seen = self._terms.look()
            except OSError:
                self._closing.wait(RETRY)
                continue
            if seen.created != self._held.created or seen.state is None:
                raise TermOverError(self._held.term, "another keeper was chosen")
            return seen.state, seen.changed

    # On the thread.

    def _keep(self) -> None:
        while not self._why and not self._closing.wait(self._held.seconds / 5):
            self._renew()

    def _renew(self) -> None:
        """Renew the lease; it counts from when that was asked for, not from the answer."""
        asked = monotonic()
        try:
            if self._terms.etcd.keep(self._held.lease):
                self._until = asked + SHARE * self._held.seconds
            else:
                self._why = "its lease has ended"
        except OSError:
            pass  # what is left of the lease is left


def _short(roster: Roster | None) -> Roster | None:
    """A roster without the reasons, which need not be kept."""
    if roster is None or not roster.number:
        return None
    how_far = tuple(HowFar(one.steps, one.whole) for one in roster.how_far)
    return Roster(roster.number, roster.members, how_far)


Kind = TypeVar("Kind")


def _decoded(kept: KeptKey, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(kept.value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreAnswerError(f"{kept.value[:80]!r}, which no keeper wrote ({error})") from None
