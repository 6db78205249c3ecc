"""Observers: who is told of a reducer's passes.

A callback is added by a method that says when it is called, and the handle it returns takes it out
again. The order within a pass that went well: every bucket, the end of the pass, the averages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.hooks import RemovableHandle

from .bucket import Bucket
from .passes import Pass

Callbacks = OrderedDict[int, Callable[..., None]]


class Observers:
    """Callbacks of one wrapper; a reducer that takes over from another one takes them over."""

    def __init__(self, heed: Callable[[], bool] = lambda: False) -> None:
        self.heed = heed  # whether somebody acts on what ranks say before the next pass
        self._of_buckets: Callbacks = OrderedDict()
        self._of_ends: Callbacks = OrderedDict()
        self._of_averages: Callbacks = OrderedDict()
        self._of_failures: Callbacks = OrderedDict()

    @property
    def see_gradients(self) -> bool:
        """Whether an observer needs averages, so that a group of one rank computes them too."""
        return bool(self._of_buckets or self._of_averages)

    @property
    def see_buckets(self) -> bool:
        """Whether somebody acts on each bucket."""
        return bool(self._of_buckets)

    # -- subscribing --------------------------------------------------------------------------

    def on_bucket(self, callback: Callable[[Bucket], None]) -> RemovableHandle:
        """Call it with each bucket of a pass, once ``.grad`` of all its parameters is final."""
        return _add(self._of_buckets, callback)

    def on_end(self, callback: Callable[[Pass], None]) -> RemovableHandle:
        """Call it with each pass that has ended well.

        If a compiled graph made the gradients, then only when the graph has ended too: a callback
        may change what the graph still works with.
        """
        return _add(self._of_ends, callback)

    def on_average(self, callback: Callable[[], None]) -> RemovableHandle:
        """Call it when a pass has left averages in ``.grad``."""
        return _add(self._of_averages, callback)

    def on_failure(self, callback: Callable[[], None]) -> RemovableHandle:
        """Call it when a pass has failed, and its gradients are gone."""
        return _add(self._of_failures, callback)

    # -- what the reducer tells ---------------------------------------------------------------

    def tell_buckets(self, buckets: Iterable[Bucket]) -> None:
        """All gradients of these are averaged."""
        for bucket in buckets if self._of_buckets else ():
            _tell(self._of_buckets, bucket)

    def tell_end(self, done: Pass) -> None:
        """The pass is over."""
        _tell(self._of_ends, done)

    def tell_averages(self) -> None:
        """``.grad`` holds averages."""
        _tell(self._of_averages)

    def tell_failure(self) -> None:
        """The pass has failed."""
        _tell(self._of_failures)


def _add(callbacks: Callbacks, callback: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(callbacks)
    callbacks[handle.id] = callback
    return handle


def _tell(callbacks: Callbacks, *said: Any) -> None:
    for callback in list(callbacks.values()):  # one may take itself out
        callback(*said)
