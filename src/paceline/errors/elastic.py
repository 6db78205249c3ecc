"""Errors of members of an elastic job."""

from __future__ import annotations

from dataclasses import dataclass

from .base import PacelineError


@dataclass(eq=False)
class MembershipError(PacelineError, RuntimeError):
    """This process cannot be, or is no longer, a member of its job."""

    member: int
    why: str
    well: bool = False  # the job has finished, and this process is not needed

    def __str__(self) -> str:
        who = f"member {self.member}" if self.member >= 0 else "this process"
        return (
            f"{who} cannot continue in the job: {self.why}. Other members continue "
            "without it. What it computed since the last commit is not in their weights; "
            "end this process, and let the launcher start a replacement."
        )


@dataclass(eq=False)
class JobEndedError(MembershipError):
    """The job has ended for all of its members."""

    def __str__(self) -> str:
        return (
            f"member {self.member}: the job has ended for every member: {self.why}. "
            "Fix the cause and start it again; it resumes from its last save."
        )


@dataclass(eq=False)
class MeetingTimeoutError(MembershipError, TimeoutError):
    """The members that continue were not decided in time."""

    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"member {self.member}: no roster was decided in {self.seconds:g} s: {self.why}. "
            "The others wait until this process ends or tries again. Check the members that are "
            "named, or use a longer timeout."
        )


@dataclass(eq=False)
class KeeperLostError(MembershipError, ConnectionError):
    """The keeper, which holds the list of members, cannot be reached."""

    def __str__(self) -> str:
        return (
            f"member {self.member} cannot reach the keeper of its job: {self.why}. Members that "
            "can reach it continue without this process, which must not continue alone. "
            "Check whether the launcher (paceline run) still runs on this host."
        )


@dataclass(eq=False)
class KeeperTakenError(PacelineError, RuntimeError):
    """Another keeper already runs for this job."""

    path: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"another keeper held {self.path} for {self.seconds:g} s, and two could decide "
            "differently. Members use that one; to replace it, end it first."
        )
