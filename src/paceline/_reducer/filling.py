"""Filling: the gradients of one pass on their way into buckets, and the buckets on theirs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .bucket import Bucket, Phase
from .method import Method
from .passes import Pass

if TYPE_CHECKING:
    from .reducer import Reducer


class Filling:
    """Takes gradients as they come, and sends buckets off in their order."""

    __slots__ = ("_of", "_pass", "method")

    def __init__(self, reducer: Reducer, running: Pass, method: Method) -> None:
        self._of, self._pass = reducer, running
        self.method = method  # how gradients of this pass are exchanged

    # -- gradients come -----------------------------------------------------------------------

    def take_at_once(self, number: int) -> None:
        """Give the memory of a gradient back; if it comes again in this pass, it comes late."""
        place = self._of.layout.place.get(number)
        if place is not None:
            bucket, slot = self._of.layout.buckets[place[0]], place[1]
            if bucket.phase is Phase.FILLING and slot not in bucket.taken:
                with torch.no_grad():
                    self.take(bucket, [slot])

    def act(self, index: int, slot: int | None, *, completes: bool) -> None:
        """Take the large gradient at ``slot``, if given, and send buckets that are complete."""
        bucket = self._of.layout.buckets[index]
        with torch.no_grad():
            if slot is not None and bucket.phase is Phase.FILLING:
                self.take(bucket, [slot])
            if completes:
                self.meet_streams(max(index + 1, self._pass.complete))
                self.advance(index)

    def meet_streams(self, end: int) -> None:
        """Let this stream use all gradients that have come, on whichever; of buckets to ``end``."""
        left = self._of.layout.buckets[self._pass.next : end]
        self._of.streams.meet(param.grad for bucket in left for param in bucket.params)

    def advance(self, index: int) -> None:
        """Send off full buckets whose turn it is, up to this one; the last one never.

        The gradient that completes this bucket has come. Those behind it lack theirs, unless it
        came before their turn, which the pass remembers.
        """
        running, buckets = self._pass, self._of.layout.buckets
        running.complete = max(running.complete, min(index + 1, len(buckets) - 1))
        while running.next < running.complete and self._is_full(buckets[running.next]):
            self.launch(buckets[running.next])
        if running.next:
            self._of.group.progress()
            self._of.diary.looks(buckets)

    def _is_full(self, bucket: Bucket) -> bool:
        """Whether all has come that will; if all has, and nothing is special, it is taken too."""
        running = self._pass
        if self._is_plain and bucket.take_whole(self._scale):
            return True
        slots = bucket.missing()
        if running.plain:
            empty = [slot for slot in slots if bucket.params[slot].grad is None]
        else:
            numbers, params = bucket.numbers, bucket.params
            empty = [s for s in slots if not running.before.differs(numbers[s], params[s].grad)]
        if not empty:
            return True
        unused = self._of.picture.unused
        missing = (bucket.numbers[slot] for slot in empty)
        return not self.method.reads_late and unused.issuperset(missing)

    def is_complete(self) -> bool:
        """Whether a gradient has come to every parameter."""
        buckets, before = self._of.layout.buckets, self._pass.before
        left = ((b.numbers[s], b.params[s].grad) for b in buckets for s in b.missing())
        return not any(b.absent for b in buckets) and all(before.differs(n, g) for n, g in left)

    # -- into buckets -------------------------------------------------------------------------

    def take(self, bucket: Bucket, slots: Sequence[int]) -> None:
        """Move these gradients in, weighted if they are to be."""
        ledger = self._of.ledger
        if ledger.open and self._pass.gives:
            for slot in slots:
                if ledger.give(bucket.numbers[slot], bucket.params[slot]):
                    self._pass.idle.add(bucket.numbers[slot])
        if slots:
            scale = self._scale * ledger.kept(bucket.params[slots[0]])
            bucket.take(slots, scale, plain=self._is_plain)

    def take_rest(self, bucket: Bucket) -> None:
        """Move in whatever is not in yet, and note what this pass did not touch."""
        running = self._pass
        slots = bucket.missing()
        if not running.plain:
            for slot in slots:
                number, grad = bucket.numbers[slot], bucket.params[slot].grad
                if grad is not None and not running.before.differs(number, grad):
                    running.idle.add(number)
        self.take(bucket, slots)

    @property
    def _is_plain(self) -> bool:
        return self._pass.plain and not self._of.ledger.open

    @property
    def _scale(self) -> float:
        """What gradients are multiplied by on the way in."""
        return self.method.scale / self._of.ledger.unit

    # -- on their way -------------------------------------------------------------------------

    def launch(self, bucket: Bucket) -> None:
        """Send a bucket off."""
        running, of, hook = self._pass, self._of, self.method.hook
        of.diary.fills(bucket)
        self.take_rest(bucket)
        of.diary.launches(bucket)
        running.first_launch = running.first_launch or time.perf_counter_ns()
        if hook is None:
            bucket.launch(of.group, average=self.method.native, quiet=self.method.quiet)
        else:
            weight = of.ledger.owed() if running.gives else 0.0
            last = bucket is of.layout.buckets[-1]
            with self.noting_failure():
                bucket.launch_hook(hook.call, last=last, weight=weight)
        of.diary.launched()
        running.next += 1

    @contextlib.contextmanager
    def noting_failure(self) -> Iterator[None]:
        """What a hook raises waits for the end of the pass: the other ranks are to hear of it."""
        try:
            yield
        except Exception as error:
            if self.method.hook is None:
                raise
            self._pass.fail(error, f"{type(error).__name__} in its hook: {error}")
