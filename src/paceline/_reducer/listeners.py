"""Listeners: the hooks on the parameters, which tell a reducer that gradients have come.

In the first pass every parameter tells of its arrival. Once the order is known, only large
parameters and the last one of each bucket set something in motion (``plan.py``), and the others
just leave a note: there are many of them, so what they do is short.

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

from .layout import last_times
from .plan import triggers

if TYPE_CHECKING:
    from .reducer import Reducer

Listener = Callable[[Tensor], None]


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


class Listeners:
    """The hooks of one reducer."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._handles: list[RemovableHandle] = []
        self.learned: tuple[int, ...] = ()  # the order in which gradients came when last heard

    def __bool__(self) -> bool:
        return bool(self._handles)

    def learn(self) -> None:
        """Listen to every parameter in the next pass."""
        self.remove()
        for number, param in enumerate(self._reducer.params):
            self._listen(param, self._learner(number))

    def act_on_few(self, arrival: Sequence[int]) -> None:
        """From now on only what completes buckets, and large gradients, set something in motion."""
        self.remove()
        self.learned = tuple(arrival)
        layout, counts = self._reducer.layout, Counter(arrival)
        large = frozenset(n for n in counts if layout.is_large(n))
        place, acting = layout.place, triggers(layout.plan, last_times(arrival), large)
        for number, param in enumerate(self._reducer.params):
            if number in acting and number in place:
                completes = acting[number] is not None
                actor = self._actor(number, *place[number], counts[number], completes)
                self._listen(param, actor)
            else:
                self._listen(param, self._noter(number))

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _listen(self, param: nn.Parameter, listener: Listener) -> None:
        self._handles.append(listen(param, listener))

    def _learner(self, number: int) -> Listener:
        reference, large = weakref.ref(self._reducer), self._reducer.layout.is_large(number)

        def arrived(_param: Tensor) -> None:
            reducer = reference()
            if reducer is not None and reducer.begin():
                reducer.note_arrival(number)
                if large:
                    reducer.take_at_once(number)

        return arrived

    def _noter(self, number: int) -> Listener:
        reference = weakref.ref(self._reducer)

        def arrived(_param: Tensor) -> None:
            reducer = reference()
            if reducer is None:
                return
            running = reducer.latest
            if running is None or running.ending() is None:
                if not reducer.begin():
                    return
                running = reducer.running
            running.touched.add(number)

        return arrived

    def _actor(self, number: int, bucket: int, slot: int, times: int, completes: bool) -> Listener:
        reference, large = weakref.ref(self._reducer), self._reducer.layout.is_large(number)

        def arrived(_param: Tensor) -> None:
            reducer = reference()
            if reducer is None or not reducer.begin():
                return
            running = reducer.running
            running.touched.add(number)
            running.seen[number] += 1
            if running.seen[number] == times:
                reducer.act(bucket, slot if large else None, completes=completes)

        return arrived
