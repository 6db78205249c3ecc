"""What became of an elastic job: who was lost, how, and how long the others took to go on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import inf
from statistics import fmean

from ..verdict import runs

_SHOWN = 10  # losses that are told one by one at the end


@dataclass
class Loss:
    """A member that was lost, and when the others went on."""

    member: int
    how: str
    when: float = 0.0  # on the host's monotonic clock
    seconds: float | None = None  # until the others went on; None: they did not, or need not


@dataclass
class JobStory:
    """The losses of a job in their order, and its rosters."""

    losses: dict[int, Loss] = field(default_factory=dict)  # by member
    members: tuple[int, ...] = ()  # of the roster in use
    keepers: int = 0  # that were replaced

    def lose(self, member: int, how: str, when: float) -> None:
        """Note that a member has failed."""
        self.losses[member] = Loss(member, how, when)

    def form(self, members: tuple[int, ...], now: float) -> float:
        """Note that others have gone on; returns the seconds since they lost whom they lost.

        One of them that is lost already was lost later: nobody has gone on from that yet.
        """
        answered = [
            loss
            for loss in self.losses.values()
            if loss.seconds is None and loss.member not in members
        ]
        for loss in answered:
            loss.seconds = now - loss.when
        self.members = members
        return max((loss.seconds or 0.0 for loss in answered), default=0.0)

    @property
    def unanswered(self) -> set[int]:
        """Members after whose loss nobody has gone on."""
        return {loss.member for loss in self.losses.values() if loss.seconds is None}

    def meets(self, living: Collection[int], now: float, within: float) -> bool:
        """Whether some of a roster are left that lost one lately and have not gone on yet."""
        unanswered = self.unanswered & set(self.members)
        latest = max((self.losses[member].when for member in unanswered), default=-inf)
        left = set(self.members) - unanswered
        return not left.isdisjoint(living) and now - latest < within

    def told(self) -> Iterator[str]:
        """The lines of a summary; none where nobody was lost."""
        answered = [loss for loss in self.losses.values() if loss.seconds is not None]
        if answered:
            times = [loss.seconds or 0.0 for loss in answered]
            count = f"{len(answered)} {'member was' if len(answered) == 1 else 'members were'} lost"
            yield f"{count}; the others went on after {_seconds(times)}"
        for loss in answered[:_SHOWN]:
            yield f"  member {loss.member}: {loss.how} ({loss.seconds or 0.0:.2f} s)"
        if len(answered) > _SHOWN:
            yield f"  … and {len(answered) - _SHOWN} more"
        if self.keepers:
            times_ = "once" if self.keepers == 1 else f"{self.keepers} times"
            yield f"the process that keeps the roster was replaced {times_}"


def tell_loss(member: int, how: str, left: int, instead: str) -> str:
    """That a member is lost."""
    others = "1 member of this host is" if left == 1 else f"{left} members of this host are"
    return f"member {member} is lost: {how}; {others} left{instead}"


def tell_formed(
    number: int, members: tuple[int, ...], newcomers: Collection[int], seconds: float
) -> str:
    """Who trains from now on."""
    one = len(members) == 1
    who = f"{'member' if one else 'members'} {runs(sorted(members))} {'trains' if one else 'train'}"
    if number == 1:
        return who
    after = f" after {seconds:.2f} s" if seconds else ""
    joined = f", with {runs(sorted(newcomers))} new" if newcomers else ""
    return f"{who} on{after}{joined}"


def _seconds(times: list[float]) -> str:
    if len(times) == 1:
        return f"{times[0]:.2f} s"
    return f"{fmean(times):.2f} s on average, {max(times):.2f} s at most"
