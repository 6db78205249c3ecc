"""Reducer: averages the gradients of one rank's model with the other ranks', during backward.

**A pass** (``passes.py``) is a backward pass that a forward through the wrapper came before
(``expected.py``). It is noticed at an output of the model; then gradients are taken into buckets
(``bucket.py``), and full buckets are sent off in the order of their index, the same on all ranks
(``runner.py``). The last bucket always waits for the end of the pass (``closing.py``). So every
pass of every rank consists of the same collectives, whichever parameters its graph reached: no flag
has to say so beforehand.

**What is right does not depend on hooks.** A gradient is whatever ``.grad`` holds when the pass
ends; hooks only let buckets leave earlier. ``.grad`` is linear in everything: a gradient that was
accumulated before, averaged or not, is averaged again with the new one, and the result is right.

**Learning.** In the first pass every parameter tells of its arrival (``listeners.py``). The order
on rank 0 becomes the plan of all ranks (``layout.py``). When a gradient comes after its bucket has
left (a graph that changed, a weight used again in a reentrant checkpoint), all ranks learn of it
through the header, exchange what came late, and learn anew.

The reducer itself holds the parts together: what it is about, the plan, and the doors that other
folders use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from ..groups import Group
from ..policies import Reduction
from .bucket import Hook
from .diary import Diary
from .expected import Expected
from .facts import Facts
from .finalization import Finalization
from .gradient_streams import GradientStreams
from .handed import Handed
from .header import Header, Mailbox
from .layout import Layout, agreed_order
from .listeners import Listeners
from .method import CommHook
from .observers import Observers
from .runner import Runner
from .steps import stop_looking
from .stretches import ScatteredGradients
from .unused import Picture
from .weights import Ledger


class Reducer(Facts):
    """Keeps the gradients of ``params`` averaged over ``group``."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        group: Group,
        policy: Reduction,
        *,
        sparse: Sequence[bool] = (),
        wanted: Callable[[], bool] = lambda: True,
        heeds: Callable[[], bool] = lambda: False,
        hooks: bool = True,
    ) -> None:
        """``wanted``: whether the pass that begins is averaged. ``heeds``: whether somebody acts on
        what ranks say in a pass before the next one. Without ``hooks`` a pass begins when
        :meth:`begin` is called.
        """
        self.params, self.names = tuple(params), tuple(names)
        self.group = group
        self.layout = Layout(params, sparse, policy)
        self.picture = Picture(names)
        self.ledger = Ledger()
        self.expected = Expected(wanted)
        self.observers = Observers(heeds)
        self.mailbox = Mailbox()  # which outlives it: nothing in it knows the reducer
        self.streams = GradientStreams(self.params)
        self.listeners = Listeners(self, wanted=hooks)
        self.handed = Handed(self)
        self.finalization = Finalization(self)
        self.runner = Runner(self)
        self.diary = Diary(group, _weakly(self.names_in))
        self.comm_hook: CommHook | None = None
        if self.averages:
            self.listeners.learn()

    def successor(
        self, params: Sequence[nn.Parameter], names: Sequence[str], sparse: Sequence[bool]
    ) -> Reducer:
        """A reducer for other parameters of the same model, which goes on where this one ends.

        Group, policy, hook, weights, observers and what is expected stay; the plan begins anew.
        Every rank calls it at the same time, and uses this one no more.
        """
        self.retire()
        heir = Reducer(params, names, self.group, self.policy, sparse=sparse)
        self.ledger.follow(self.params, heir.params)
        heir.ledger, heir.expected, heir.observers = self.ledger, self.expected, self.observers
        heir.mailbox = self.mailbox.successor()
        heir.finalization.continue_from(self.finalization)
        heir.diary.continue_from(self.diary)
        if self.comm_hook is not None:
            heir.set_hook(self.comm_hook.call, prompt=self.comm_hook.prompt)
        return heir

    def retire(self) -> None:
        """Never average again; another reducer may take the parameters over."""
        self.listeners.remove()
        self.runner.retire()
        stop_looking(self)

    def note_error(self, text: str) -> None:
        """Keep what went wrong, for torch's logging data."""
        self.runner.error = text

    # -- around a forward -----------------------------------------------------------------------

    def begin_step(self) -> None:
        """Lay the buckets out as planned: a forward comes that is not part of a backward pass."""
        self.settle_plan()
        self.diary.forward_begins()

    def forward_begins(self) -> None:
        """Average backward passes that run inside the forward that begins."""
        self.expected.forward_begins()

    def forward_ends(self, outputs: Iterable[Tensor], *, averaged: bool) -> None:
        """Average any backward pass through ``outputs``, and the next one, if ``averaged``."""
        self.expected.forward_ends(averaged=averaged)
        self.diary.forward_ends()
        self.runner.watch(outputs)

    def forward_failed(self) -> None:
        """No backward pass follows the forward that ran."""
        self.expected.forward_ends(averaged=False)

    def expect_backward(self, outputs: Iterable[Tensor]) -> None:
        """Average the next backward pass, as if a forward had ended now with ``outputs``."""
        self.expected.expect_next()
        self.runner.watch(outputs)

    def expect_no_backward(self) -> None:
        """Average no backward pass before the next forward has ended."""
        self.expected.reset()

    def hear(self) -> None:
        """Raise if a rank could not go on in the last pass and this is not known; may wait.

        Between two passes, where something depends on what the last one left.
        """
        self.runner.hear()

    # -- passes from outside --------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin a pass that ends with the backward that runs; False if it is not averaged."""
        return self.runner.fills()

    def make_good(self) -> None:
        """If a backward pass failed halfway, end it: the other ranks still wait for the rest."""
        self.runner.make_good()

    def give_up(self, error: BaseException) -> None:
        """Leave the pass that runs, in whatever state it is; its gradients are gone.

        The step can be done again, as if this pass had not been. Other ranks are told nothing:
        each of them gives it up too, or this one goes on in a group without them.
        """
        self.runner.give_up(error)

    def end_early(self) -> None:
        """End the pass that runs now, or stand in for it if it has not begun."""
        self.runner.end_early()

    def sync(self) -> None:
        """Average what ``.grad`` holds now, outside any backward pass."""
        self.runner.sync()

    def stand_in(self, trouble: str = "", *, take: bool = False) -> Header | None:
        """Take part in the other ranks' pass with nothing to give.

        ``.grad`` stays as it is, or with ``take`` becomes the average, for an optimizer whose part
        of the step is this rank's to take. Returns what the ranks said: when none was active, all
        only stood in.
        """
        return self.runner.stand_in(trouble, take=take)

    # -- the plan -------------------------------------------------------------------------------

    @property
    def header_rides(self) -> bool:
        """Whether a header may lie behind the gradients of the last bucket."""
        return self.comm_hook is None

    def make_plan(
        self, arrival: Sequence[int], told: Header | None, *, watched: bool = True
    ) -> None:
        """Agree on a plan in the order in which gradients arrived on rank 0."""
        if self.layout.rebuilds:
            device = self.params[0].device
            self.layout.follow(agreed_order(self.group, arrival, len(self.params), device))
        if self.policy.skip_unused and told is not None and not self.layout.scattered:
            self.layout.keep_only(told.present)
        if arrival:  # a rank that had no work listens on, to know its own order
            self.listeners.act_on_few(arrival, watched=watched)
        self.listeners.learning = False

    def settle_plan(self) -> bool:
        """Lay the buckets out as planned, if they are not."""
        return self.averages and self.layout.settle(self.group, header_rides=self.header_rides)

    def forget_plan(self) -> None:
        """Begin anew, as in the first pass; every rank does so at the same time."""
        self.layout.forget()
        self.picture.forget()
        self.runner.forget()
        self.mailbox.begin_anew()
        self.ledger.unit = 1.0  # whoever joins knows of no other
        self.listeners.remove()  # they know buckets that are gone
        if self.averages:
            self.listeners.learn()

    def move_to(self, group: Group) -> None:
        """Go on in another group; every one of its ranks does so at the same time."""
        self.group = group
        before, self.diary = self.diary, Diary(group, _weakly(self.names_in))
        self.diary.continue_from(before)
        self.forget_plan()

    def make_static(self) -> None:
        """From now on a graph that changes is an error."""
        self.layout.policy = replace(self.policy, static_graph=True)

    def read_late(self) -> None:
        """From now on do as on a device, wherever the gradients are."""
        self.layout.policy = replace(self.policy, reads_late=True)

    def mean_over_active(self, wanted: bool) -> None:
        """Divide by the number of ranks that have inputs left, or again by that of all."""
        self.mailbox.by_active = wanted

    def set_hook(self, hook: Hook, *, prompt: bool) -> None:
        """Let ``hook`` average buckets from now on; every rank does so at the same time.

        ``prompt``: it makes its collectives before it returns, so that the header can travel beside
        them. Another one may still send something when its future is waited for, and the header
        comes after all of that.
        """
        self.comm_hook = CommHook(hook, prompt)
        self.layout.buckets = []
        if self.averages:
            self.listeners.learn()

    def scatter(self) -> ScatteredGradients:
        """From now on keep this rank's stretch of each bucket; every rank does so."""
        if not self.layout.scattered:
            self.layout.scatter()
            self.forget_plan()
        self.settle_plan()
        return ScatteredGradients(self.layout, self.group)


def _weakly(method: Callable[[int], list[str]]) -> Callable[[int], list[str]]:
    """A function that calls ``method`` and keeps nothing alive; [] once its object is gone."""
    held = weakref.WeakMethod(method)

    def call(argument: int) -> list[str]:
        living = held()
        return [] if living is None else living(argument)

    return call
