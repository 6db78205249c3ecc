"""Which backward passes are averaged: those that follow a forward through the wrapper.

torch's rule, which programs rely on: a forward through the wrapper arms the reducer, and the next
gradients are averaged, wherever they come from, until each parameter has had one. A backward pass
that no such forward came before (of ``ddp.module(x)``, of a penalty on the parameters) leaves
gradients as they are, on this rank alone. Beyond that rule, a backward pass through an output of
such a forward is averaged however often it comes (``Reducer.watch``), and so are those that run
inside the forward itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum, auto


class Expects(Enum):
    """Which backward passes that do not come through an output are averaged."""

    NONE = auto()
    NEXT = auto()  # a forward has ended, and its gradients have not all come
    ALL = auto()  # a forward runs, or nobody tells of forwards


class Expected:
    """The forwards of one wrapper, and what they make of the backward passes that follow."""

    def __init__(self, wanted: Callable[[], bool] = lambda: True) -> None:
        self.wanted = wanted  # whether gradients that come now are averaged, or gather here
        self.state = Expects.ALL
        self._outside = Expects.NONE  # the state around the forward that runs
        self._left: frozenset[int] | None = None  # no pass has reached them since the last forward
        self._unused: frozenset[int] = frozenset()  # no pass of the forward before did

    @property
    def nothing(self) -> bool:
        """Whether a backward pass that does not go through an output is not averaged."""
        return self.state is Expects.NONE

    @property
    def is_unanswered(self) -> bool:
        """Whether a forward has ended, and no pass has come since."""
        return self.state is Expects.NEXT and self._left is None

    def reset(self) -> None:
        """No forward has come yet."""
        self.state = self._outside = Expects.NONE

    def forward_begins(self) -> None:
        """Backward passes that run inside it are averaged."""
        if self.state is not Expects.ALL:
            self._outside, self.state = self.state, Expects.ALL

    def expect_next(self) -> None:
        """The next backward pass is averaged, as if a forward had ended now."""
        if self.state is not Expects.ALL:
            self.forward_ends(averaged=True)

    def forward_ends(self, *, averaged: bool) -> None:
        """The next backward pass is averaged, unless this forward spoke against it, or failed."""
        self.state = Expects.NEXT if averaged else self._outside
        if averaged:
            self._left = None

    def gradients_came(self, missed: Collection[int], *, at_once: bool = False) -> None:
        """A pass has ended in which no rank reached ``missed``.

        ``at_once``: whatever is missed will not come any more.
        """
        if not self._left:
            self._left = frozenset(missed)
        else:
            self._left = self._left.intersection(missed)
        complete = at_once or not self._left or self._left == self._unused
        self._unused = self._left
        if complete and self.state is Expects.NEXT:
            self.state = Expects.NONE
