"""Handed: a reducer's pass whose gradients a compiled graph hands over.

A graph has no hooks on parameters. It gives gradients as it makes them, and their memory is its
own again when the call returns, so they are copied into the buckets at once. All else is as in any
other pass, the same collectives in the same order: a rank whose step is compiled, one whose step is
not, and one that only stands in can take part in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .bucket import Bucket, Phase
from .passes import Pass, Role
from .reducer import Reducer


class Handed:
    """What a graph does with a reducer."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def plan_ahead(self) -> None:
        """Make the plan that a first pass would lead to; every rank calls it.

        The order is that in which gradients usually come about, from the last parameter to the
        first. A plan that was learned already stays.
        """
        reducer = self.reducer
        if reducer.alone or reducer.layout.rebuilt or not reducer.layout.rebuilds:
            reducer.settle_plan()
            return
        order = range(len(reducer.params))[::-1]
        if reducer.hook is not None or reducer.layout.narrow:  # the first pass agrees on more
            reducer.layout.follow(order)
        else:
            reducer.make_plan(order, None)
        reducer.settle_plan()

    @property
    def buckets(self) -> list[Bucket]:
        """Where averages will be."""
        return self.reducer.layout.buckets

    def begin(self) -> None:
        """Enter a pass that ends with the backward pass around the graph.

        Parameters that the graph used are visited then, mostly with no gradient. One that does get
        a gradient there comes late, and the end of the pass deals with it.
        """
        reducer = self.reducer
        if reducer.latest is None and _in_backward():
            reducer.end_with_backward()
            self._running().ending = _nothing  # hooks of parameters have no part in it

    def _running(self) -> Pass:
        return self.reducer.latest or self.reducer.enter(Role.ACTIVE, answers=True)

    def take(self, numbers: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Copy these gradients, and send off the buckets that are complete."""
        reducer = self.reducer
        running = self._running()
        by_bucket: dict[int, list[int]] = {}
        place = reducer.layout.place
        with torch.no_grad():
            for number, grad in zip(numbers, grads, strict=True):
                index, slot = place[number]
                if self._is_late(index, slot):  # the end deals with it
                    self._keep(number, grad)
                else:
                    self._give(number, grad)
                    by_bucket.setdefault(index, []).append(slot)
            for index, slots in by_bucket.items():
                reducer.take(self.buckets[index], slots)
            running.touched.update(numbers)
            if reducer.learning:
                running.arrival.extend(numbers)
            reducer.advance()

    def _give(self, number: int, grad: Tensor) -> None:
        """Let ``.grad`` be what is to be averaged: what was gathered before counts too."""
        ledger, param = self.reducer.ledger, self.reducer.params[number]
        if ledger.open and number not in ledger.gathered:
            grad = grad.clone()  # it is multiplied where it lies
        elif not ledger.open and param.grad is not None:
            grad = param.grad.add_(grad)
        param.grad = grad

    def _is_late(self, index: int, slot: int) -> bool:
        bucket = self.buckets[index]
        return bucket.phase is not Phase.FILLING or slot in bucket.taken

    def _keep(self, number: int, grad: Tensor) -> None:
        param = self.reducer.params[number]
        param.grad = grad.clone() if param.grad is None else param.grad.add_(grad)

    def finish(self) -> Pass:
        """Complete the pass: the averages are in the buckets, and ``.grad`` is a view of them.

        Whoever wants to know of the end of a pass is told by :meth:`tell`, since that may change
        what the graph still works with.
        """
        reducer = self.reducer
        reducer.handed_task = torch._C._current_graph_task_id()
        running = self._running()
        callbacks, reducer.after_pass = reducer.after_pass, []
        try:
            with torch.no_grad():
                reducer.finish()
        finally:
            reducer.after_pass = callbacks
        return running

    def tell(self, done: Pass) -> None:
        """The graph has ended too."""
        for on_pass in self.reducer.after_pass:
            on_pass(done)

    def gather(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients, by number, to those that a later pass averages."""
        reducer, ledger = self.reducer, self.reducer.ledger
        reducer.handed_task = torch._C._current_graph_task_id()
        weighs, later = ledger.weighs, _in_backward()
        if later:
            reducer.end_with_backward(keeps=True)
        if weighs and not ledger.open:
            ledger.begin(reducer.params)
        for param, grad in zip(reducer.params, grads, strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        if weighs and not later:
            ledger.end(reducer.params)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _nothing() -> None:
    """No reference to the end of a backward pass."""
