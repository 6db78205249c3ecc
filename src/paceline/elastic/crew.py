"""Crew: the members that this rank trains with, as they come and go.

A member hears of changes on another thread. It must not wait for one that is lost, so its group is
aborted there and then; everything else waits for the end of the step. What it heard of a roster
that is over has no meaning any more, and is told apart by the roster's number.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from traceback import walk_tb

import torch
import torch.distributed as dist

from .._members import HowFar, Members, Roster, RosterChange
from ..errors import (
    GroupError,
    MembershipError,
    MismatchError,
    PacelineError,
    PeerError,
    RankUnableError,
    RendezvousError,
    StateCopyError,
)
from ..groups import Group

log = logging.getLogger(__name__)

_COLLECTIVES = ("paceline.groups", "paceline._transport", "paceline._members", "torch.distributed")
_GLOO_SOURCES = "gloo/transport/"  # in gloo's errors: each names the file it was raised in


class Crew:
    """The other members, and the group that this rank has with them."""

    def __init__(self, group: Group, members: Members, moved: Callable[[], None]) -> None:
        self.group, self.members, self._moved = group, members, moved
        self.roster: Roster | None = None
        self.dismissed = ""  # why this member is to leave after the step
        self.ended = ""  # why the job is over
        self._lost: tuple[int, str] = (0, "")  # the latest roster that lost a member, and how
        self._waited_for = 0  # the latest roster that somebody wants to join
        self._lock = threading.Lock()
        members.listen(self._hear)

    # -- what is heard --------------------------------------------------------------------------

    def _hear(self, change: RosterChange) -> None:
        with self._lock:
            number = change.roster or self._number
            if change.kind == "waiting":
                self._waited_for = max(self._waited_for, number)
            elif change.kind == "leave":
                self.dismissed = change.why or "it was told to"
            elif change.kind == "end":
                self.ended = change.why or "it was told to"
                self.group.abort()
            elif change.kind == "lost" and number >= self._lost[0]:
                told = (f"member {who}: {why}" for who, why in change.members.items())
                self._lost = number, "; ".join(told)
                if number >= self._number:
                    self.group.abort()

    @property
    def _number(self) -> int:
        return 0 if self.roster is None else self.roster.number

    @property
    def lost(self) -> str:
        """Who of this roster was lost, in words; empty while all are there."""
        number, why = self._lost
        return (why or "a member was lost") if self.roster and number >= self._number else ""

    @property
    def wants_meeting(self) -> bool:
        """Whether somebody wants to join or leave after the step."""
        joins = self.roster is not None and self._waited_for >= self._number
        return joins or bool(self.dismissed)

    def dismiss(self, why: str) -> None:
        """Leave after the step."""
        self.dismissed = self.dismissed or why

    # -- the next roster ------------------------------------------------------------------------

    def gather(self, how_far: HowFar, timeout: float) -> Roster:
        """Meet the others and open the group with them; returns when every one of them has."""
        while True:  # the council ends a member that is in trouble again and again
            log.debug("member %d meets the others", self.members.me)
            roster = self.members.meet(how_far, timeout)
            trouble, culprit = self._open(roster)
            if self.members.ready(roster.number, trouble, culprit):
                self._moved()
                log.debug("member %d: roster %d is open", self.members.me, roster.number)
                return roster
            why = trouble or "not all members could open the group"
            how_far = HowFar(how_far.steps, how_far.whole, why)

    def _open(self, roster: Roster) -> tuple[str, int]:
        """Move the group to the members of a roster; what went wrong, in words, and with whom."""
        with self._lock:
            self.roster = roster
        rank = roster.members.index(self.members.me)
        log.info("member %d: roster %d, rank %d of %d", self.members.me, roster.number, rank,
                 len(roster.members))  # fmt: skip
        try:
            self.group.move(self.members.store(roster.number), rank, roster.members)
        except Exception as error:
            unable = error.culprit if isinstance(error, RankUnableError) else -1
            return f"{type(error).__name__}: {error}", roster.members[unable] if unable >= 0 else -1
        if self.lost:  # the news came while there was nothing to abort
            self.group.abort()
        return "", -1


def is_loss(error: BaseException) -> bool:
    """Whether a collective failed because a rank is gone, or a connection is: to be done again.

    gloo and NCCL raise a plain RuntimeError then, as does a body that has a mistake: such an error
    counts only if a collective raised it.
    """
    if isinstance(error, MembershipError | MismatchError | torch.OutOfMemoryError):
        return False
    if isinstance(error, PacelineError):
        again = GroupError | PeerError | RendezvousError | StateCopyError | TimeoutError
        return isinstance(error, again)
    return isinstance(error, RuntimeError | OSError) and _is_of_a_collective(error)


def _is_of_a_collective(error: BaseException) -> bool:
    if _GLOO_SOURCES in str(error):  # a wait in C++, of which the traceback shows only who waited
        return True
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    known = isinstance(error, dist.DistError)  # raised wherever a device was waited for
    return known or any(module.startswith(_COLLECTIVES) for module in modules)
