"""What a rank sees of the members of a job that ranks may leave and join.

A **member** is one process of the job. It has a number that no other process of the job ever gets.
A **roster** is the list of members that train together from one point on; its order gives their
ranks. Rosters are numbered, and whatever belongs to an older one reaches nobody. A member that is
lost, or one that waits to be let in, calls for the next roster:

1. Every member that hears of it, or whose collective fails, comes to :meth:`Members.meet` and says
   how far it has come. When all that live have come, the next roster is decided, once, for all.
2. Each opens its group for that roster in :meth:`Members.store`, and says whether it could in
   :meth:`Members.ready`. Only if all could does anybody use it; else they meet again.
3. Whoever has fewer steps than others gets the state from the roster's :attr:`Roster.source`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from torch.distributed import Store

NOTHING = -1  # steps of a member that has no state of the job yet


class HowFar(msgspec.Struct, frozen=True):
    """How far a member has come when it comes to a meeting."""

    steps: int = NOTHING  # that it has committed; NOTHING: it needs the state of another
    whole: bool = True  # others may have its state
    why: str = ""  # it came, in words


class Roster(msgspec.Struct, frozen=True):
    """The members that train together from one point on."""

    number: int  # counts up from 1
    members: tuple[int, ...]  # in the order of their ranks
    how_far: tuple[HowFar, ...]  # of each of them
    gone: dict[int, str] = {}  # members that the roster before had, and why they are not here

    @property
    def steps(self) -> int:
        """Steps that are committed: as many as the member has that is farthest."""
        return max(one.steps for one in self.how_far)

    @property
    def source(self) -> int | None:
        """The rank whose state those behind get; None: all begin, or nobody has it whole."""
        for rank, one in enumerate(self.how_far):
            if one.whole and one.steps == self.steps != NOTHING:
                return rank
        return None


class RosterChange(msgspec.Struct, frozen=True):
    """Why there has to be another roster than the one that is in use."""

    kind: Literal["lost", "waiting", "leave", "end"]
    members: dict[int, str] = {}
    """``lost``: members that are gone or have given the roster up, and why; ranks that wait for
    them must be freed at once. ``waiting``: members that would join after the step. ``leave``: this
    member is to leave after the step. ``end``: the job is over."""
    roster: int = 0  # the number of the roster that it is about
    why: str = ""  # in words, for ``leave`` and ``end``
    well: bool = False  # ``end``: there is nothing left to do


class Members(Protocol):
    """The other members, as one of them sees them. Any thread may call any method."""

    @property
    def me(self) -> int:
        """This member's number."""

    def meet(self, how_far: HowFar, timeout: float) -> Roster:
        """Wait for the next roster that this member is in.

        A meeting without ``how_far.why`` is one that all come to by themselves, after the same
        step; otherwise members that have not come yet hear that the roster is ``lost``. Raises
        MembershipError when the job has ended or goes on without this member, and after
        ``timeout`` seconds.
        """

    def ready(self, number: int, trouble: str = "", culprit: int = -1) -> bool:
        """Say whether this member can use the roster's group; True if all can. Else meet again.

        ``culprit``: the member whose trouble it is, if it is known to be another's. One that five
        rosters in a row were given up for is ended, and the others go on.
        """

    def store(self, number: int) -> Store:
        """Where the members of a roster find what others left for them, and nobody else's."""

    def listen(self, heard: Callable[[RosterChange], None]) -> None:
        """Call ``heard``, on another thread, with every change, also with one that is pending."""

    def tell(self, steps: int) -> None:
        """Say how many steps this member has committed; costs it next to nothing."""

    def leave(self, why: str = "", failed: bool = False, finished: bool = False) -> None:
        """Be a member no longer; the others hear ``why``.

        ``failed``: an error of the program in a step; the job ends when the same step fails on
        three members. ``finished``: all steps are done, and no newcomer is let in any more.
        """

    def close(self) -> None:
        """Close the connection without telling the keeper."""
