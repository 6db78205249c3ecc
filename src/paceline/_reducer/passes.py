"""Pass: one backward pass as a reducer sees it, from its first sign to its end.

A pass begins to *wait* when a backward pass comes to an output of a forward, or to a parameter
that is listened to. When gradients come it *learns* their order, or *fills* buckets and sends them
off. At the end of the backward pass it is *exchanging*: the rest is sent. Once all is *sent*, the
averages are awaited, at once or when the program says so (``finalization.py``). Then it has
*ended*, or *failed*. :meth:`Pass.move` knows what may follow what.

Which parameters a pass has reached is not told one by one: a hook on every parameter would cost
more than the exchange of a small model. :class:`Before` knows what ``.grad`` held when it began,
so that a look at ``.grad`` tells what has come since.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor, nn

from .._torch import sweep
from .._torch.tensors import version_of
from ..errors import PassStateError


class State(Enum):
    """Life of a pass, in order."""

    WAITING = auto()  # a backward pass runs, and has brought no gradient that we know of
    LEARNING = auto()  # gradients come, and their order is noted; all are taken at the end
    FILLING = auto()  # gradients come, and full buckets leave
    EXCHANGING = auto()  # all have come: what is left leaves
    SENT = auto()  # all has left, and nobody waits for it yet
    AWAITING = auto()  # all is awaited
    ENDED = auto()  # .grad holds averages, or it was no pass to be averaged
    FAILED = auto()  # nobody can say what .grad should hold, and it is None


_MAY_FOLLOW = {
    State.WAITING: {State.LEARNING, State.FILLING, State.EXCHANGING, State.ENDED, State.FAILED},
    State.LEARNING: {State.FILLING, State.EXCHANGING, State.ENDED, State.FAILED},
    State.FILLING: {State.EXCHANGING, State.FAILED},
    State.EXCHANGING: {State.SENT, State.FAILED},
    State.SENT: {State.AWAITING, State.FAILED},
    State.AWAITING: {State.ENDED, State.FAILED},
    State.ENDED: set[State](),
    State.FAILED: set[State](),
}

_BEGUN = (State.FILLING, State.EXCHANGING, State.SENT, State.AWAITING)


class Role(Enum):
    """What this rank has to give in a pass."""

    ACTIVE = auto()  # the gradients of a backward pass, or of those it gathered
    OWING = auto()  # what it gathered before it ran out
    STANDING_IN = auto()  # nothing


class Before:
    """What ``.grad`` of each parameter held when a pass began."""

    __slots__ = ("_held",)

    def __init__(
        self, params: Sequence[nn.Parameter] = (), only: Collection[int] | None = None
    ) -> None:
        self._held: dict[int, tuple[Tensor, int]] = {}
        for number in sweep.holding(tuple(params)):
            grad = params[number].grad
            if grad is not None and (only is None or number in only):
                self._held[number] = grad, version(grad)

    def __bool__(self) -> bool:
        return bool(self._held)

    def differs(self, number: int, grad: Tensor | None) -> bool:
        """Whether a gradient has come, given what ``.grad`` holds now."""
        if grad is None or number not in self._held:
            return grad is not None
        object_, before = self._held[number]
        return grad is not object_ or version(grad) != before

    def came(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether a gradient has come to any of them."""
        return any(self.differs(number, param.grad) for number, param in enumerate(params))

    def forget(self, number: int) -> None:
        """Count what a parameter's ``.grad`` holds as of this pass."""
        self._held.pop(number, None)

    def untouched(self, params: Sequence[nn.Parameter]) -> set[int]:
        """The parameters that hold a gradient of earlier passes only."""
        return {n for n in self._held if not self.differs(n, params[n].grad)}


def version(grad: Tensor) -> int:
    """How often a gradient was written to; inference tensors do not know, nor do they change."""
    return -1 if grad.is_inference() else version_of(grad)


@dataclass(eq=False, slots=True)
class Pass:
    """One backward pass, or one exchange without any."""

    role: Role = Role.ACTIVE
    answers: bool = False  # gradients that a forward of the wrapper led to (expected.py)
    state: State = State.WAITING
    before: Before = field(default_factory=Before)
    plain: bool = False  # nothing was held before, and gradients have no graph of their own
    watched: bool = True  # it was seen before its first gradient
    handed: bool = False  # a graph hands its gradients over (handed.py)
    due: bool = False  # other ranks count on it, whether gradients come here or not
    kept: bool = False  # its gradients are not to be averaged yet
    task: int = -1  # torch's number of the backward pass
    ending: Callable[[], object] = object  # None once a backward pass has ended without us
    next: int = 0  # the bucket whose turn it is
    complete: int = 0  # buckets before this one have had the gradient that comes last in them
    arrival: list[int] = field(default_factory=list)  # while learning: parameters, as they came
    seen: Counter[int] = field(default_factory=Counter)  # how often, for those that tell
    failure: Exception | None = None  # what this rank raises at the end
    trouble: str = ""  # the same, as the other ranks hear it
    again: set[int] = field(default_factory=set)  # strict: what torch would not have
    idle: set[int] = field(default_factory=set)  # have a gradient that this pass did not touch
    absent: set[int] = field(default_factory=set)  # have none
    late: dict[int, Tensor] = field(default_factory=dict)  # came after their bucket had left
    header: Tensor | None = None  # what the ranks said, on the device
    divisor: float = 1.0  # beyond the number of ranks
    began: int = field(default_factory=time.perf_counter_ns)
    first_launch: int = 0
    ended: int = 0  # the backward pass itself
    finished: int = 0

    def move(self, state: State) -> None:
        """Enter ``state``; what cannot follow is an error, not a wrong average later."""
        if state not in _MAY_FOLLOW[self.state]:
            raise PassStateError(needed=state.name, found=self.state.name)
        self.state = state

    @property
    def runs(self) -> bool:
        """Whether its backward pass has not ended yet, well or badly."""
        return self.ending() is not None

    @property
    def has_begun(self) -> bool:
        """Whether other ranks may wait for what it sends."""
        return self.state in _BEGUN

    @property
    def gives(self) -> bool:
        """Whether this rank has something to give."""
        return self.role is not Role.STANDING_IN

    @property
    def missed(self) -> set[int]:
        """Parameters that the graph did not reach."""
        return self.absent | self.idle

    def note_arrival(self, number: int) -> None:
        """While learning: a gradient comes to a parameter, in this order."""
        if self.state is State.WAITING:
            self.move(State.LEARNING)
        self.arrival.append(number)
        self.seen[number] += 1

    def fail(self, error: Exception, told: str = "") -> None:
        """Raise ``error`` here at the end of the pass, and let the other ranks know."""
        self.failure = self.failure or error
        self.trouble = self.trouble or told or str(error)
