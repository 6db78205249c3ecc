"""Facts: what others may ask a reducer; nothing here changes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ..errors import PeerError
from ..groups import Group
from ..policies import Reduction
from .bucket import Bucket, Hook
from .expected import Expected
from .finalization import Finalization
from .header import Header, Mailbox
from .layout import Layout
from .listeners import Listeners
from .method import CommHook, Method
from .observers import Observers
from .runner import Runner
from .summary import ReducerSummary
from .unused import Picture
from .weights import Ledger


class Facts:
    """The read-only part of a reducer."""

    params: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    group: Group
    layout: Layout
    picture: Picture
    ledger: Ledger
    expected: Expected
    observers: Observers
    mailbox: Mailbox
    listeners: Listeners
    finalization: Finalization
    runner: Runner
    comm_hook: CommHook | None

    @property
    def policy(self) -> Reduction:
        """How gradients are averaged."""
        return self.layout.policy

    @property
    def averages(self) -> bool:
        """Whether passes are averaged: there are other ranks, or observers of averages."""
        if not self.params:
            return False
        seen = self.comm_hook is not None or self.layout.scattered or self.observers.see_gradients
        seen = seen or self.finalization.required
        return self.group.size() > 1 or seen or self.policy.even_alone or self.ledger.weighs

    @property
    def hook(self) -> Hook | None:
        """The communication hook."""
        return None if self.comm_hook is None else self.comm_hook.call

    @property
    def passes(self) -> int:
        """How many have ended, well or badly."""
        return self.runner.passes

    @property
    def error(self) -> str:
        """What went wrong last."""
        return self.runner.error

    @property
    def told(self) -> Header | None:
        """What the ranks said in the last pass; None while that is not known."""
        return self.mailbox.told

    @property
    def reads_late(self) -> bool:
        """Whether reading what ranks said would stop a device, so that it is done a pass later."""
        return self.choose_method().reads_late

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets as they are laid out now, in the order in which they leave."""
        return self.layout.buckets

    @property
    def scattered(self) -> bool:
        """Whether each rank keeps its stretch of each bucket only."""
        return self.layout.scattered

    @property
    def rebuilt(self) -> bool:
        """Whether the plan was made anew in the order in which gradients came."""
        return self.layout.rebuilt

    @property
    def unfinished(self) -> Sequence[int]:
        """Strict: the parameters that the last pass did not reach, by index."""
        return self.picture.unfinished

    def is_sparse(self, number: int) -> bool:
        """Whether a parameter's gradients are sparse."""
        return self.layout.is_sparse(number)

    def is_large(self, number: int) -> bool:
        """Whether a gradient is taken by itself as soon as it comes."""
        return self.layout.is_large(number)

    def hooks_on(self, number: int) -> int:
        """How many of the hooks on a parameter, before and behind its gradient, are our own."""
        return self.listeners.count(number)

    def names_in(self, bucket: int) -> list[str]:
        """The parameters of a bucket."""
        found = self.buckets[bucket].numbers if 0 <= bucket < len(self.buckets) else ()
        return [self.names[number] for number in found]

    def summary(self) -> ReducerSummary:
        """What torch's logging data tells of buckets and passes."""
        layout, picture = self.layout, self.picture
        return ReducerSummary(
            sizes=[spec.nbytes for spec in layout.specs],
            first_plan=layout.first_plan,
            first_caps=layout.first_caps,
            plan=layout.plan,
            rebuilt=layout.rebuilt,
            arrival=self.listeners.learned,
            unused=picture.unused,
            used=picture.used,
            steady=self.passes > 0 and picture.steady,
        )

    def unseen(self) -> list[int]:
        """Parameters with a gradient that should have been averaged, but that no hook noticed."""
        expected = self.expected
        if not expected.is_unanswered or not self.listeners.hear_few or not expected.wanted():
            return []
        return [number for bucket in self.buckets for number in bucket.strange()]

    @property
    def unheard(self) -> Callable[[], None]:
        """:meth:`hear` for somebody who outlives this reducer and keeps none of its memory."""
        mailbox, group = self.mailbox, self.group

        def hear() -> None:
            if mailbox.has_failed(group.size()):
                raise PeerError(group.rank(), {}, "in the last pass")

        return hear

    @property
    def expects_backward(self) -> bool:
        """Whether gradients that come now are averaged, even through no output of a forward."""
        return not self.expected.nothing

    def choose_method(self) -> Method:
        """How a pass that begins now is exchanged."""
        device = self.params[0].device if self.params else self.group.device
        return Method.choose(self.group, self.policy, self.comm_hook, device)
