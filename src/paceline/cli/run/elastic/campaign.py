"""Follows in the store which host has the keeper, and takes the seat when nobody has it.

A thread, since the store may take its time; the agent looks at :attr:`Campaign.standing`.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from ...._members import ChosenTerm, KeeperSeat, KeeperTerms, Over, SeenTerms

POLL = 0.5  # seconds between two looks


@dataclass(frozen=True)
class HostStanding:
    """How things are: at most one of the first two is there."""

    mine: ChosenTerm | None = None  # the keeper is to be here
    seat: KeeperSeat | None = None  # …or there
    over: Over | None = None  # the job has ended
    left_behind: str = ""  # why this host has no part in it any more


class Campaign:
    """The standing of one host; ``me`` is where its keeper would be reached."""

    def __init__(
        self, terms: KeeperTerms, me: KeeperSeat, seconds: int, poll: float = POLL
    ) -> None:
        self._terms, self._me, self._seconds, self._poll = terms, me, seconds, poll
        self.standing = HostStanding()
        self.reached_at = time.monotonic()
        self.trouble = ""  # why the store was not reached at the last look
        self._job = ""  # the job that this host has a part in
        self._resigned = 0  # the last term that a keeper of this host gave up
        self._wakes = threading.Event()
        self._closing = False
        self.look()  # so that a store that is not there is known before anything is started
        self._thread = threading.Thread(target=self._run, name="paceline-campaign", daemon=True)

    def begin(self) -> None:
        """Go on looking."""
        self._thread.start()

    def resign(self, term: int) -> None:
        """Know that this host's keeper of that term decides no more."""
        self._resigned = term
        self._wakes.set()

    def close(self) -> None:
        """Look no more; a seat of this host is free for another at once."""
        self._closing = True
        self._wakes.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self.standing.mine is not None:
            with suppress(OSError):
                self._terms.etcd.revoke(self.standing.mine.lease)

    def look(self) -> None:
        """See how things are, once; raises OSError where the store is not reached."""
        seen = self._terms.look()
        self.standing = self._judge(seen)
        self.reached_at, self.trouble = time.monotonic(), ""

    def _run(self) -> None:
        while not self._closing:
            self._wakes.wait(self._poll)
            self._wakes.clear()
            try:
                self.look()
            except Exception as error:  # whatever it is, this host has to notice that it is blind
                self.trouble = str(error) or type(error).__name__

    def _judge(self, seen: SeenTerms) -> HostStanding:
        state = seen.state
        if self._job and (state is None or state.job != self._job):
            return HostStanding(left_behind="it was begun again without this host")
        if self._job and state is not None and state.ended:
            return HostStanding(over=Over(state.ended, failed=not state.well))
        if seen.seat is None:
            return self._take(seen)
        self._job = seen.seat.job
        mine = self.standing.mine
        if mine is not None and seen.created == mine.created:
            return self._mine_unless_resigned(mine)
        return HostStanding(seat=seen.seat)

    def _mine_unless_resigned(self, mine: ChosenTerm) -> HostStanding:
        """Keep the seat, or free it for another; this host waits for its turn then."""
        if mine.term != self._resigned:
            return self.standing
        self._terms.etcd.revoke(mine.lease)
        return HostStanding()

    def _take(self, seen: SeenTerms) -> HostStanding:
        if self._closing:
            return HostStanding()
        mine = self._terms.take(seen, self._me, self._seconds)
        if mine is None:  # another was quicker, and is seen at the next look
            self._wakes.set()
            return HostStanding()
        self._job = mine.job
        return HostStanding(mine=mine)
