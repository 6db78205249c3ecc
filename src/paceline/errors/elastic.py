"""Errors of jobs that ranks may leave and join."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class MembershipError(PacelineError, RuntimeError):
    """This process cannot be, or is no longer, a member of its job."""

    member: int
    why: str
    well: bool = False  # the job is done, and there is nothing left for this process

    def __str__(self) -> str:
        who = f"member {self.member}" if self.member >= 0 else "this process"
        return (
            f"{who} cannot go on with the job: {self.why}. The others, if there are any, go on "
            "without it. What it has computed since the last commit is not in their weights; "
            "end this process, and let the launcher start another in its place."
        )


@dataclass(eq=False)
class JobEndedError(MembershipError):
    """The job is over for all of its members."""

    def __str__(self) -> str:
        return (
            f"member {self.member}: the job has ended, for every member: {self.why}. "
            "Start it again once the cause is found; it goes on from its last save."
        )


@dataclass(eq=False)
class MeetingTimeoutError(MembershipError, TimeoutError):
    """The next roster was not decided in time."""

    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"member {self.member}: no roster was decided in {self.seconds:g} s: {self.why}. "
            "The others wait until this process ends or comes again. Look at the members that are "
            "named, or give the meeting more time."
        )


@dataclass(eq=False)
class KeeperLostError(MembershipError, ConnectionError):
    """The process that keeps the list of members is not reached any more."""

    def __str__(self) -> str:
        return (
            f"member {self.member} does not reach the keeper of its job: {self.why}. Others that "
            "reach one go on without this process; it must not, since nobody would know. "
            "See whether the launcher (paceline run) still lives on this host."
        )


@dataclass(eq=False)
class KeeperTakenError(PacelineError, RuntimeError):
    """Another keeper is at work where one was to be started."""

    path: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"another keeper held {self.path} for {self.seconds:g} s, and two would decide "
            "differently. Members go on with that one; end it first if it is not to be used."
        )
