"""Handed: a reducer's pass whose gradients a compiled graph hands over.

A graph has no hooks on parameters. It gives gradients as it makes them, and their memory is its
own again when the call returns, so they are copied into the buckets at once. All else is as in any
other pass, the same collectives in the same order: a rank whose step is compiled, one whose step is
not, and one that only stands in can take part in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._torch.autograd import NO_TASK, current_task
from .bucket import Bucket, Phase
from .dividing import trouble_in
from .passes import Pass, Role
from .sharing import has_part_of_a_gpu

if TYPE_CHECKING:
    from .reducer import Reducer


class Handed:
    """What a graph does with a reducer."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self._complete: Pass | None = None  # the pass to which a graph has given all it has
        self._untold: Pass | None = None  # has its averages, and observers know nothing of its end
        self.overdue: Exception | None = None  # what became of the pass before the last one
        on_gpu = any(param.is_cuda for param in reducer.params)
        self._at_end = on_gpu and has_part_of_a_gpu()  # buckets leave then

    def plan_ahead(self) -> None:
        """Make the plan that a first pass would lead to; every rank calls it.

        The order is that in which gradients usually come about, from the last parameter to the
        first. A plan that was learned already stays.
        """
        reducer = self.reducer
        self.expect_graph()
        if not reducer.averages or reducer.layout.rebuilt or not reducer.layout.rebuilds:
            reducer.settle_plan()
            return
        order = range(len(reducer.params))[::-1]
        if reducer.hook is not None or reducer.layout.narrow:  # the first pass agrees on more
            reducer.layout.follow(order)
        else:
            reducer.make_plan(order, None)
        reducer.settle_plan()

    def expect_graph(self) -> None:
        """From now on gradients may come from a graph."""
        self.reducer.listeners.go_behind()

    @property
    def buckets(self) -> list[Bucket]:
        """Where averages will be."""
        return self.reducer.layout.buckets

    def _begin(self) -> None:
        """Enter a pass that ends with the backward pass around the graph, if there is one.

        Parameters that the graph used are visited then, mostly with no gradient. One that does get
        a gradient there comes late, and the end of the pass deals with it.
        """
        if self._is_followed:
            self._end_pass()
        runner = self.reducer.runner
        if not runner.has_begun and _in_backward():
            runner.end_with_backward()
            self._running()

    @property
    def _is_followed(self) -> bool:
        """Whether a backward pass came through another forward before, so that a pass is complete.

        Averages of averages are right, unless they are weighted: then what comes now is late.
        """
        complete = self._complete is not None and self._complete is self.reducer.runner.current
        return complete and not self.reducer.ledger.open

    def _end_pass(self) -> None:
        self._complete = None
        self.average()
        self.graph_ended()
        self.refuse_overdue()

    def _running(self) -> Pass:
        runner = self.reducer.runner
        return runner.running if runner.has_begun else runner.enter(Role.ACTIVE, answers=True)

    def take(self, numbers: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Copy gradients of the pass that runs, or begins now; send off what is complete."""
        self._begin()
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
                reducer.runner.filling.take(self.buckets[index], slots)
            if reducer.listeners.noting:
                running.arrival.extend(numbers)
            if not self._at_end:
                reducer.runner.filling.advance(len(self.buckets) - 1)

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

    def graph_complete(self, *, at_once: bool) -> None:
        """The graph has handed over all its gradients.

        They are averaged at the end of the backward pass around it: parameters may be used outside
        the graph too, and those gradients have yet to come. ``at_once``: now, in any case.
        """
        runner = self.reducer.runner
        self._complete = runner.current
        if _in_backward() and not at_once:
            return
        if self.reducer.finalization.required:
            self._complete = None
            with torch.no_grad():
                runner.end()
        else:
            self._end_pass()

    def average(self) -> Tensor | None:
        """Complete the pass: the averages are in the buckets, and ``.grad`` is a view of them.

        Returns numbers that are above zero where a rank could not go on, on the device; None if all
        is known to be well.
        """
        runner = self.reducer.runner
        runner.handed_task = current_task()
        running = self._running()
        with torch.no_grad():
            runner.finish(tell_end=False)
        self._untold = running
        return None if running.header is None else trouble_in(running.header)

    def graph_ended(self) -> None:
        """Let observers know of the end of the pass that :meth:`average` completed, if it did."""
        done, self._untold = self._untold, None
        if done is not None:
            self.reducer.observers.tell_end(done)

    def refuse_overdue(self) -> None:
        """Raise what a pass has only heard of now: a rank could not go on in the one before."""
        error, self.overdue = self.overdue, None
        if error is not None:
            raise error

    def gather(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients, by number, to those that a later pass averages."""
        reducer, ledger = self.reducer, self.reducer.ledger
        reducer.runner.handed_task = current_task()
        weighs, later = ledger.weighs, _in_backward()
        if later:
            reducer.runner.end_with_backward(keeps=True)
        if weighs and not ledger.open:
            ledger.begin(reducer.params)
        elif not weighs:
            ledger.begin_plain(reducer.params)
        for param, grad in zip(reducer.params, grads, strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        if weighs and not later:
            ledger.end(reducer.params)


def _in_backward() -> bool:
    return current_task() != NO_TASK
