"""Reducer: averages the gradients of one rank's model with the other ranks', during backward.

**A pass.** A backward pass begins for us when a gradient reaches an output of the model, or the
first parameter that has a hook. From then on gradients are taken into buckets as they arrive, and
full buckets are sent off in the order of their index, the same on all ranks. The last bucket always
waits for the end of the pass; then whatever is missing is filled with zeros, the header is written
(``header.py``), and all is awaited. So every pass of every rank consists of the same collectives,
whichever parameters its graph reached: no flag has to say so beforehand.

**What is right does not depend on hooks.** A gradient is whatever ``.grad`` holds when the pass
ends; hooks only let buckets leave earlier. ``.grad`` is linear in everything: a gradient that was
accumulated before, averaged or not, is averaged again with the new one, and the result is right.

**Learning.** In the first pass every parameter tells of its arrival. The order on rank 0 becomes
the plan of all ranks; afterwards only large parameters, and the last one of each bucket, set
something in motion (``plan.py``), and the others just leave a note. When a gradient comes after its
bucket has left (a graph that changed, a weight used again in a reentrant checkpoint), all ranks
learn of it through the header, exchange what came late, and learn anew.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ..errors import (
    GraphChangedError,
    LateGradientError,
    PacelineError,
    PeerError,
    UnweighableError,
)
from ..groups import Group, ReduceOp
from ..policies import Reduction
from . import header
from .bucket import Bucket, Hook, Phase, SparseBucket
from .header import Header
from .plan import Assignment, Spec, first_plan, learned_plan, triggers
from .tensors import add_to_grad, local
from .weights import Ledger

_LARGE = 256 * 1024  # bytes
_NATIVE_AVERAGE = frozenset({"shm", "nccl", "threads", "fake", "hybrid"})


@dataclass(eq=False, slots=True)
class Pass:
    """One backward pass whose gradients are averaged."""

    next: int = 0  # the bucket whose turn it is
    arrival: list[int] = field(default_factory=list)  # while learning: parameters, as they came
    touched: set[int] = field(default_factory=set)  # parameters that a gradient has come to
    seen: Counter[int] = field(default_factory=Counter)  # how often, for those that act on it
    ending: Callable[[], object] = object  # None once a backward pass has ended without us
    failure: Exception | None = None  # what a communication hook raised
    again: set[int] = field(default_factory=set)  # strict: what torch would not have
    idle: set[int] = field(default_factory=set)  # have a gradient that this pass did not touch
    trouble: str = ""
    began: int = field(default_factory=time.perf_counter_ns)
    first_launch: int = 0
    ended: int = 0  # the backward pass itself
    finished: int = 0


class Reducer:
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
    ) -> None:
        self.params = tuple(params)
        self.names = tuple(names)
        self.group = group
        self.policy = policy
        self.hook: Hook | None = None
        self.ledger = Ledger()
        self.stands_in = False  # this rank has no pass of its own
        self._owing = False  # it has none either, and gives what it gathered before
        self.by_active = False  # a plain mean is one over the ranks that do
        self.told: Header | None = None  # what the ranks said in the last pass
        self.plan: Assignment = ()
        self.rebuilt = False
        self.passes = 0
        self.last = Pass()
        self.steady = True  # the graph never changed so far
        self.unfinished: tuple[int, ...] = ()  # strict: what the last pass did not reach
        self.error = ""  # what went wrong last
        self.after_bucket: list[Callable[[Bucket], None]] = []
        self.after_pass: list[Callable[[], None]] = []
        self.after_failure: list[Callable[[], None]] = []
        self.ended: Callable[[Pass], None] = lambda _: None  # is told the times of each pass
        self._wanted = wanted
        self._averages = group.backend in _NATIVE_AVERAGE
        self._sparse = tuple(sparse) or (False,) * len(self.params)
        self._buckets: list[Bucket] = []
        self._pass: Pass | None = None
        self._ending: Callable[[], object] = _nothing  # of the backward that runs, while it does
        self._task = -1  # torch's number of it
        self._kept_here = False  # gradients came that are not to be averaged yet
        self._handles: list[RemovableHandle] = []
        self._learning = True
        self._present_first: frozenset[int] | None = None
        self.unused: frozenset[int] = frozenset()  # not reached here in the last pass
        self.used = [0] * len(self.params)  # by how many ranks' graphs in the last pass
        self.learned: tuple[int, ...] = ()  # the order in which gradients came when last heard
        self._retired = False
        self._divisor = 1.0  # of the pass that runs, beyond the number of ranks
        self._unread: tuple[Tensor, torch.cuda.Event] | None = None
        self._usual = torch.empty(0)  # the header of a pass in which nothing is special
        self.specs = [self._spec(number) for number in range(len(self.params))]
        static = policy.static_graph
        self.first_caps, _ = policy.caps.compute_bucket_size_limits(static, policy.find_unused)
        self.plan = self.first_plan = first_plan(self.specs, self.first_caps)
        if not self.alone:
            self._learn()

    def _spec(self, number: int) -> Spec:
        mine = local(self.params[number])
        return Spec(mine.nbytes, (mine.dtype, mine.device), self._sparse[number])

    @property
    def alone(self) -> bool:
        """Whether there is nobody to average with, and no hook that wants to see gradients."""
        if not self.params:
            return True
        nobody = self.group.size() == 1 and self.hook is None
        return nobody and not self.policy.alone and not self.ledger.weighs

    @property
    def on_cpu(self) -> bool:
        """Whether the results can be read without stopping a device."""
        return bool(self.params) and self.params[0].device.type == "cpu"

    # -- hooks --------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Listen to every parameter in the next pass."""
        self.remove_hooks()
        self._learning = True
        for number, param in enumerate(self.params):
            self._listen(param, self._learner(number))

    def _listen(self, param: nn.Parameter, listener: Callable[[Tensor], None]) -> None:
        if param.requires_grad:
            self._handles.append(param.register_post_accumulate_grad_hook(listener))

    def _learner(self, number: int) -> Callable[[Tensor], None]:
        large = self._is_large(number)

        def arrived(_param: Tensor) -> None:
            if self.begin():
                running = self._running
                running.arrival.append(number)
                if self.policy.strict:
                    self._note_strictly(running, number)
                running.touched.add(number)
                if large:
                    self._take_at_once(number)

        return arrived

    def _take_at_once(self, number: int) -> None:
        """Give the memory of a gradient back; if it comes again in this pass, it comes late."""
        for bucket in self._buckets:
            if number in bucket.numbers and bucket.phase is Phase.FILLING:
                slot = bucket.numbers.index(number)
                if slot not in bucket.taken:
                    with torch.no_grad():
                        self._take(bucket, [slot])

    def _note_strictly(self, running: Pass, number: int) -> None:
        """torch marks a parameter ready once, and with its flag not inside a nested backward."""
        nested = self.policy.find_unused and self._task != torch._C._current_graph_task_id()
        if nested or number in running.touched:
            running.again.add(number)

    def _noter(self, number: int) -> Callable[[Tensor], None]:
        """All that most parameters do; there are many, so it is short."""

        def arrived(_param: Tensor) -> None:
            running = self._pass
            if running is None or running.ending() is None:
                if not self.begin():
                    return
                running = self._running
            running.touched.add(number)

        return arrived

    def _act_on_few(self, arrival: Sequence[int]) -> None:
        """From now on only what completes buckets, and large gradients, set something in motion."""
        self.remove_hooks()
        self.learned = tuple(arrival)
        counts = Counter(arrival)
        order = list(dict.fromkeys(reversed(arrival)))[::-1]  # by the last time each came
        large = frozenset(n for n in counts if self._is_large(n))
        place = {n: (b, s) for b, row in enumerate(self.plan) for s, n in enumerate(row)}
        acting = triggers(self.plan, order, large)
        for number, param in enumerate(self.params):
            if number in acting and number in place:
                completes = acting[number] is not None
                self._listen(param, self._actor(number, *place[number], counts[number], completes))
            else:
                self._listen(param, self._noter(number))

    def _actor(
        self, number: int, bucket: int, slot: int, times: int, completes: bool
    ) -> Callable[[Tensor], None]:
        large = self._is_large(number)

        def arrived(_param: Tensor) -> None:
            if not self.begin():
                return
            running = self._running
            running.touched.add(number)
            running.seen[number] += 1
            if running.seen[number] != times:
                return
            with torch.no_grad():
                if large and self._buckets[bucket].phase is Phase.FILLING:
                    self._take(self._buckets[bucket], [slot])
                if completes:
                    self._advance()

        return arrived

    def _is_large(self, number: int) -> bool:
        """Whether a gradient is taken, and its memory given back, as soon as it comes.

        Not on a device: there one copy of a whole bucket is worth more than its memory.
        """
        return self.on_cpu and self.specs[number].nbytes >= _LARGE

    def watch(self, output: Tensor) -> None:
        """Be told when a backward pass comes to ``output``, before it comes to any parameter."""
        output.register_hook(self._reached)

    def _reached(self, _grad: Tensor) -> None:
        """Arrange to be called at the end of this backward, the outermost one if others nest in it.

        It may be ``autograd.grad``, which comes to no parameter; then nothing begins.
        """
        if self._retired or self.alone or self._ending() is not None:
            return
        self._await_end()
        if not self._handles:  # it was alone until there were weights
            self._learn()
        if self.ledger.open:  # of a backward pass that failed
            self.ledger.cancel(self.params)
        if self.ledger.weighs:
            self.ledger.begin(self.params)

    def _await_end(self) -> None:
        ending = _Ending(self)
        self._task = torch._C._current_graph_task_id()
        self._ending = weakref.ref(ending)
        Variable._execution_engine.queue_callback(ending)

    def remove_hooks(self) -> None:
        """Stop listening to the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def retire(self) -> None:
        """Never average again; another reducer may take the parameters over."""
        self.remove_hooks()
        self._retired = True

    # -- a pass -------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Enter the backward pass that runs now; False when it is not to be averaged."""
        if self._in_pass():
            return True
        if self._retired or self.alone:
            return False
        if self.ledger.weighs and not self.ledger.open:
            raise UnweighableError(self.group.rank())
        if not self._wanted():
            self._kept_here = True
            return False
        self.make_good()
        if self._ending() is None:
            self._await_end()
        self._enter()
        self._running.ending = self._ending
        return True

    def end_of_backward(self) -> None:
        """What is left to do when all gradients have come."""
        self._ending = _nothing
        kept_here, self._kept_here = self._kept_here, False
        if self._pass is not None:
            self.finish()
        elif self.ledger.open and kept_here:
            self.ledger.end(self.params)
        elif self.ledger.open:
            self.ledger.cancel(self.params)

    def _in_pass(self) -> bool:
        return self._pass is not None and self._pass.ending() is not None

    def make_good(self) -> None:
        """If a backward pass failed halfway, end it: the other ranks still wait for the rest."""
        if self._pass is not None:
            with contextlib.suppress(PacelineError):
                self.stand_in(trouble="its backward pass failed halfway")

    def _enter(self) -> None:
        self.settle_plan()
        if self._learning and self._is_narrow:
            self._agree_on_unit()
        if self.ledger.weighs and not self.ledger.open:
            self.ledger.begin(self.params)
        self._pass = Pass()

    @property
    def _is_narrow(self) -> bool:
        """Whether gradients may travel in 16 bits, where a number of tokens would overflow."""
        kinds = {self.policy.dtype or local(p).dtype for p in self.params}
        return self.hook is not None or any(kind.itemsize < 4 for kind in kinds)

    def _agree_on_unit(self) -> None:
        most = torch.tensor([self.ledger.weight], device=self.params[0].device)
        self.group.all_reduce(most, ReduceOp.MAX)
        self.ledger.unit = 1.0
        self.ledger.choose_unit(float(most))

    @property
    def _running(self) -> Pass:
        assert self._pass is not None
        return self._pass

    @property
    def _native(self) -> bool:
        return self._averages and self.group.size() > 1

    @property
    def _scale(self) -> float:
        """What gradients are multiplied by on the way in."""
        unit = 1 / self.ledger.unit
        return unit if self.hook is not None or self._native else unit / self.group.size()

    @property
    def _quiet(self) -> bool:
        """Where every core computes, a thread that moves buckets along would only take one away."""
        return self.group.backend == "shm" and self.group.size() >= (os.cpu_count() or 1)

    def _advance(self) -> None:
        """Send off full buckets whose turn it is, except the last one."""
        running = self._running
        while running.next < len(self._buckets) - 1 and self._is_full(self._buckets[running.next]):
            self._launch(self._buckets[running.next])
        if running.next:
            self.group.progress()

    def _is_full(self, bucket: Bucket) -> bool:
        touched = self._running.touched
        missing = [number for number in bucket.numbers if number not in touched]
        return not missing or (self.on_cpu and self.unused.issuperset(missing))

    def _take(self, bucket: Bucket, slots: Sequence[int]) -> None:
        if self.ledger.open and not self.stands_in:
            for slot in slots:
                self.ledger.fold(bucket.numbers[slot], bucket.params[slot])
        bucket.take(slots, self._scale)

    def _take_rest(self, bucket: Bucket) -> None:
        running = self._running
        slots = bucket.missing()
        for slot in slots:
            number = bucket.numbers[slot]
            if number not in running.touched and bucket.params[slot].grad is not None:
                running.idle.add(number)
        self._take(bucket, slots)

    def _launch(self, bucket: Bucket) -> None:
        running = self._running
        self._take_rest(bucket)
        running.first_launch = running.first_launch or time.perf_counter_ns()
        if self.hook is None:
            bucket.launch(self.group, average=self._native, quiet=self._quiet)
        else:
            with self._noting_failure():
                bucket.launch_hook(self.hook, last=bucket is self._buckets[-1])
        running.next += 1

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """What a hook raises waits for the end of the pass: the other ranks are to hear of it."""
        try:
            yield
        except Exception as error:
            if self.hook is None:
                raise
            running = self._running
            running.failure = running.failure or error
            running.trouble = running.trouble or f"{type(error).__name__} in its hook: {error}"

    # -- its end ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Complete the pass: all ranks have the averages when it returns."""
        running = self._running
        running.ended = time.perf_counter_ns()
        self._divisor = 1.0
        try:
            late, absent, memory = self._send_the_rest()
            needed = bool(absent or late or running.trouble) or self.ledger.counts or self.by_active
            self.told = told = self._listen_to_header(memory, needed)
            self._divide(told)
            self._refuse_trouble(told)
            self._hand_out(told, absent)
            if late or (told is not None and told.late):
                self._add_late(late)
            if told is not None and told.weighed:
                self.ledger.choose_unit(told.weight)
            if self.ledger.open and not self.stands_in:
                self.ledger.settle(self.params)
            self._draw_conclusions(told, absent, bool(late))
            self._tell_others()
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            for bucket in self._buckets:
                bucket.reset()
            running.finished = time.perf_counter_ns()
            self.last, self._pass = running, None
            self.passes += 1
            self.ended(running)

    def _tell_others(self) -> None:
        for bucket in self._buckets:
            for on_bucket in self.after_bucket:
                on_bucket(bucket)
        for on_pass in self.after_pass:
            on_pass()

    def _give_up(self, error: BaseException) -> None:
        """Nobody can say what the gradients are now; what is under way must not write any more."""
        self.error = str(error)
        for bucket in self._buckets:
            bucket.abandon()
        self.ledger.forget()
        for param in self.params:
            param.grad = None
        for on_failure in self.after_failure:
            on_failure()

    def _send_the_rest(self) -> tuple[dict[int, Tensor], set[int], Tensor]:
        """Send what is left and wait; what came late, what is absent, and the ranks' header."""
        running = self._running
        while running.next < len(self._buckets) - 1:
            self._launch(self._buckets[running.next])
        last = self._buckets[-1]
        self._take_rest(last)
        late: dict[int, Tensor] = {}
        absent: set[int] = set()
        for bucket in self._buckets:
            absent.update(bucket.numbers[slot] for slot in bucket.absent)
            for number, param in zip(bucket.numbers, bucket.params, strict=True):
                if param.grad is not None:
                    late[number] = param.grad
                    absent.discard(number)
                    running.idle.discard(number)
                    param.grad = None
        self._check_graph(absent, late)
        memory, rides = self._header_memory(last)
        if rides:
            self._write_header(memory, bool(late), absent)
        self._launch(last)
        for bucket in self._buckets:
            with self._noting_failure():
                bucket.wait()
        if not rides:  # after all else: a hook's future may still send what follows its first part
            self._write_header(memory, bool(late), absent)
            op = ReduceOp.AVG if self._native else ReduceOp.SUM
            self.group.all_reduce(memory, op)
        return late, absent, memory

    def _write_header(self, memory: Tensor, late: bool, absent: set[int]) -> None:
        trouble = bool(self._running.trouble)
        scale = 1.0 if self._native else 1 / self.group.size()
        idle, weighed = self._running.idle, self.ledger.counts and not self.stands_in
        ranks = self.group.size()
        if weighed or self.stands_in or trouble or late or absent or idle:
            header.write(
                memory,
                scale,
                ranks,
                weight=0.0 if self.stands_in else self.ledger.owed(),
                trouble=trouble,
                late=late,
                weighed=weighed,
                active=None if self.stands_in else self.group.rank(),
                owing=self._owing,
                absent=absent,
                idle=idle,
            )
            return
        if self._usual.dtype != memory.dtype or self._usual.shape != memory.shape:
            self._usual = torch.empty_like(memory)
            header.write(self._usual, scale, ranks, active=self.group.rank())
        memory.copy_(self._usual)

    def _header_memory(self, last: Bucket) -> tuple[Tensor, bool]:
        size = header.length(self.group.size(), len(self.params))
        if self._rides(last.numbers):
            return last.buffer[-size:], True
        device = self.params[0].device
        return torch.empty(size, dtype=torch.float64, device=device), False

    def _rides(self, numbers: Sequence[int]) -> bool:
        """Whether the header fits behind these parameters' gradients."""
        dtype = self.policy.dtype or local(self.params[numbers[0]]).dtype
        sparse = self._sparse[numbers[0]]
        return self.hook is None and not sparse and header.can_ride(dtype)

    def _listen_to_header(self, memory: Tensor, needed: bool) -> Header | None:
        """What the ranks said; None while a device has not got that far and nothing hangs on it."""
        self._check_unread()
        if self.on_cpu or self._learning or needed:
            return Header.read(memory, self.group.size())
        if self.group.size() > 1:
            copy = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
            copy.copy_(memory, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._unread = copy, event
        return None

    def _check_unread(self) -> None:
        if self._unread is None:
            return
        (copy, event), self._unread = self._unread, None
        event.synchronize()
        told = Header.read(copy, self.group.size())
        if told.trouble or told.late:
            raise PeerError(self.group.rank(), {}, "in the pass before this one")

    def _check_graph(self, absent: set[int], late: dict[int, Tensor]) -> None:
        """Static graphs stay as they were in the first pass."""
        running = self._running
        if self.stands_in or running.trouble:
            return
        if running.again and not self.policy.static_graph:
            names = [self.names[n] for n in sorted(running.again)]
            running.failure = LateGradientError(self.group.rank(), names)
            running.trouble = str(running.failure)
            return
        present = frozenset(range(len(self.params))) - absent - running.idle
        if self._present_first is None:
            self._present_first = present
        elif present != self._present_first:
            self.steady = False
        if not self.policy.static_graph:
            return
        changed = sorted(present ^ self._present_first)
        if changed:
            names = [self.names[n] for n in changed]
            error = GraphChangedError(self.group.rank(), changed, names)
            running.trouble = str(error)
            self.unfinished = tuple(changed)
        elif late and not self.on_cpu:
            names = [self.names[n] for n in late]
            running.trouble = str(LateGradientError(self.group.rank(), names))

    def _refuse_trouble(self, told: Header | None) -> None:
        """When a rank said that it cannot go on, raise what it says on every rank."""
        mine = self._running.trouble
        if told is None or not told.trouble:
            return
        said = self.group.all_gather_object(mine)
        messages = {rank: str(text) for rank, text in enumerate(said) if text}
        if self._running.failure is not None:
            raise self._running.failure
        if mine and self.policy.static_graph and self.unfinished:
            changed, names = self.unfinished, [self.names[n] for n in self.unfinished]
            if not self.policy.strict:
                self.unfinished = ()
            raise GraphChangedError(self.group.rank(), changed, names)
        raise PeerError(self.group.rank(), messages)

    def _divide(self, told: Header | None) -> None:
        """The mean of ``w g`` over the mean of ``w``; of plain passes, that of the active ranks."""
        if told is None or not (told.weighed or self.by_active):
            return
        ranks = self.group.size()
        weight = told.weight if told.weighed else len(told.active_ranks()) / ranks
        if weight not in (0.0, 1.0):
            for bucket in self._buckets:
                bucket.payload.div_(weight)
            self._divisor = weight

    def _hand_out(self, told: Header | None, absent: set[int]) -> None:
        for bucket in self._buckets:
            for slot, number in enumerate(bucket.numbers):
                if number in absent and (told is None or not told.present(number)):
                    bucket.withhold(slot)
                else:
                    bucket.give_back(slot)

    def _add_late(self, late: dict[int, Tensor]) -> None:
        """Reduce what came after its bucket had left, and add it; every rank takes part."""
        if not self.on_cpu and not self._learning:
            raise LateGradientError(self.group.rank(), [self.names[n] for n in late])
        numbers = torch.zeros(len(self.params), dtype=torch.uint8, device=self.params[0].device)
        numbers[list(late)] = 1
        self.group.all_reduce(numbers, ReduceOp.MAX)
        scale = 1.0 if self._native else 1 / self.group.size()
        weight = self.ledger.weight / self.ledger.unit
        op = ReduceOp.AVG if self._native else ReduceOp.SUM
        for number in numbers.nonzero().flatten().tolist():
            param = self.params[number]
            total = torch.zeros_like(local(param))
            if number in late:
                total.add_(local(late[number]), alpha=scale * weight)
            self.group.all_reduce(total, op)
            add_to_grad(param, total.div_(self._divisor), sparse=self._sparse[number])

    def _draw_conclusions(self, told: Header | None, absent: set[int], late: bool) -> None:
        if told is not None:
            self.used = told.used(self.group.size())
        if not self.stands_in:
            self.unused = frozenset(absent | self._running.idle)
        allowed = self.policy.find_unused or self.policy.static_graph or self.stands_in
        if self.policy.strict and not allowed:
            self.unfinished = tuple(sorted(self.unused))
        if self._learning:
            self._settle(self._running.arrival, told)
        elif late or (told is not None and told.late):
            self._learn()
        elif self._running.arrival:
            self._act_on_few(self._running.arrival)

    # -- plans --------------------------------------------------------------------------------

    @property
    def rebuilds(self) -> bool:
        """Whether the plan is made anew in the order of arrival; torch's flag forbids it."""
        return self.policy.static_graph or not self.policy.find_unused

    def _settle(self, arrival: Sequence[int], told: Header | None) -> None:
        """Agree on a plan in the order in which gradients arrived on rank 0."""
        if self.rebuilds:
            order = list(dict.fromkeys(reversed(arrival)))[::-1]
            agreed = torch.full((len(self.params),), -1, dtype=torch.int64)
            agreed[: len(order)] = torch.tensor(order, dtype=torch.int64)
            agreed = agreed.to(self.params[0].device)
            self.group.broadcast(agreed, 0)
            order = [number for number in agreed.tolist() if number >= 0]
            self.plan = learned_plan(self.specs, self.policy.caps.rebuilt, order)
            self.rebuilt = True
        self.plan = self._without_unused(self.plan, told)
        if arrival:  # a rank that had no work listens on, to know its own order
            self._act_on_few(arrival)
        self._learning = False

    def _without_unused(self, plan: Assignment, told: Header | None) -> Assignment:
        if not self.policy.skip_unused or told is None:
            return plan
        rows = (tuple(n for n in row if told.present(n)) for row in plan)
        return tuple(row for row in rows if row) or plan

    def settle_plan(self) -> bool:
        """Lay the buckets out as planned, if they are not; gradients move with them."""
        if self.alone or tuple(bucket.numbers for bucket in self._buckets) == self.plan:
            return False
        held = {n: p.grad for n, p in enumerate(self.params) if p.grad is not None}
        views = {id(grad) for bucket in self._buckets for grad in bucket.grads}
        self._buckets = []
        self._buckets = [self._allocate(i, row) for i, row in enumerate(self.plan)]
        for bucket in self._buckets:
            for slot, number in enumerate(bucket.numbers):
                if bucket.lends and id(held.get(number)) in views:
                    bucket.views[slot].copy_(local(held.pop(number)))
                    bucket.params[slot].grad = bucket.grads[slot]
        return True

    def _allocate(self, index: int, numbers: Sequence[int]) -> Bucket:
        if self._sparse[numbers[0]]:
            return SparseBucket.hold(index, numbers[0], self.params[numbers[0]])
        last = index == len(self.plan) - 1
        size = header.length(self.group.size(), len(self.params))
        extra = size if last and self._rides(numbers) else 0
        return Bucket.allocate(
            index,
            numbers,
            [self.params[n] for n in numbers],
            self.group,
            dtype=self.policy.dtype,
            lends=self.policy.grads_are_views,
            extra=extra,
        )

    def move_to(self, group: Group) -> None:
        """Go on in another group; every one of its ranks does so at the same time."""
        self.group = group
        self._averages = group.backend in _NATIVE_AVERAGE
        self.forget_plan()

    def forget_plan(self) -> None:
        """Begin anew, as in the first pass; every rank does so at the same time."""
        self._buckets, self._pass, self._unread = [], None, None
        self.plan, self.rebuilt = self.first_plan, False
        self._present_first, self.unused, self.unfinished = None, frozenset(), ()
        self._usual = torch.empty(0)
        if not self.alone:
            self._learn()

    def set_hook(self, hook: Hook) -> None:
        """Let ``hook`` average buckets from now on."""
        self.hook = hook
        self._buckets = []
        if self._learning:
            self._learn()

    # -- passes without a backward ------------------------------------------------------------

    def sync(self) -> None:
        """Average what ``.grad`` holds now, outside any backward pass."""
        if self.alone:
            return
        explicit = self.ledger.explicit
        if self.ledger.total:  # nothing is added to what was gathered
            self.ledger.explicit = 0.0
        try:
            with torch.no_grad():
                self._enter()
                self.finish()
        finally:
            self.ledger.explicit = explicit

    def end_early(self) -> None:
        """End the pass that runs now, or stand in for it if it has not begun."""
        if self._in_pass():
            with torch.no_grad():
                self.finish()
        else:
            self.stand_in()

    def stand_in(self, trouble: str = "", *, take: bool = False) -> Header | None:
        """Take part in the other ranks' pass with nothing to give.

        ``.grad`` stays as it is, or with ``take`` becomes the average, for an optimizer whose shard
        of the step is this rank's to take. Returns what the ranks said: when none was active, all
        only stood in.
        """
        if self.ledger.total and not trouble:  # weighed passes that were not averaged yet
            self._owing = True
            try:
                self.sync()
            finally:
                self._owing = False
            return self.told
        if self.alone:
            return None
        held = [None if param.grad is None else param.grad.clone() for param in self.params]
        for param in self.params:
            param.grad = None
        self.stands_in = True
        explicit, self.ledger.explicit = self.ledger.explicit, None
        try:
            with torch.no_grad():
                if self._pass is None:
                    self._enter()
                self._running.trouble = trouble
                self.finish()
        finally:
            self.stands_in, self.ledger.explicit = False, explicit
            for param, grad in zip(self.params, () if take else held, strict=not take):
                param.grad = grad
        return self.told


def _nothing() -> None:
    """A reference to what is no more."""


class _Ending:
    """Called at the end of a backward pass; the engine drops it when the pass fails."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        with torch.no_grad():
            self._reducer.end_of_backward()
