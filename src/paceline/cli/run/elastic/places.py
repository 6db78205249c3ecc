"""Which members of a host are started, and when: replacements, how many, and not all at once. Pure.

A host has ``ranks + spares`` places. A member that fails leaves its place to a new one, at once if
it had ever taken part. Where members end before they have, as when an import fails, or one after
the other without a step between, they are replaced later and later, and not for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..verdict import RankEnding

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0  # seconds before one is replaced that came to nothing
_VAIN = 3  # more starts than there are places that came to nothing, though others did not
_STUCK = 3  # times as many losses as there are places, and no step between them: it is, too


@dataclass(frozen=True)
class HostSize:
    """How many members a host has, and how often they are replaced."""

    ranks: int
    spares: int = 0
    max_restarts: int | None = None  # None: as often as it takes, while that gets them on

    @property
    def places(self) -> int:
        """Processes that run here when all is well."""
        return self.ranks + self.spares


@dataclass
class Places:
    """The members of this host: who lives, who has ended, who is to be started."""

    size: HostSize
    seats: dict[int, int] = field(default_factory=dict)  # of those that live, by number
    endings: dict[int, RankEnding] = field(default_factory=dict)  # by number
    seen: set[int] = field(default_factory=set)  # that have taken part, or waited to
    restarts: int = 0
    vain: int = 0  # starts in a row that came to nothing
    stuck: int = 0  # losses since a step was last committed
    steps: int = -1  # that are committed, as far as is known
    closed: bool = False  # nobody is started any more
    _missing: int = field(init=False)  # places that are to be filled
    _not_before: float = 0.0

    def __post_init__(self) -> None:
        self._missing = self.size.places

    @property
    def living(self) -> set[int]:
        """The numbers of the processes that run."""
        return set(self.seats)

    @property
    def first_ranks(self) -> int:
        """How many of the ranks that a job begins with have not been started yet."""
        return max(0, self.size.ranks - len(self.endings) - len(self.seats))

    @property
    def over(self) -> bool:
        """Whether nobody runs and nobody will."""
        return not self.seats and (self.closed or not self._missing)

    @property
    def exhausted(self) -> str:
        """Why nobody is started any more though places are empty; empty if that is not so."""
        return self._exhausted_with(self._missing)

    @property
    def exhausted_by_one_more(self) -> str:
        """Why nobody would be started once one more has failed; empty if somebody would."""
        return self._exhausted_with(self._missing + 1)

    def _exhausted_with(self, missing: int) -> str:
        if self.closed or not missing:
            return ""
        most = self.size.max_restarts
        if most is not None and self.restarts >= most:
            return f"all {most} of --max-restarts are used" if most else "--max-restarts is 0"
        if most is not None:
            return ""
        if self.vain >= self.size.places + (_VAIN if self.seen else 0):
            return f"the last {self.vain} processes ended before they took part"
        if self.stuck >= _STUCK * self.size.places + _VAIN:
            return f"{self.stuck} members were lost while no step was committed"
        return ""

    def due(self, now: float) -> int:
        """How many may be started now."""
        if self.closed or now < self._not_before:
            return 0
        first = self.size.places - len(self.endings) - len(self.seats)
        if first > 0 or not self._missing:
            return min(first, self._missing) if first > 0 else 0
        return 0 if self.exhausted else min(self._missing, self._left())

    def _left(self) -> int:
        most = self.size.max_restarts
        return self._missing if most is None else most - self.restarts

    def start(self, number: int) -> int:
        """Note that a member is started; returns the place that it takes, the lowest free one."""
        seat = min(set(range(self.size.places)) - set(self.seats.values()))
        if len(self.endings) + len(self.seats) >= self.size.places:
            self.restarts += 1
        self.seats[number] = seat
        self._missing -= 1
        return seat

    def took_part(self, numbers: set[int], steps: int = 0) -> None:
        """Note who is in the roster, or waits to be let in, and how many steps are committed."""
        if numbers & self.seats.keys() - self.seen:
            self.vain = 0
        if steps > self.steps:
            self.steps, self.stuck = steps, 0
        self.seen |= numbers & self.seats.keys()

    def end(self, number: int, ending: RankEnding, failed: bool) -> None:
        """Note how a member has ended; one that failed is replaced."""
        del self.seats[number]
        self.endings[number] = ending
        if not failed:
            return
        self._missing += 1
        self.stuck += 1
        if number not in self.seen:
            self.vain += 1
        in_a_row = max(self.vain, self.stuck - self.size.places)
        if in_a_row > 0:
            wait = min(_FIRST_WAIT * 2 ** min(in_a_row - 1, 10), _LONGEST_WAIT)
            self._not_before = ending.when + wait

    def close(self) -> None:
        """Start nobody any more."""
        self.closed = True
