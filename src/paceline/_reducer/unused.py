"""Picture: which parameters this rank's passes reached, and whether the policy allows it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..errors import GraphChangedError, LateGradientError, PacelineError
from ..policies import Reduction
from .header import Header


class Picture:
    """What passes reached so far."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._first: frozenset[int] | None = None  # reached by the first pass
        self.steady = True  # all passes reached the same so far
        self.unused: frozenset[int] = frozenset()  # not reached here in the last two passes
        self._missed: frozenset[int] = frozenset()  # in the last one
        self.used = [0] * len(self._names)  # by how many ranks' graphs in the last pass
        self.unfinished: tuple[int, ...] = ()  # strict: what the last pass did not reach
        self._told: Header | None = None  # what was counted last

    def named(self, numbers: Iterable[int]) -> list[str]:
        """The parameters' names, in order."""
        return [self._names[number] for number in sorted(numbers)]

    def objection(
        self, rank: int, missed: Collection[int], again: Collection[int], policy: Reduction
    ) -> PacelineError | None:
        """What is wrong with a pass that did not reach ``missed`` and came ``again`` to some."""
        if again and not policy.static_graph:
            return LateGradientError(rank, self.named(again))
        if not missed and self._first is not None and len(self._first) == len(self._names):
            return None  # all of them, as in the first pass
        reached = frozenset(range(len(self._names))).difference(missed)
        if self._first is None:
            self._first = reached
        self.steady = self.steady and reached == self._first
        changed = sorted(reached ^ self._first)
        if not policy.static_graph or not changed:
            return None
        if policy.strict:
            self.unfinished = tuple(changed)
            if reached < self._first:  # torch waits for the rest, and refuses the next forward
                return None
        return GraphChangedError(rank, changed, self.named(changed))

    def conclude(self, missed: Collection[int], policy: Reduction) -> None:
        """A pass of this rank's own is over."""
        before, self._missed = self._missed, frozenset(missed)
        self.unused = before & self._missed
        if policy.strict and not (policy.find_unused or policy.static_graph):
            self.unfinished = tuple(sorted(self._missed))

    def count(self, told: Header | None, ranks: int) -> None:
        """Learn from the header on how many ranks each parameter was reached."""
        if told is not None and told is not self._told:
            self._told, self.used = told, told.used(ranks)

    def forget(self) -> None:
        """The next pass is as a first one."""
        self._first, self.unfinished = None, ()
        self.unused = self._missed = frozenset()
