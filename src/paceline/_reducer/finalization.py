"""Finalization: a program that waits for the averages itself, after the backward pass or inside it.

Where it is *required*, a pass ends with all sent and nothing awaited: other work can go on while
the buckets travel. ``.grad`` of the parameters is None until :meth:`Finalization.finalize`, so that
nobody takes for an average what is none. What could do so all the same, an optimizer's step, is
refused as long as a pass is *pending*; so are another pass and another forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from .._torch.autograd import call_after_backward, current_task
from .._torch.tensors import forget_empty_hooks
from ..errors import LateGradientError, ModuleStateError, PacelineError, UnfinalizedError
from .listeners import listen_before
from .passes import Pass, State
from .steps import look_before_steps, steps, stop_looking
from .tensors import add_to_grad, local

if TYPE_CHECKING:
    from .reducer import Reducer


class Finalization:
    """Whether, and how, a program waits for the averages of one reducer."""

    def __init__(self, reducer: Reducer) -> None:
        self._of = reducer
        self.required = False  # a pass leaves its averages to be awaited
        self._refusing: list[tuple[Tensor, RemovableHandle]] = []

    @property
    def pending(self) -> bool:
        """Whether a pass has sent all, and its averages are to be awaited."""
        current = self._of.runner.current
        return current is not None and current.state is State.SENT

    @property
    def after_backward(self) -> bool:
        """Whether a pass cannot be finalized before its backward pass has returned.

        Where gradients come to a parameter several times, or nobody knows yet how often, what is
        there in the middle may not be all.
        """
        of = self._of
        learned = of.listeners.learned
        often = len(set(learned)) != len(learned)
        unknown = of.listeners.learning or not of.layout.is_settled or not learned
        return unknown or often or bool(of.picture.unused)

    def require(self, required: bool) -> None:
        """From the next forward on leave averages to be awaited, or no longer."""
        if required == self.required:
            return
        if self._of.runner.current is not None or self._of.expected.is_unanswered:
            raise ModuleStateError(
                "set_manual_finalization_required cannot be called after forward while a backward "
                "pass is expected or in progress. Call it before forward or after backward "
                f"finalization. (rank {self._of.group.rank()}; the other ranks are not affected)"
            )
        self.required = required
        if required:
            look_before_steps(self, _look)
        else:
            stop_looking(self)

    def continue_from(self, other: Finalization) -> None:
        """Require what ``other``, whose reducer is no more, required."""
        self.require(other.required)
        stop_looking(other)

    # -- what has to wait ---------------------------------------------------------------------

    def refuse_pending(self, what: str) -> None:
        """Raise if ``what`` comes before a pass was finalized."""
        if self.pending:
            raise UnfinalizedError(self._of.group.rank(), what)

    def refuse_step(self, what: str, stepped: Collection[int]) -> None:
        """Raise if ``what`` is to step a parameter, by its id, whose average is not there."""
        if self.pending:
            rows = zip(self._of.names, self._of.params, strict=True)
            names = [name for name, param in rows if id(param) in stepped]
            if names:
                raise UnfinalizedError(self._of.group.rank(), what, names)

    def settle_pending(self, trouble: str) -> None:
        """Before this rank stands in: the pass that is pending comes first.

        If it has ``trouble`` it goes on no further, and the pass is ended for it.
        """
        if not trouble:
            self.refuse_pending("the end of this rank's inputs")
        elif self.pending:
            with contextlib.suppress(PacelineError), torch.no_grad():
                self._of.runner.finish()

    # -- the end of a pass --------------------------------------------------------------------

    def finalize(self) -> None:
        """Wait for the averages of the pass that is pending; inside a backward pass, end it now."""
        rank, running = self._of.group.rank(), self._of.runner.current
        if not self.required:
            raise ModuleStateError(
                "finalize_backward() called but manual backward finalization is not required. Set "
                "require_manual_backward_finalization to true first.",
                f"(rank {rank}; averages are in .grad when backward() returns)",
            )
        if self.pending:
            self._finish()
        elif running is not None and running.runs and self._begins(running):
            self._finish_inside(running)
        else:
            raise ModuleStateError(
                "finalize_backward() called but no gradient reduction requires finalization. This "
                "can happen if no_sync() is active or finalize_backward() was already called for "
                "this backward pass.",
                f"(rank {rank}; other ranks are not affected)",
            )

    def _begins(self, running: Pass) -> bool:
        return not running.handed and self._of.runner.fills()

    @torch.no_grad()
    def _finish(self) -> None:
        """Complete the pass; what came to ``.grad`` since it was sent is added to the averages."""
        of = self._of
        since = {n: p.grad for n, p in enumerate(of.params) if p.grad is not None}
        for number in since:
            of.params[number].grad = None
        of.runner.finish()
        for number, grad in since.items():
            param = of.params[number]
            if param.grad is None:
                param.grad = grad
            else:
                add_to_grad(param, local(grad), sparse=param.grad.is_sparse)

    @torch.no_grad()
    def _finish_inside(self, running: Pass) -> None:
        """End the pass though its backward pass goes on: with other work, not with gradients."""
        of = self._of
        nested = running.task != current_task()
        if self.after_backward or nested or not of.runner.filling.is_complete():
            raise ModuleStateError(
                "finalize_backward() called before all DDP buckets were ready. "
                f"next_bucket_={running.next} buckets_.size()={len(of.layout.buckets)}. Call "
                "finalize_backward() only after all DDP-managed parameters have computed "
                "gradients.",
                f"(rank {of.group.rank()}; the other ranks wait for this one) If "
                "should_finalize_after_backward is True, call it when backward() has returned.",
            )
        of.runner.finish()
        self._refuse_late()

    def _refuse_late(self) -> None:
        """Until the backward pass ends, raise when another gradient comes: nobody averages it."""
        self._stop_refusing()  # of a backward pass that failed
        rank = self._of.group.rank()
        for name, param in zip(self._of.names, self._of.params, strict=True):
            refusal = functools.partial(_refuse, rank, name)
            self._refusing.append((param, listen_before(param, refusal)))
        call_after_backward(self._stop_refusing)

    def _stop_refusing(self) -> None:
        for param, handle in self._refusing:
            handle.remove()
            forget_empty_hooks(param)
        self._refusing = []


def _refuse(rank: int, name: str, grad: Tensor | None) -> None:
    if grad is not None:
        raise LateGradientError(rank, [name])


def _look(finalization: Finalization, optimizer: Optimizer) -> None:
    finalization.refuse_step(f"{type(optimizer).__name__}.step()", steps(optimizer))
