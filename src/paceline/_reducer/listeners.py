"""Listeners: the hooks on parameters, by which a reducer hears of gradients.

Once a parameter has had a hook that runs *behind* its gradient, torch calls into Python for it in
every backward pass, even when the hook is gone; that costs more than all the rest of a pass. So
only the few parameters that set something in motion have one: those that complete a bucket, and
large ones. Hooks that run *before* the gradient leave no trace when they are taken off. Every
parameter has one in the first pass, when the order of arrival is learned. After it only those have
one that the pass did not reach, and a few of the others, so that a penalty on the parameters is
seen too; or all, if the pass was not seen at an output of the model before it came to a parameter,
so that nothing else tells of it. What comes by none of these ways is found when an optimizer is
about to use it (``unseen.py``).

A hook hangs on a parameter where Python's collector does not see it. So it knows its reducer by a
weak reference: a strong one would keep reducer, parameters and group alive for ever.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._torch.tensors import forget_empty_hooks, late_hooks_of
from . import unseen
from .layout import last_times
from .plan import triggers

if TYPE_CHECKING:
    from .reducer import Reducer

Listener = Callable[[Tensor], None]
_HEARD = 4  # parameters that tell of a pass though they set nothing in motion


def listen(param: nn.Parameter, listener: Listener) -> RemovableHandle:
    """Call ``listener`` when a gradient has come; a parameter that is frozen now may thaw."""
    trained = param.requires_grad
    try:
        handle: RemovableHandle = param.requires_grad_(True).register_post_accumulate_grad_hook(
            listener
        )
        return handle
    finally:
        param.requires_grad_(trained)


def listen_before(param: nn.Parameter, listener: Listener) -> RemovableHandle:
    """Call ``listener`` when a gradient is about to come; a frozen parameter may thaw."""
    trained = param.requires_grad
    try:
        handle: RemovableHandle = param.requires_grad_(True).register_hook(listener)
        return handle
    finally:
        param.requires_grad_(trained)


class Listeners:
    """The hooks of one reducer."""

    def __init__(self, reducer: Reducer, *, wanted: bool) -> None:
        self._reducer = reducer
        self._wanted = wanted  # False: nobody listens, and passes are begun from outside
        self._acting: dict[int, RemovableHandle] = {}  # by parameter
        self._announcing: dict[int, RemovableHandle] = {}
        self._all_behind = False  # announce gradients when they have come
        self._hears_all = False  # passes were not seen before their first gradient
        self.learned: tuple[int, ...] = ()  # the order in which gradients came when last heard
        self.learning = False  # all ranks agree on a plan in the next pass
        self.noting = False  # this rank does not know its own order yet
        self._placed = False  # hooks are where they belong, which may be nowhere

    def __bool__(self) -> bool:
        return self._placed

    def count(self, number: int) -> int:
        """How many hooks a parameter has."""
        return (number in self._acting) + (number in self._announcing)

    @property
    def hear_few(self) -> bool:
        """Whether a backward pass may reach parameters without being noticed."""
        return self._wanted and len(self._announcing) < len(self._reducer.params)

    def learn(self) -> None:
        """Listen to every parameter in the next pass."""
        self.remove()
        self.learning = self.noting = self._placed = True
        if self._wanted:
            self._announce(range(len(self._reducer.params)))
            self._take_large()

    def act_on_few(self, arrival: Sequence[int], *, watched: bool) -> None:
        """From now on only what completes buckets, and large gradients, set something in motion.

        ``watched``: the pass that came in this order was seen before its first gradient.
        """
        self.remove()
        self.learned, self._placed = tuple(arrival), True
        if not self._wanted:
            return
        self._hears_all = self._hears_all or not watched
        layout, counts = self._reducer.layout, Counter(arrival)
        large = frozenset(n for n in counts if layout.is_large(n))
        place, acting = layout.place, triggers(layout.plan, last_times(arrival), large)
        for number in acting:
            if number in place:
                completes = acting[number] is not None
                actor = self._actor(number, *place[number], counts[number], completes)
                self._acting[number] = listen(self._reducer.params[number], actor)
        everything = range(len(self._reducer.params))
        known = set() if self._hears_all else set(counts).difference(spread(last_times(arrival)))
        self._announce([n for n in everything if n not in known])
        unseen.guard(self._reducer)

    def hear_all(self) -> None:
        """A pass came unnoticed: from now on every parameter has a hook."""
        self._hears_all = True
        missing = [n for n in range(len(self._reducer.params)) if n not in self._announcing]
        self._announce(missing if self._wanted else ())

    def go_behind(self) -> None:
        """From now on hear of gradients when they have come, not before.

        A traced backward pass visits parameters that its graph used, with no gradient, and hooks
        that run before one break compiled autograd then (as of torch 2.13).
        """
        if self._all_behind:
            return
        announcing = list(self._announcing)
        self._take_off(announcing)
        self._all_behind = True
        self._announce(announcing)

    def come_last(self) -> None:
        """Let hooks that others have put behind ours come first: ours take the gradient away."""
        for number, handle in self._acting.items():
            param = self._reducer.params[number]
            hooks = late_hooks_of(param)
            if handle.id in hooks and list(hooks)[-1] != handle.id:
                actor = hooks[handle.id]
                handle.remove()
                self._acting[number] = listen(param, actor)

    def remove(self) -> None:
        """Stop listening."""
        self.learning = self.noting = self._placed = False
        for handle in self._acting.values():
            handle.remove()
        self._acting = {}
        self._take_off(list(self._announcing))

    def _take_large(self) -> None:
        """Have large gradients taken as they come: not even the first pass holds them twice."""
        for number, param in enumerate(self._reducer.params):
            if self._reducer.layout.is_large(number):
                self._acting[number] = listen(param, self._taker(number))

    def _taker(self, number: int) -> Listener:
        reference = weakref.ref(self._reducer)

        def came(_param: Tensor) -> None:
            reducer = reference()
            if reducer is not None and reducer.runner.fills():
                reducer.runner.filling.take_at_once(number)

        return came

    def _take_off(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._announcing.pop(number).remove()
            forget_empty_hooks(self._reducer.params[number])

    def _announce(self, numbers: Sequence[int]) -> None:
        place = listen if self._all_behind else listen_before
        for number in numbers:
            listener = self._announcer(number, is_there=self._all_behind)
            self._announcing[number] = place(self._reducer.params[number], listener)

    def _announcer(self, number: int, *, is_there: bool) -> Listener:
        reference = weakref.ref(self._reducer)

        def comes(grad: Tensor | None) -> None:
            reducer = reference()
            if reducer is not None and grad is not None:
                reducer.runner.gradient_comes(number, is_there=is_there)

        return comes

    def _actor(self, number: int, bucket: int, slot: int, times: int, completes: bool) -> Listener:
        reference, large = weakref.ref(self._reducer), self._reducer.layout.is_large(number)

        def came(_param: Tensor) -> None:
            reducer = reference()
            if reducer is None or not reducer.runner.fills():
                return
            seen = reducer.runner.running.seen
            seen[number] += 1
            if seen[number] == times:
                reducer.runner.filling.act(bucket, slot if large else None, completes=completes)

        return came


def spread(order: Sequence[int]) -> list[int]:
    """A few of the parameters, evenly over the order of arrival, both its ends among them."""
    if len(order) <= _HEARD:
        return list(order)
    last = len(order) - 1
    return [order[round(i * last / (_HEARD - 1))] for i in range(_HEARD)]
