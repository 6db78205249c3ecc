"""Runner: takes a reducer's passes from their first sign to their end, one after the other."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._torch.autograd import (
    call_after_backward,
    current_task,
    may_run_on_threads,
    note_waiting,
    wait_for_failures,
)
from ..errors import PacelineError, PeerError, UnweighableError
from ..groups import ReduceOp
from . import messages
from .closing import PassClosing
from .filling import Filling
from .header import Header
from .passes import Before, Pass, Role, State

if TYPE_CHECKING:
    from .reducer import Reducer


class Runner:
    """The pass that runs, or was left halfway; there is one at a time."""

    def __init__(self, reducer: Reducer) -> None:
        self._of = reducer
        self.current: Pass | None = None
        self.passes = 0  # that have ended, well or badly
        self.error = ""  # what went wrong last
        self.handed_task = -1  # torch's number of a backward pass whose gradients a graph gave
        self._filling: Filling | None = None  # of the pass that has begun
        self._closing: PassClosing | None = None  # of the pass that was sent last
        self._retired = False
        self._told_late = False  # of failures, by a thread of autograd's

    @property
    def running(self) -> Pass:
        """The pass that runs; there is one."""
        assert self.current is not None
        return self.current

    @property
    def has_begun(self) -> bool:
        """Whether a pass runs that other ranks may wait for."""
        return self.current is not None and self.current.has_begun

    @property
    def filling(self) -> Filling:
        """The gradients of the pass that has begun, and its buckets."""
        assert self._filling is not None
        return self._filling

    def retire(self) -> None:
        """Run no pass any more."""
        self._retired = True

    def forget(self) -> None:
        """Drop an unfinished pass: its buckets are gone."""
        self.current = None

    # -- the signs of a backward pass ---------------------------------------------------------

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Be told when a backward pass comes to one of these, before it comes to any parameter."""
        watched = [output for output in outputs if output.grad_fn is not None]
        for output in watched:
            output.register_hook(self._reached)
        if watched and may_run_on_threads():
            self._told_late = True
            wait_for_failures()

    def _reached(self, _grad: Tensor) -> None:
        """A backward pass has reached an output; ``autograd.grad`` may then reach no parameter."""
        if not self._runs and not self._retired and self._of.averages:
            self._wait_for_gradients(watched=True)

    def gradient_comes(self, number: int, *, is_there: bool) -> None:
        """A parameter's gradient is about to come, or ``is_there`` already."""
        if not self._runs:
            if self._is_strange:
                return
            self._refuse_weight(is_there)
            self._wait_for_gradients(watched=False).before.forget(number)
        self._of.streams.note()
        if self._of.listeners.noting and not self.running.handed:
            self._note(self.running, number)

    def _note(self, running: Pass, number: int) -> None:
        """torch marks a parameter ready once, and with its flag not inside a nested backward."""
        running.note_arrival(number)
        policy = self._of.policy
        if policy.strict:
            nested = policy.find_unused and running.task != current_task()
            if nested or running.seen[number] > 1:
                running.again.add(number)

    def fills(self) -> bool:
        """A gradient has come: whether it goes into a bucket. Begins the pass if it is to."""
        current = self.current
        self._of.streams.note()
        if current is not None and current.runs:
            if current.state is State.FILLING:
                return not current.handed
            return not current.kept and self._begin(current)
        if self._is_strange:
            return False
        self._refuse_weight(True)
        unseen = self._wait_for_gradients(watched=False)
        self._of.streams.note()  # anew: the pass has only begun
        unseen.before, unseen.plain = Before(), False  # what came already counts as of this pass
        return self._begin(unseen)

    def _refuse_weight(self, is_there: bool) -> None:
        """A gradient that came before anybody saw it cannot be multiplied by itself."""
        if is_there and self._of.ledger.weighs:
            raise UnweighableError(self._of.group.rank())

    @property
    def _runs(self) -> bool:
        return self.current is not None and self.current.runs

    @property
    def _is_strange(self) -> bool:
        """Whether a backward pass that comes through no output is none of ours.

        A parameter that a graph used is visited too, with a gradient or without.
        """
        if self._retired or not self._of.averages or self._of.expected.nothing:
            return True
        return self.handed_task != -1 and self.handed_task == current_task()

    def _wait_for_gradients(self, *, watched: bool) -> Pass:
        """Be there when this backward pass ends: the outermost one, if others nest in it."""
        of = self._of
        self.make_good()
        if of.ledger.open:  # of a backward pass that failed
            of.ledger.cancel(of.params)
        if not of.listeners:  # nothing was averaged until there were weights
            of.listeners.learn()
        due = of.expected.wanted()
        if due:
            of.listeners.come_last()
        if of.ledger.weighs:
            of.ledger.begin(of.params)
        elif not due:
            of.ledger.begin_plain(of.params)
        waiting = Pass(answers=True, before=Before(of.params), watched=watched, due=due)
        waiting.plain = not waiting.before and not torch.is_grad_enabled()
        return self._await_end(waiting)

    def _await_end(self, waiting: Pass) -> Pass:
        self._of.streams.pass_begins()
        ending = _Ending(self, waiting)
        waiting.ending, waiting.task = weakref.ref(ending), current_task()
        if self._told_late:
            note_waiting(ending)
        self.current = waiting
        self._of.diary.backward_begins()
        call_after_backward(ending)
        return waiting

    def end_with_backward(self, *, keeps: bool = False) -> None:
        """Let the pass of a graph end with the backward pass around it, not before.

        Gradients may still come to parameters from outside the graph. ``keeps``: those of this pass
        are not averaged yet.
        """
        self.handed_task = current_task()
        if not self._runs:
            self.make_good()
            if self._of.ledger.open:  # of a backward pass that failed
                self._of.ledger.cancel(self._of.params)
            self._await_end(Pass(answers=True, before=Before(self._of.params)))
        self.running.kept = self.running.kept or keeps
        self.running.handed = True

    # -- gradients come -----------------------------------------------------------------------

    def _begin(self, waiting: Pass) -> bool:
        """Enter a pass whose gradients come now; False when they are not to be averaged."""
        if not self._of.expected.wanted():
            waiting.kept = True
            self._of.expected.gradients_came((), at_once=True)
            return False
        self._enter(waiting)
        return True

    def enter(self, role: Role, *, answers: bool = False) -> Pass:
        """Begin a pass outside any backward pass, or one whose gradients a graph hands over."""
        if self.current is None:
            self._of.diary.backward_begins()
            self._of.streams.pass_begins()
            self.current = Pass(role, answers, before=Before(self._of.params))
        self.current.role = role
        self._enter(self.current)
        return self.current

    def _enter(self, entering: Pass) -> None:
        of = self._of
        if not of.layout.is_settled:  # gradients move with the buckets
            untouched = entering.before.untouched(of.params)
            of.settle_plan()
            entering.before, entering.plain = Before(of.params, untouched), False
        self._filling = Filling(of, entering, of.choose_method())
        if of.listeners.learning and (of.comm_hook is not None or of.layout.narrow):
            self._agree_on_unit()
        if of.ledger.weighs and not of.ledger.open:
            of.ledger.begin(of.params)
        if entering.state is not State.EXCHANGING:
            entering.move(State.FILLING)

    def hear(self) -> None:
        """Raise if a rank could not go on in the last pass and this is not known; may wait."""
        of = self._of
        if of.mailbox.has_failed(of.group.size()):
            said = messages.left(of.group, of.diary.model, self.passes - 1)
            raise PeerError(of.group.rank(), said, "in the last pass")

    def _agree_on_unit(self) -> None:
        ledger = self._of.ledger
        most = torch.tensor([ledger.weight], device=self._of.params[0].device)
        self._of.group.all_reduce(most, ReduceOp.MAX)
        ledger.unit = 1.0
        ledger.choose_unit(float(most))

    # -- its end ------------------------------------------------------------------------------

    def backward_ends(self, ending: Pass) -> None:
        """All gradients have come."""
        if ending is not self.current:  # a graph has completed it, or it was given up
            return
        if not ending.has_begun:
            came = ending.kept or (not ending.handed and ending.before.came(self._of.params))
            if not came or ending.kept or not self._begin(ending):
                self._end_unaveraged(ending, came=came)
                return
        self.end()

    def backward_failed(self, failed: Pass) -> None:
        """Its backward pass raised. Where no rank waits for it, what was put aside is back now.

        At once, so that the program finds it, and can clear it. Other passes: :meth:`make_good`.
        """
        if failed is self.current and not failed.has_begun and not failed.due:
            self._of.ledger.use_up()
            self._end_unaveraged(failed, came=False)

    def _end_unaveraged(self, ending: Pass, *, came: bool) -> None:
        ledger, params = self._of.ledger, self._of.params
        if ledger.open:
            (ledger.end if came else ledger.cancel)(params)
        elif came:
            ledger.keep_plain(params)
        if came:
            self._of.diary.ends()
        ending.move(State.ENDED)
        self.current = None

    def end(self) -> None:
        """All gradients have come: wait for the averages, or leave that to the program."""
        if self._of.finalization.required:
            self.filling.method = self.filling.method.unattended()
            self.send()
        else:
            self.finish()

    def send(self) -> None:
        """Send everything that was not sent yet; :meth:`finish` waits for the averages."""
        sending = self.running
        sending.move(State.EXCHANGING)
        self._closing = PassClosing(self._of, sending, self.filling)
        try:
            self._closing.send()
            sending.move(State.SENT)
        except BaseException as error:
            self._fail(sending, error)
            self._leave()
            raise

    def finish(self, *, tell_end: bool = True) -> None:
        """Complete the pass: all ranks have the averages when it returns.

        Without ``tell_end`` the caller tells observers of its end.
        """
        running = self.running
        if running.state is not State.SENT:
            self.send()
        assert self._closing is not None
        running.move(State.AWAITING)
        try:
            self._closing.complete(tell_end=tell_end)
            running.move(State.ENDED)
        except BaseException as error:
            self._fail(running, error)
            raise
        finally:
            self._leave()

    def _fail(self, failing: Pass, error: BaseException) -> None:
        """Fail the pass: gradients are undefined now, and nothing may write to buckets later."""
        of = self._of
        failing.move(State.FAILED)
        self.error = str(error)
        of.expected.gradients_came((), at_once=True)
        for bucket in of.layout.buckets:
            bucket.abandon()
        of.ledger.forget()
        for param in of.params:
            param.grad = None
        of.observers.tell_failure()

    def _leave(self) -> None:
        of = self._of
        of.diary.ends()
        for bucket in of.layout.buckets:
            bucket.reset()
        self.current = self._closing = None
        self.passes += 1

    def give_up(self, error: BaseException) -> None:
        """Leave the pass that runs, in whatever state it is; its gradients are gone.

        The next backward pass is as if this one had not been. Other ranks are told nothing: every
        one of them gives the pass up too, or this one goes on in a group without them.
        """
        if self.current is None:
            return
        if self.current.has_begun:
            self._fail(self.current, error)
            self._leave()
        else:
            self._end_unaveraged(self.current, came=False)

    def make_good(self) -> None:
        """If a backward pass failed halfway, end it: the other ranks still wait for the rest.

        Raises if it went well, and the program has yet to wait for its averages.
        """
        self._of.finalization.refuse_pending("another backward pass, or a forward")
        if self.current is None or self.current.runs:
            return
        if self.current.has_begun or self.current.due:
            with contextlib.suppress(PacelineError):
                self.stand_in(trouble="its backward pass failed halfway")
        else:  # a thread of autograd's has yet to tell backward_failed()
            self._end_unaveraged(self.current, came=False)

    # -- passes without a backward ------------------------------------------------------------

    def sync(self, role: Role = Role.ACTIVE) -> None:
        """Average what ``.grad`` holds now, outside any backward pass."""
        of = self._of
        if not of.averages:
            return
        owes = of.ledger.owes(of.params)  # then nothing is added to what was gathered
        with torch.no_grad(), of.ledger.counting_as(0.0 if owes else of.ledger.explicit):
            self.make_good()
            self.current = None
            self.enter(role)
            self.finish()

    def end_early(self) -> None:
        """End the pass that runs now, or stand in for it if it has not begun."""
        if self.current is not None and self.current.runs and self.current.has_begun:
            with torch.no_grad():
                self.finish()
        else:
            self.stand_in()

    def stand_in(self, trouble: str = "", *, take: bool = False) -> Header | None:
        """Take part in the other ranks' pass with nothing to give (``Reducer.stand_in``)."""
        of = self._of
        of.finalization.settle_pending(trouble)
        if of.ledger.owes(of.params) and not trouble:  # weighted passes wait to be averaged
            self.sync(Role.OWING)
            return of.mailbox.told
        if not of.averages:
            return None
        held = [None if param.grad is None else param.grad.clone() for param in of.params]
        for param in of.params:
            param.grad = None
        try:
            with torch.no_grad(), of.ledger.counting_as(None):
                running = self._halfway() or self.enter(Role.STANDING_IN)
                running.role, running.trouble = Role.STANDING_IN, trouble
                self.finish()
        finally:
            for param, grad in zip(of.params, () if take else held, strict=not take):
                param.grad = grad
        return of.mailbox.told

    def _halfway(self) -> Pass | None:
        """The pass that has begun and was not finished."""
        if self.current is not None and not self.current.has_begun:
            self.current = None
        return self.current


class _Ending:
    """Called at the end of a backward pass; the engine drops it when the pass fails."""

    def __init__(self, runner: Runner, ending: Pass) -> None:
        self._runner, self._pass = runner, ending

    def __call__(self) -> None:
        try:
            with torch.no_grad():
                self._runner.backward_ends(self._pass)
        except BaseException:  # with a traceback that holds us as long as the program likes
            self._runner.backward_failed(self._pass)
            raise
        finally:
            self._pass.ending = _nothing

    def is_awaited(self) -> bool:
        """Whether its being dropped changes what the program finds."""
        return self._runner.current is self._pass and self._pass.runs

    def __del__(self) -> None:
        self._runner.backward_failed(self._pass)


def _nothing() -> None:
    """In place of an ending that was called."""
