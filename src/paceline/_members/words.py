"""What members and the keeper say to each other about rosters.

Every word is a msgspec struct of a known type with a tag, so it can be sent as msgpack and nothing
that comes back is ever anything else.
"""

from __future__ import annotations

from math import inf

import msgspec

from .roster import HowFar, Roster, RosterChange


class ProcessId(msgspec.Struct, frozen=True):
    """A process, wherever it runs."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


# What a member says.


class Enrol(msgspec.Struct, frozen=True, tag=True):
    """The first word of a process: who it is, and who it was for the keeper before this one."""

    process: ProcessId
    member: int | None = None  # its number, if it has one already
    roster: Roster | None = None  # the last one that it was told
    in_use: bool = False  # all members of that roster said that they can use it


class Meet(msgspec.Struct, frozen=True, tag=True):
    """It waits for the next roster; ``turn`` comes back with the answer."""

    how_far: HowFar
    turn: int
    within: float = inf  # seconds; then it would give up


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """It waits no longer."""

    turn: int


class SaysReady(msgspec.Struct, frozen=True, tag=True):
    """It can use the roster, or has the trouble that is told."""

    roster: int
    trouble: str = ""
    culprit: int = -1  # the member that caused it, if it is known not to be this one


class HasCommitted(msgspec.Struct, frozen=True, tag=True):
    """It has committed so many steps."""

    steps: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """It is a member no longer."""

    why: str = ""
    failed: bool = False  # its program raised an error in a step
    finished: bool = False  # there is nothing left to do


class Alive(msgspec.Struct, frozen=True, tag=True):
    """It lives; the keeper answers with the same word."""


# What the keeper answers.


class Enrolled(msgspec.Struct, frozen=True, tag=True):
    """The process is a member, with this number."""

    member: int


class Decided(msgspec.Struct, frozen=True, tag=True):
    """The roster that it waited for."""

    roster: Roster
    turn: int


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Whether all can use the roster; if not, why."""

    roster: int
    usable: bool
    why: str = ""


class Changed(msgspec.Struct, frozen=True, tag=True):
    """There has to be another roster."""

    change: RosterChange


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It gets no roster: it is no member, or the job has ended, or it withdrew."""

    why: str
    ended: bool = False  # the whole job
    well: bool = False  # …since there is nothing left to do
    turn: int = 0  # of the meeting that it withdrew from; 0: it is not a member any more


FromMember = Enrol | Meet | Withdraw | SaysReady | HasCommitted | Leave
ToMember = Enrolled | Decided | Opened | Changed | Refused
