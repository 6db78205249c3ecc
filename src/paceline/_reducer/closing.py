"""PassClosing: the end of a pass, from the last gradient of this rank to averages on all of them.

What is missing is filled with zeros, the header is written (``header.py``) and all is sent, then
awaited. So every pass of every rank consists of the same collectives, whichever parameters its
graph reached.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from ..errors import LateGradientError, PeerError
from ..groups import FINISHED, ReduceOp
from . import header, messages
from .bucket import Bucket
from .filling import Filling
from .header import Header, Kept, Said
from .passes import Pass, Role
from .tensors import local

if TYPE_CHECKING:
    from .reducer import Reducer


class PassClosing:
    """What one rank does at the end of one pass."""

    def __init__(self, reducer: Reducer, running: Pass, filling: Filling) -> None:
        self._of, self._pass = reducer, running
        self._filling, self._method = filling, filling.method
        self._group, self._buckets = reducer.group, reducer.layout.buckets
        self._memory, self._rides = torch.empty(0), False  # the header's
        self._earlier: Kept | None = None  # what ranks said in the pass before, if it is news
        self._overdue = False  # a rank could not go on then, and nobody knew
        self._work: TorchWork = FINISHED  # the header's, if it travels alone
        ledger = reducer.ledger  # the weight of now: a program may wait long after the pass
        self._owed, self._counts = ledger.owed(), ledger.counts
        self._late_share = filling.method.share * ledger.weight / ledger.unit
        self._shows_graph = running.answers and ledger.weight != 0  # by what has come

    def complete(self, *, tell_end: bool) -> None:
        """Leave the averages of all ranks in ``.grad``, or raise on all of them; all was sent."""
        told = self._of.mailbox.told = self._wait()
        self._divide(told)
        self._choose_unit(told)
        self._refuse_overdue(at_once=tell_end)
        self._refuse_trouble(told)
        self._hand_out(told)
        self._settle_weights()
        self._draw_conclusions(told)
        self._tell_others(tell_end)

    def send(self) -> None:
        """Send every bucket that was not sent yet, without waiting."""
        self._pass.ended = time.perf_counter_ns()
        filling, last = self._filling, self._buckets[-1]
        filling.meet_streams(len(self._buckets))
        for bucket in self._buckets[self._pass.next : -1]:
            filling.launch(bucket)
        at_once = not last.taken  # then nothing can have come in between
        filling.take_rest(last)
        self._look_around(self._buckets[:-1] if at_once else self._buckets)
        self._memory, self._rides = self._header_memory(last)
        if self._rides or self._method.prompt:
            self._write_header(self._memory)
        if self._method.prompt and not self._rides:
            self._start_header()
        self._group.mark_device()
        filling.launch(last)

    def _wait(self) -> Header | None:
        for bucket in self._buckets:
            with self._filling.noting_failure():
                self._of.diary.wait(bucket)
        if not self._rides and not self._method.prompt:
            self._write_header(self._memory)
            self._start_header()
        self._of.diary.wait_for(self._work)
        return self._read_header(self._memory)

    def _start_header(self) -> None:
        method = self._method
        self._work = self._group.start_all_reduce(self._memory, method.op, quiet=method.quiet)

    def _look_around(self, left: Sequence[Bucket]) -> None:
        """Note what is absent, and what came late to buckets that had ``left``; is it allowed?"""
        running = self._pass
        for bucket in self._buckets:
            running.absent.update(bucket.numbers[slot] for slot in bucket.absent)
        for bucket in left:
            for slot in bucket.holding():
                param = bucket.params[slot]
                assert param.grad is not None
                running.late[bucket.numbers[slot]], param.grad = param.grad, None
        running.absent.difference_update(running.late)
        running.idle.difference_update(running.late)
        if not running.gives or running.trouble:
            return
        rank, picture = self._group.rank(), self._of.picture
        error = None
        if self._shows_graph:
            error = picture.objection(rank, running.missed, running.again, self._of.policy)
        if error is None and running.late and not self._listens:
            error = LateGradientError(rank, picture.named(running.late))
        if error is not None:
            running.fail(error)

    # -- the header ---------------------------------------------------------------------------

    @property
    def _listens(self) -> bool:
        """Whether all ranks read the header in the pass it belongs to."""
        of = self._of
        return not self._method.reads_late or of.listeners.learning or of.layout.scattered

    def _header_memory(self, last: Bucket) -> tuple[Tensor, bool]:
        size = header.length(self._method.ranks, len(self._of.params))
        if self._of.header_rides and self._of.layout.carries_header(last.numbers):
            return last.buffer[-size:], True
        device = self._of.params[0].device
        return torch.empty(size, dtype=torch.float64, device=device), False

    def _write_header(self, memory: Tensor) -> None:
        running = self._pass
        said = Said(
            active=self._group.rank() if running.gives else None,
            weight=self._owed if running.gives else 0.0,
            trouble=bool(running.trouble),
            late=bool(running.late),
            weighted=self._counts and running.gives,
            owing=running.role is Role.OWING,
            absent=running.absent,
            idle=running.idle,
        )
        if said.trouble and not self._listens:
            of = self._of
            messages.leave(self._group, of.diary.model, of.runner.passes, running.trouble)
        self._of.mailbox.write(memory, said, self._method.share, self._method.ranks)

    def _read_header(self, memory: Tensor) -> Header | None:
        """What the ranks said; None while a device has not got that far and nothing hangs on it.

        Then the end of the next pass has it. Until then it counts all the same: means are divided
        on the device.
        """
        running, of = self._pass, self._of
        self._hear_earlier()
        if self._listens:
            return of.mailbox.read(memory, self._method.ranks)
        # A pass is remembered; the memory of a lazy bucket must not be for its sake.
        running.header = memory.clone() if of.policy.lazy else memory
        of.diary.follow(of.mailbox.keep(memory, of.ledger.unit))
        special = running.absent or running.late or running.trouble or of.observers.see_buckets
        if special or of.mailbox.by_active or of.observers.heed():
            return of.mailbox.read(memory, self._method.ranks)
        return None

    def _hear_earlier(self) -> None:
        """Read what the pass before kept, now that this one has been sent.

        A device that is behind has got that far by now, so that nobody waits for it.
        """
        mailbox, ranks = self._of.mailbox, self._method.ranks
        self._overdue = mailbox.has_failed(ranks)
        self._earlier = mailbox.earlier(ranks)
        mailbox.forget()

    def _divide(self, told: Header | None) -> None:
        """The mean of ``w g`` over the mean of ``w``; of plain passes, that of the active ranks."""
        ranks, memory = self._method.ranks, self._pass.header
        by_active = self._of.mailbox.by_active
        if memory is not None:
            self._of.mailbox.divide(self._buckets, memory, ranks)
        if memory is not None or told is None or not (told.weighted or by_active):
            return
        weight = told.weight if told.weighted else len(told.active_ranks()) / ranks
        if weight not in (0.0, 1.0):
            for bucket in self._buckets:
                bucket.means.div_(weight)
            self._pass.divisor = weight

    def _choose_unit(self, told: Header | None) -> None:
        """For the next pass, from what all ranks have read by now, so that all choose the same.

        Before anything is raised: a failure that some know earlier than others changes no unit.
        """
        ledger, earlier = self._of.ledger, self._earlier
        if told is not None and told.weighted and self._listens:
            ledger.choose_unit(told.weight)
        elif earlier is not None and earlier.header is not None and earlier.header.weighted:
            ledger.choose_unit(earlier.header.weight, of=earlier.unit)

    # -- what it comes to ---------------------------------------------------------------------

    def _refuse_overdue(self, *, at_once: bool) -> None:
        """Raise what was not known in the pass before; not earlier, so that this one is whole.

        Where a graph steps with the averages, it waits for the end of the step: all ranks step.
        """
        if not self._overdue:
            return
        of = self._of
        said = messages.left(self._group, of.diary.model, of.runner.passes - 1)
        error = PeerError(self._group.rank(), said, "in the pass before this one")
        if at_once:
            raise error
        of.handed.overdue = error

    def _refuse_trouble(self, told: Header | None) -> None:
        """If a rank reported a failure, raise it on every rank."""
        if told is None or not told.trouble:
            if self._pass.failure is not None:  # the header had left before
                raise self._pass.failure
            return
        self._of.mailbox.note_heard()
        said = self._group.all_gather_object(self._pass.trouble) if self._listens else []
        if self._pass.failure is not None:
            raise self._pass.failure
        messages = {rank: str(text) for rank, text in enumerate(said) if text}
        raise PeerError(self._group.rank(), messages)

    def _hand_out(self, told: Header | None) -> None:
        absent = self._pass.absent
        withheld = {n for n in absent if told is None or not told.present(n)}
        for bucket in self._buckets:
            if not withheld.intersection(bucket.numbers):
                bucket.give_back_all()
                continue
            for slot, number in enumerate(bucket.numbers):
                if number in withheld:
                    bucket.withhold(slot)
                else:
                    bucket.give_back(slot)
        if told is not None and told.late:
            self._add_late(self._pass.late)
        if told is not None and told.counts_nothing:
            self._average_held(told)
        for bucket in self._buckets:
            bucket.conclude()

    def _add_late(self, late: dict[int, Tensor]) -> None:
        """Reduce what came after its bucket had left, and add it; every rank takes part."""
        params = self._of.params
        anywhere = torch.zeros(len(params), dtype=torch.uint8, device=params[0].device)
        anywhere[list(late)] = 1
        self._group.all_reduce(anywhere, ReduceOp.MAX)
        share = self._late_share / self._pass.divisor
        for number in anywhere.nonzero().flatten().tolist():
            self._add_mean(number, late.get(number), share)

    def _average_held(self, told: Header) -> None:
        """All weights are 0: what ranks held before is averaged as without weights; all know it."""
        held = self._of.ledger.base
        for number in filter(told.present, self._of.layout.place):
            self._add_mean(number, held.get(number), self._method.share)

    def _add_mean(self, number: int, part: Tensor | None, share: float) -> None:
        """Average what ranks have outside of their buckets, weighted by ``share``, and add it."""
        total = torch.zeros_like(local(self._of.params[number]))
        if part is not None and share:
            total.add_(local(part), alpha=share)
        self._group.all_reduce(total, self._method.op)
        bucket, slot = self._of.layout.place[number]
        self._buckets[bucket].add(slot, total)

    def _settle_weights(self) -> None:
        """What this rank owed is averaged."""
        ledger = self._of.ledger
        if not self._pass.gives:
            return
        ledger.forget_plain()
        if ledger.open:
            ledger.settle(self._of.params, self._of.layout.place)

    def _draw_conclusions(self, told: Header | None) -> None:
        running, of = self._pass, self._of
        of.picture.count(told, self._method.ranks)
        if running.gives and self._shows_graph:
            of.picture.conclude(running.missed, of.policy)
        if running.answers:
            self._note_answer(running.missed, told)
        if of.listeners.learning:
            of.make_plan(running.arrival, told, watched=running.watched)
        elif running.late or (told is not None and told.late):
            of.listeners.learn()
        elif running.arrival:
            of.listeners.act_on_few(running.arrival, watched=running.watched)
        elif not running.watched:
            of.listeners.hear_all()
        if of.streams.are_several:
            of.listeners.hear_all()

    def _note_answer(self, missed: Collection[int], told: Header | None) -> None:
        """Note whether this pass completes the forward; all ranks get the same answer."""
        of = self._of
        unreached = [number for number in missed if not of.picture.used[number]]
        at_once = told is None or of.policy.find_unused
        of.expected.gradients_came(unreached, at_once=at_once)

    def _tell_others(self, tell_end: bool) -> None:
        self._pass.finished = time.perf_counter_ns()
        observers = self._of.observers
        observers.tell_buckets(self._buckets)
        if tell_end:
            observers.tell_end(self._pass)
        observers.tell_averages()
