"""RepeatedExchange: the exchange of a pass inside a CUDA graph, made once and then replayed.

While the graph is captured, gradients are copied into the buckets and the buckets sent off by the
same collectives, in the same order, as in any other pass: a rank whose step is replayed, one whose
step is not, and one that only stands in take part in the same pass. In a replay no Python runs. So
what a rank says in a pass lies in memory that the graph reads, and is written there beforehand;
what all said is read behind the replay, a pass later, as in all passes on a device.

Where something is special about a pass, it is not replayed: it goes the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from .._torch import foreach
from ..errors import NotCapturedError, PeerError
from ..recorder import events
from . import header, messages
from .dividing import FIXED, trouble_in
from .header import Said
from .passes import Pass, State
from .replay_limit import limit_of
from .sharing import has_part_of_a_gpu

if TYPE_CHECKING:
    from .reducer import Reducer


def obstacle_to_replays(reducer: Reducer) -> str:
    """Why no pass of this reducer can be replayed; empty if passes can."""
    if not reducer.averages:
        return ""
    if reducer.comm_hook is not None:
        return "a communication hook averages the gradients"
    if reducer.layout.scattered:
        return "an optimizer holds its part of the gradients"
    if reducer.policy.lazy:
        return "lazy buckets have other memory in each pass"
    if any(reducer.is_sparse(number) for number in range(len(reducer.params))):
        return "some gradients are sparse"
    return reducer.group.refuses_capture


def is_usual(reducer: Reducer) -> bool:
    """Whether the pass that comes can be a replay, of a reducer without an obstacle."""
    ledger, observers = reducer.ledger, reducer.observers
    if not reducer.averages:
        return True
    gathered = ledger.total or ledger.plain or ledger.open
    heeded = observers.see_buckets or observers.heed() or reducer.mailbox.by_active
    settled = reducer.layout.is_settled and not reducer.listeners.learning
    if ledger.weighs and ledger.weight == 0:  # its gradients are dropped: they may be no numbers
        return False
    return settled and not gathered and not heeded and reducer.runner.current is None


class RepeatedExchange:
    """What a captured graph does with a reducer's buckets, and what goes with each replay."""

    def __init__(self, reducer: Reducer, *, weighted: bool, keep: bool = False) -> None:
        """``weighted``: gradients count by a weight. ``keep``: ``.grad`` holds the averages."""
        self._of, self.weighted, self._keep = reducer, weighted, keep
        self._buckets, self._method = reducer.layout.buckets, reducer.choose_method()
        self._due: list[set[int]] = []  # gradients yet to come, by bucket
        self._next = 0  # the bucket whose turn it is
        self._works: list[TorchWork] = []
        self._notes: list[Callable[[], events.Entry | None]] = []  # called with each replay
        self._late = has_part_of_a_gpu()  # all buckets leave at the end
        self._limit = limit_of(reducer)
        last = self._buckets[-1]
        size = header.length(self._method.ranks, len(reducer.params))
        self._rides = reducer.header_rides and reducer.layout.carries_header(last.numbers)
        if self._rides:
            self.memory = last.buffer[-size:]
        else:
            self.memory = torch.empty(size, dtype=torch.float64, device=last.buffer.device)
        self._said = torch.empty_like(self.memory)  # this rank's part, in the pass that comes
        header.write(self._said, self._says(), self._method.share, self._method.ranks)
        self._factor = torch.ones((), dtype=torch.float64, device=last.buffer.device)
        self._written = (self._says(), self._scale)
        self._factor.fill_(self._scale)

    # -- while it is captured -----------------------------------------------------------------

    def begin(self) -> None:
        """A graph is captured from here on."""
        self._due = [set(bucket.numbers) for bucket in self._buckets]
        self._next = 0
        self._works, self._notes = [], []

    def take(self, numbers: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Copy gradients into their buckets; send off what is complete."""
        places = [self._of.layout.place[number] for number in numbers]
        foreach.copy_([self._buckets[index].views[slot] for index, slot in places], list(grads))
        for due in self._due:
            due.difference_update(numbers)
        while not self._late and self._next < len(self._buckets) - 1 and not self._due[self._next]:
            self._launch()

    def settle(self) -> None:
        """Send the rest, wait for the averages, and divide them as the ranks say."""
        if unreached := set().union(*self._due):
            raise NotCapturedError(
                self._of.group.rank(), f"no gradient comes to {self._of.names[min(unreached)]}"
            )
        while self._next < len(self._buckets) - 1:
            self._launch()
        self.memory.copy_(self._said)
        if not self._rides:
            self._send(self.memory)
        self._launch()
        for work in self._works:
            work.wait()
        self._of.mailbox.divide(self._buckets, self.memory, self._method.ranks)

    @property
    def trouble(self) -> Tensor:
        """Above zero where a rank could not go on."""
        return trouble_in(self.memory)

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        if self.weighted:
            bucket.payload.mul_(self._factor)
        elif self._method.scale != 1:
            bucket.payload.mul_(self._method.scale)
        self._send(bucket.buffer)
        self._next += 1

    def _send(self, tensor: Tensor) -> None:
        work, note = self._of.group.captured_all_reduce(tensor, self._method.op)
        self._works.append(work)
        self._notes.append(note)

    # -- around a replay ----------------------------------------------------------------------

    def _says(self) -> Said:
        ledger, rank = self._of.ledger, self._of.group.rank()
        weight = ledger.weight / ledger.unit
        return Said(active=rank, weight=weight, weighted=self.weighted)

    @property
    def _scale(self) -> float:
        return self._method.scale * self._of.ledger.weight / self._of.ledger.unit

    def announce(self) -> None:
        """Write what this rank says in the pass that comes; waits for no device."""
        said, scale = self._says(), self._scale
        if (said, scale) == self._written:
            return
        first = [said.weight, said.trouble, said.late, said.weighted]
        share = self._method.share
        row = torch.tensor(
            [number * share for number in first] + [scale],
            dtype=torch.float64,
            pin_memory=self._said.is_cuda,
        ).to(self._said.device, non_blocking=True)
        self._said[:FIXED].copy_(row[:FIXED])
        self._factor.copy_(row[FIXED])
        self._written = said, scale

    def conclude(self) -> None:
        """A replay has been started: keep what the ranks say in it, and hear of the one before."""
        of, ranks = self._of, self._method.ranks
        of.diary.backward_begins()
        entries = [note() for note in self._notes]
        overdue, earlier = of.mailbox.has_failed(ranks), of.mailbox.earlier(ranks)
        of.mailbox.forget()
        self._limit.begins()
        kept = of.mailbox.keep(self.memory, of.ledger.unit)
        of.diary.follow(kept, entries[-1])
        self._limit.started(kept)
        of.mailbox.told = None
        if earlier is not None and earlier.header is not None and earlier.header.weighted:
            of.ledger.choose_unit(earlier.header.weight, of=earlier.unit)
        of.ledger.forget()
        of.picture.conclude((), of.policy)
        of.expected.gradients_came((), at_once=True)
        of.runner.passes += 1
        for bucket in self._buckets if self._keep else ():
            bucket.give_back_all()
        of.diary.ends()
        if overdue:
            said = messages.left(of.group, of.diary.model, of.runner.passes - 2)
            of.handed.overdue = PeerError(of.group.rank(), said, "in the pass before this one")
        of.observers.tell_end(Pass(state=State.ENDED, header=self.memory))
        of.observers.tell_averages()
