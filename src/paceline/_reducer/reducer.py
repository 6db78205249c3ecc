"""Reducer: averages the gradients of one rank's model with the other ranks', during backward.

**A pass.** A backward pass begins for us when a gradient reaches an output of the model, or the
first parameter that has a hook, if a forward through the wrapper came before (``expected.py``).
From then on gradients are taken into buckets as they arrive, and
full buckets are sent off in the order of their index, the same on all ranks. The last bucket always
waits for the end of the pass; then whatever is missing is filled with zeros, the header is written
(``header.py``), and all is awaited. So every pass of every rank consists of the same collectives,
whichever parameters its graph reached: no flag has to say so beforehand.

**What is right does not depend on hooks.** A gradient is whatever ``.grad`` holds when the pass
ends; hooks only let buckets leave earlier. ``.grad`` is linear in everything: a gradient that was
accumulated before, averaged or not, is averaged again with the new one, and the result is right.

**Learning.** In the first pass every parameter tells of its arrival (``listeners.py``). The order
on rank 0 becomes the plan of all ranks (``layout.py``). When a gradient comes after its bucket has
left (a graph that changed, a weight used again in a reentrant checkpoint), all ranks learn of it
through the header, exchange what came late, and learn anew.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import Work as TorchWork

from ..errors import LateGradientError, PacelineError, PeerError, UnweighableError
from ..groups import FINISHED, Group, ReduceOp
from ..policies import Reduction
from . import header
from .bucket import Bucket, Hook, Phase
from .diary import Diary
from .expected import Expected
from .handed import Handed
from .header import Header, Mailbox, Said
from .layout import Layout, agreed_order
from .listeners import Listeners
from .observers import Observers
from .passes import Pass, Role
from .shards import ShardedGradients
from .summary import ReducerSummary
from .tensors import divide, local
from .unused import Picture
from .weights import Ledger


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
        heeds: Callable[[], bool] = lambda: False,
        hooks: bool = True,
        before: Reducer | None = None,
    ) -> None:
        """``wanted``: whether the pass that begins is averaged. ``heeds``: whether somebody acts on
        what ranks say in a pass before the next one. Without ``hooks`` a pass begins when
        :meth:`begin` is called. ``before`` is the one whose :meth:`successor` this is.
        """
        self.params = tuple(params)
        self.names = tuple(names)
        self.group = group
        self.layout = Layout(params, sparse, policy)
        self.picture = Picture(names)
        self.ledger: Ledger = Ledger() if before is None else before.ledger
        self.expected: Expected = Expected() if before is None else before.expected
        self.observers: Observers = Observers() if before is None else before.observers
        self.listeners = Listeners(self)
        self.handed = Handed(self)
        self.diary = Diary(group, _weakly(self.names_in))
        self.hook: Hook | None = None
        self.by_active = False  # a plain mean is one over the ranks that are active
        self.told: Header | None = None  # what the ranks said in the last pass
        self.passes = 0
        self.error = ""  # what went wrong last
        self.latest: Pass | None = None  # the pass that runs, or failed halfway
        self._wanted, self._heeds, self._hooks = wanted, heeds, hooks
        self._mailbox = Mailbox()
        self._ending: Callable[[], object] = _nothing  # of the backward that runs, while it does
        self._task = -1  # torch's number of it
        self.handed_task = -1  # of one whose gradients a graph has handed over (handed.py)
        self._kept_here = False  # gradients came that are not to be averaged yet
        self.learning = False
        self._retired = False
        self.prompt = True  # all calls of a pass are made in one order, before anything is awaited
        if not self.alone:
            self._learn()

    @property
    def policy(self) -> Reduction:
        """How gradients are averaged."""
        return self.layout.policy

    def make_static(self) -> None:
        """From now on a graph that changes is an error."""
        self.layout.policy = replace(self.policy, static_graph=True)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to average with, and nobody who wants to see gradients."""
        if not self.params:
            return True
        seen = self.hook is not None or self.layout.sharded or self.observers.see_gradients
        nobody = self.group.size() == 1 and not seen
        return nobody and not self.policy.alone and not self.ledger.weighs

    @property
    def on_cpu(self) -> bool:
        """Whether the results can be read without stopping a device."""
        return bool(self.params) and self.params[0].device.type == "cpu"

    @property
    def reads_late(self) -> bool:
        """Whether reading what ranks said would stop a device, so that it is done a pass later."""
        late = self.policy.reads_late
        return not self.on_cpu if late is None else late

    def read_late(self) -> None:
        """From now on do as on a device, wherever the gradients are."""
        self.layout.policy = replace(self.policy, reads_late=True)

    def names_in(self, bucket: int) -> list[str]:
        """The parameters of a bucket."""
        buckets = self.layout.buckets
        found = buckets[bucket].numbers if 0 <= bucket < len(buckets) else ()
        return [self.names[number] for number in found]

    # -- what the listeners tell --------------------------------------------------------------

    def _learn(self) -> None:
        self.learning = True
        if self._hooks:
            self.listeners.learn()

    def note_arrival(self, number: int) -> None:
        """While learning: a gradient has come."""
        running = self.running
        running.arrival.append(number)
        if self.policy.strict:
            self._note_strictly(running, number)
        running.touched.add(number)

    def _note_strictly(self, running: Pass, number: int) -> None:
        """torch marks a parameter ready once, and with its flag not inside a nested backward."""
        nested = self.policy.find_unused and self._task != torch._C._current_graph_task_id()
        if nested or number in running.touched:
            running.again.add(number)

    def take_at_once(self, number: int) -> None:
        """Give the memory of a gradient back; if it comes again in this pass, it comes late."""
        place = self.layout.place.get(number)
        if place is not None:
            bucket, slot = self.layout.buckets[place[0]], place[1]
            if bucket.phase is Phase.FILLING and slot not in bucket.taken:
                with torch.no_grad():
                    self.take(bucket, [slot])

    def act(self, index: int, slot: int | None, *, completes: bool) -> None:
        """Take a large gradient, if ``slot`` says so, and send off what is complete now."""
        bucket = self.layout.buckets[index]
        with torch.no_grad():
            if slot is not None and bucket.phase is Phase.FILLING:
                self.take(bucket, [slot])
            if completes:
                self.advance()

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
        if self._hooks and not self.listeners:  # it was alone until there were weights
            self._learn()
        if self.ledger.open:  # of a backward pass that failed
            self.ledger.cancel(self.params)
        if self.ledger.weighs:
            self.ledger.begin(self.params)

    def _await_end(self) -> None:
        ending = _Ending(self)
        self._task = torch._C._current_graph_task_id()
        self._ending = weakref.ref(ending)
        self.diary.backward_begins()
        Variable._execution_engine.queue_callback(ending)

    def end_with_backward(self, *, keeps: bool = False) -> None:
        """Finish the pass of a graph when the backward pass around it ends, not before.

        Gradients may still come to parameters from outside the graph. ``keeps``: those of this pass
        are not averaged yet.
        """
        self.handed_task = torch._C._current_graph_task_id()
        self._kept_here = self._kept_here or keeps
        if self._ending() is None:
            if self.ledger.open:  # of a backward pass that failed
                self.ledger.cancel(self.params)
            self._await_end()

    def retire(self) -> None:
        """Never average again; another reducer may take the parameters over."""
        self.listeners.remove()
        self._retired = True

    # -- a pass -------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Enter the backward pass that runs now; False when it is not to be averaged."""
        if self._in_pass():
            return True
        if self._retired or self.alone:
            return False
        if self.handed_task != -1 and self.handed_task == torch._C._current_graph_task_id():
            return False  # a parameter that a graph used is visited too, with no gradient
        if self.expected.nothing and self._ending() is None:
            return False  # no forward of the wrapper: gradients stay this rank's own
        if self.ledger.weighs and not self.ledger.open:
            raise UnweighableError(self.group.rank())
        if not self._wanted():
            self._kept_here = self._ending() is not None
            self.expected.gradients_came((), at_once=True)
            return False
        self.make_good()
        if self._ending() is None:
            self._await_end()
        self.enter(Role.ACTIVE, answers=True).ending = self._ending
        return True

    def end_of_backward(self) -> None:
        """What is left to do when all gradients have come."""
        self._ending = _nothing
        kept_here, self._kept_here = self._kept_here, False
        if self.latest is not None:
            self.finish()
            return
        if self.ledger.open and kept_here:
            self.ledger.end(self.params)
        elif self.ledger.open:
            self.ledger.cancel(self.params)
        elif kept_here:
            self.ledger.plain += 1
        if kept_here:
            self.diary.ends()

    def _in_pass(self) -> bool:
        return self.latest is not None and self.latest.ending() is not None

    def make_good(self) -> None:
        """If a backward pass failed halfway, end it: the other ranks still wait for the rest."""
        if self.latest is not None:
            with contextlib.suppress(PacelineError):
                self.stand_in(trouble="its backward pass failed halfway")

    def enter(self, role: Role, *, answers: bool = False) -> Pass:
        """Begin a pass in which this rank has that part; ``answers``: a forward, with gradients."""
        self.settle_plan()
        if self._ending() is None:
            self.diary.backward_begins()
        if self.learning and (self.hook is not None or self.layout.narrow):
            self._agree_on_unit()
        if self.ledger.weighs and not self.ledger.open:
            self.ledger.begin(self.params)
        self.latest = Pass(role, answers)
        self.latest.overdue = self._hear_earlier()
        return self.latest

    def _hear_earlier(self) -> bool:
        """Read what the pass before kept; whether it says that a rank could not go on.

        Weights change their unit only here where headers are read late: all ranks have it by now.
        """
        earlier = self._mailbox.earlier(self.group.size())
        if earlier is None:
            return False
        failed = earlier.trouble or earlier.late
        if earlier.weighed and not failed:
            self.ledger.choose_unit(earlier.weight)
        return failed

    def hear(self) -> None:
        """Raise if a rank could not go on in the last pass and this is not known; may wait.

        Between two passes, where something depends on what the last one left.
        """
        if self._hear_earlier():
            raise PeerError(self.group.rank(), {}, "in the last pass")

    @property
    def unheard(self) -> Callable[[], None]:
        """:meth:`hear` for somebody who outlives this reducer and keeps none of its memory."""
        mailbox, group = self._mailbox, self.group

        def hear() -> None:
            earlier = mailbox.earlier(group.size())
            if earlier is not None and (earlier.trouble or earlier.late):
                raise PeerError(group.rank(), {}, "in the last pass")

        return hear

    def _agree_on_unit(self) -> None:
        most = torch.tensor([self.ledger.weight], device=self.params[0].device)
        self.group.all_reduce(most, ReduceOp.MAX)
        self.ledger.unit = 1.0
        self.ledger.choose_unit(float(most))

    @property
    def running(self) -> Pass:
        """The pass that runs; there is one."""
        assert self.latest is not None
        return self.latest

    @property
    def _native(self) -> bool:
        """Whether the group divides by the number of ranks."""
        return self.group.capabilities.averages and self.group.size() > 1

    @property
    def _scale(self) -> float:
        """What gradients are multiplied by on the way in."""
        unit = 1 / self.ledger.unit
        return unit if self.hook is not None or self._native else unit / self.group.size()

    @property
    def _op(self) -> ReduceOp.RedOpType:
        return ReduceOp.AVG if self._native else ReduceOp.SUM

    @property
    def _quiet(self) -> bool:
        """Where every core computes, a thread that moves buckets along would only take one away."""
        return self.group.capabilities.quiet_starts and self.group.size() >= (os.cpu_count() or 1)

    def advance(self) -> None:
        """Send off full buckets whose turn it is, except the last one."""
        running, buckets = self.running, self.layout.buckets
        while running.next < len(buckets) - 1 and self._is_full(buckets[running.next]):
            self._launch(buckets[running.next])
        if running.next:
            self.group.progress()
            self.diary.looks(buckets)

    def _is_full(self, bucket: Bucket) -> bool:
        touched = self.running.touched
        missing = [number for number in bucket.numbers if number not in touched]
        return not missing or (not self.reads_late and self.picture.unused.issuperset(missing))

    def take(self, bucket: Bucket, slots: Sequence[int]) -> None:
        """Move these gradients in, weighed if they are to be."""
        if self.ledger.open and self.running.role is not Role.STANDING_IN:
            for slot in slots:
                self.ledger.fold(bucket.numbers[slot], bucket.params[slot])
        bucket.take(slots, self._scale)

    def _take_rest(self, bucket: Bucket) -> None:
        running = self.running
        slots = bucket.missing()
        for slot in slots:
            number = bucket.numbers[slot]
            if number not in running.touched and bucket.params[slot].grad is not None:
                running.idle.add(number)
        self.take(bucket, slots)

    def _launch(self, bucket: Bucket) -> None:
        running = self.running
        self.diary.fills(bucket)
        self._take_rest(bucket)
        self.diary.launches(bucket)
        running.first_launch = running.first_launch or time.perf_counter_ns()
        if self.hook is None:
            bucket.launch(self.group, average=self._native, quiet=self._quiet)
        else:
            weight = 0.0 if running.role is Role.STANDING_IN else self.ledger.owed()
            last = bucket is self.layout.buckets[-1]
            with self._noting_failure():
                bucket.launch_hook(self.hook, last=last, weight=weight)
        self.diary.launched()
        running.next += 1

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """What a hook raises waits for the end of the pass: the other ranks are to hear of it."""
        try:
            yield
        except Exception as error:
            if self.hook is None:
                raise
            self.running.fail(error, f"{type(error).__name__} in its hook: {error}")

    # -- its end ------------------------------------------------------------------------------

    def finish(self, *, tell_end: bool = True) -> None:
        """Complete the pass: all ranks have the averages when it returns.

        Without ``tell_end`` the caller tells observers of its end.
        """
        running = self.running
        running.ended = time.perf_counter_ns()
        try:
            self.told = self._exchange()
            self._divide(self.told)
            self._refuse_overdue()
            self._refuse_trouble(self.told)
            self._hand_out(self.told)
            self._settle_weights(self.told)
            self._draw_conclusions(self.told)
            self._tell_others(tell_end)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self.diary.ends()
            for bucket in self.layout.buckets:
                bucket.reset()
            self.latest = None
            self.passes += 1

    def _tell_others(self, tell_end: bool) -> None:
        running = self.running
        running.finished = time.perf_counter_ns()
        self.observers.tell_buckets(self.layout.buckets)
        if tell_end:
            self.observers.tell_end(running)
        self.observers.tell_averages()

    def _give_up(self, error: BaseException) -> None:
        """Nobody can say what the gradients are now; what is under way must not write any more."""
        self.error = str(error)
        self.expected.gradients_came((), at_once=True)
        for bucket in self.layout.buckets:
            bucket.abandon()
        self.ledger.forget()
        for param in self.params:
            param.grad = None
        self.observers.tell_failure()

    def _exchange(self) -> Header | None:
        """Send what is left, wait for all of it, and read what the ranks said."""
        running, buckets = self.running, self.layout.buckets
        while running.next < len(buckets) - 1:
            self._launch(buckets[running.next])
        self._take_rest(buckets[-1])
        self._look_around()
        memory, rides = self._header_memory(buckets[-1])
        work: TorchWork = FINISHED
        if rides or self.prompt:
            self._write_header(memory)
        if self.prompt and not rides:
            work = self.group.start_all_reduce(memory, self._op, quiet=self._quiet)
        self._launch(buckets[-1])
        for bucket in buckets:
            with self._noting_failure():
                self.diary.wait(bucket)
        if not rides and not self.prompt:
            self._write_header(memory)
            work = self.group.start_all_reduce(memory, self._op, quiet=self._quiet)
        self.diary.wait_for(work)
        return self._read_header(memory)

    def _look_around(self) -> None:
        """Note what is absent and what came late, and whether that is allowed."""
        running = self.running
        for bucket in self.layout.buckets:
            running.absent.update(bucket.numbers[slot] for slot in bucket.absent)
            for number, param in zip(bucket.numbers, bucket.params, strict=True):
                if param.grad is not None:
                    running.late[number], param.grad = param.grad, None
        running.absent.difference_update(running.late)
        running.idle.difference_update(running.late)
        if running.role is Role.STANDING_IN or running.trouble:
            return
        rank = self.group.rank()
        error = self.picture.objection(rank, running.missed, running.again, self.policy)
        if error is None and running.late and not self._listens:
            error = LateGradientError(rank, self.picture.named(running.late))
        if error is not None:
            running.fail(error)

    # -- the header ---------------------------------------------------------------------------

    @property
    def _listens(self) -> bool:
        """Whether all ranks read the header in the pass it belongs to."""
        return not self.reads_late or self.learning or self.layout.sharded

    def _header_memory(self, last: Bucket) -> tuple[Tensor, bool]:
        size = header.length(self.group.size(), len(self.params))
        if self._header_rides and self.layout.carries_header(last.numbers):
            return last.buffer[-size:], True
        device = self.params[0].device
        return torch.empty(size, dtype=torch.float64, device=device), False

    @property
    def _header_rides(self) -> bool:
        return self.hook is None

    def _write_header(self, memory: Tensor) -> None:
        running = self.running
        gives = running.role is not Role.STANDING_IN
        said = Said(
            active=self.group.rank() if gives else None,
            weight=self.ledger.owed() if gives else 0.0,
            trouble=bool(running.trouble),
            late=bool(running.late),
            weighed=self.ledger.counts and gives,
            owing=running.role is Role.OWING,
            absent=running.absent,
            idle=running.idle,
        )
        scale = 1.0 if self._native else 1 / self.group.size()
        self._mailbox.write(memory, said, scale, self.group.size())

    def _read_header(self, memory: Tensor) -> Header | None:
        """What the ranks said; None while a device has not got that far and nothing hangs on it.

        Then :meth:`_hear_earlier` has it a pass later. Until then it counts all the same: means are
        divided on the device.
        """
        running = self.running
        if self._listens:
            return Header.read(memory, self.group.size())
        running.header = memory
        self._mailbox.keep(memory)
        special = running.absent or running.late or running.trouble
        if special or self.observers.see_buckets or self.by_active or self._heeds():
            return Header.read(memory, self.group.size())
        return None

    def _divide(self, told: Header | None) -> None:
        """The mean of ``w g`` over the mean of ``w``; of plain passes, that of the active ranks."""
        ranks, memory = self.group.size(), self.running.header
        if memory is not None:
            divisor = header.divisor(memory, ranks, by_active=self.by_active)
            divide([bucket.means for bucket in self.layout.buckets], divisor)
        if memory is not None or told is None or not (told.weighed or self.by_active):
            return
        weight = told.weight if told.weighed else len(told.active_ranks()) / ranks
        if weight not in (0.0, 1.0):
            for bucket in self.layout.buckets:
                bucket.means.div_(weight)
            self.running.divisor = weight

    def _refuse_overdue(self) -> None:
        """Raise what was not known in the pass before; not earlier, so that this one is whole."""
        if self.running.overdue:
            raise PeerError(self.group.rank(), {}, "in the pass before this one")

    def _refuse_trouble(self, told: Header | None) -> None:
        """When a rank said that it cannot go on, raise what it says on every rank."""
        if told is None or not told.trouble:
            if self.running.failure is not None:  # the header had left before
                raise self.running.failure
            return
        mine = self.running.trouble
        self._mailbox.forget()
        said = self.group.all_gather_object(mine) if self._listens else []
        if self.running.failure is not None:
            raise self.running.failure
        messages = {rank: str(text) for rank, text in enumerate(said) if text}
        raise PeerError(self.group.rank(), messages)

    def _hand_out(self, told: Header | None) -> None:
        absent = self.running.absent
        for bucket in self.layout.buckets:
            for slot, number in enumerate(bucket.numbers):
                if number in absent and (told is None or not told.present(number)):
                    bucket.withhold(slot)
                else:
                    bucket.give_back(slot)
        if told is not None and told.late:
            self._add_late(self.running.late)
        for bucket in self.layout.buckets:
            bucket.conclude()

    def _add_late(self, late: dict[int, Tensor]) -> None:
        """Reduce what came after its bucket had left, and add it; every rank takes part."""
        numbers = torch.zeros(len(self.params), dtype=torch.uint8, device=self.params[0].device)
        numbers[list(late)] = 1
        self.group.all_reduce(numbers, ReduceOp.MAX)
        scale = 1.0 if self._native else 1 / self.group.size()
        weight, place = self.ledger.weight / self.ledger.unit, self.layout.place
        for number in numbers.nonzero().flatten().tolist():
            total = torch.zeros_like(local(self.params[number]))
            if number in late:
                total.add_(local(late[number]), alpha=scale * weight)
            self.group.all_reduce(total, self._op)
            bucket, slot = place[number]
            self.layout.buckets[bucket].add(slot, total.div_(self.running.divisor))

    def _settle_weights(self, told: Header | None) -> None:
        if told is not None and told.weighed and self._listens:
            self.ledger.choose_unit(told.weight)
        if self.running.role is Role.STANDING_IN:
            return
        self.ledger.plain = 0
        if self.ledger.open:
            self.ledger.settle(self.params)

    def _draw_conclusions(self, told: Header | None) -> None:
        running = self.running
        self.picture.count(told, self.group.size())
        if running.role is not Role.STANDING_IN:
            self.picture.conclude(running.missed, self.policy)
        if running.answers:
            self._note_answer(running.missed, told)
        if self.learning:
            self.make_plan(running.arrival, told)
        elif running.late or (told is not None and told.late):
            self._learn()
        elif running.arrival:
            self.listeners.act_on_few(running.arrival)

    def _note_answer(self, missed: Collection[int], told: Header | None) -> None:
        """Has this pass answered the forward? All ranks agree: what none reached is the same."""
        unreached = [number for number in missed if not self.picture.used[number]]
        self.expected.gradients_came(unreached, at_once=told is None or self.policy.find_unused)

    # -- plans --------------------------------------------------------------------------------

    def make_plan(self, arrival: Sequence[int], told: Header | None) -> None:
        """Agree on a plan in the order in which gradients arrived on rank 0."""
        if self.layout.rebuilds:
            device = self.params[0].device
            self.layout.follow(agreed_order(self.group, arrival, len(self.params), device))
        if self.policy.skip_unused and told is not None and not self.layout.sharded:
            self.layout.keep_only(told.present)
        if arrival:  # a rank that had no work listens on, to know its own order
            self.listeners.act_on_few(arrival)
        self.learning = False

    def settle_plan(self) -> bool:
        """Lay the buckets out as planned, if they are not."""
        return not self.alone and self.layout.settle(self.group, header_rides=self._header_rides)

    def move_to(self, group: Group) -> None:
        """Go on in another group; every one of its ranks does so at the same time."""
        self.group = group
        before, self.diary = self.diary, Diary(group, _weakly(self.names_in))
        self.diary.continue_from(before)
        self.forget_plan()

    def forget_plan(self) -> None:
        """Begin anew, as in the first pass; every rank does so at the same time."""
        self.layout.forget()
        self.picture.forget()
        self.latest = None
        self._mailbox.reset()
        self.ledger.unit = 1.0  # whoever joins knows of no other
        self.listeners.remove()  # they know buckets that are gone
        if not self.alone:
            self._learn()

    def set_hook(self, hook: Hook, *, prompt: bool) -> None:
        """Let ``hook`` average buckets from now on; every rank does so at the same time.

        ``prompt``: it makes its collectives before it returns, so that the header can travel beside
        them. Another one may still send something when its future is waited for, and the header
        comes after all of that.
        """
        self.hook, self.prompt = hook, prompt
        self.layout.buckets = []
        if not self.alone:
            self._learn()

    def shard(self) -> ShardedGradients:
        """From now on keep this rank's stretch of each bucket; every rank does so."""
        if not self.layout.sharded:
            self.layout.shard()
            self.forget_plan()
        self.settle_plan()
        return ShardedGradients(self.layout, self.group)

    # -- passes without a backward ------------------------------------------------------------

    def sync(self, role: Role = Role.ACTIVE) -> None:
        """Average what ``.grad`` holds now, outside any backward pass."""
        if self.alone:
            return
        explicit = self.ledger.explicit
        if self.ledger.owes(self.params):  # nothing is added to what was gathered
            self.ledger.explicit = 0.0
        try:
            with torch.no_grad():
                self.enter(role)
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
        if (
            self.ledger.owes(self.params) and not trouble
        ):  # weighed passes that were not averaged yet
            self.sync(Role.OWING)
            return self.told
        if self.alone:
            return None
        held = [None if param.grad is None else param.grad.clone() for param in self.params]
        for param in self.params:
            param.grad = None
        explicit, self.ledger.explicit = self.ledger.explicit, None
        try:
            with torch.no_grad():
                running = self.latest or self.enter(Role.STANDING_IN)
                running.role, running.trouble = Role.STANDING_IN, trouble
                self.finish()
        finally:
            self.ledger.explicit = explicit
            for param, grad in zip(self.params, () if take else held, strict=not take):
                param.grad = grad
        return self.told

    # -- doors: what other folders use ----------------------------------------------------------

    @property
    def averages(self) -> bool:
        """Whether passes are averaged: there is somebody to average with, or who wants to see."""
        return not self.alone

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets as they are laid out now, in the order in which they leave."""
        return self.layout.buckets

    @property
    def sharded(self) -> bool:
        """Whether each rank keeps its stretch of each bucket only."""
        return self.layout.sharded

    @property
    def rebuilt(self) -> bool:
        """Whether the plan was made anew in the order in which gradients came."""
        return self.layout.rebuilt

    @property
    def expects_backward(self) -> bool:
        """Whether gradients that come now are averaged, even through no output of a forward."""
        return not self.expected.nothing

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
        """How many of the hooks that run behind a parameter's gradient are the reducer's own."""
        return 1 if self.listeners else 0

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

    def successor(
        self, params: Sequence[nn.Parameter], names: Sequence[str], sparse: Sequence[bool]
    ) -> Reducer:
        """A reducer for other parameters of the same model, which goes on where this one ends.

        Group, policy, hook, weights, observers and what is expected stay; the plan begins anew.
        Every rank calls it at the same time, and uses this one no more.
        """
        self.retire()
        heir = Reducer(
            params,
            names,
            self.group,
            self.policy,
            sparse=sparse,
            wanted=self._wanted,
            heeds=self._heeds,
            hooks=self._hooks,
            before=self,
        )
        heir.by_active = self.by_active
        heir.diary.continue_from(self.diary)
        if self.hook is not None:
            heir.set_hook(self.hook, prompt=self.prompt)
        return heir

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
        self._watch_all(outputs)

    def forward_failed(self) -> None:
        """No backward pass follows the forward that ran."""
        self.expected.forward_ends(averaged=False)

    def expect_backward(self, outputs: Iterable[Tensor]) -> None:
        """Average the next backward pass, as if a forward had ended now with ``outputs``."""
        self.expected.expect_next()
        self._watch_all(outputs)

    def expect_no_backward(self) -> None:
        """Average no backward pass before the next forward has ended."""
        self.expected.reset()

    def _watch_all(self, outputs: Iterable[Tensor]) -> None:
        for output in outputs:
            if output.grad_fn is not None:
                self.watch(output)

    def mean_over_active(self, wanted: bool) -> None:
        """Divide by the number of ranks that have inputs left, or again by that of all."""
        self.by_active = wanted

    def note_error(self, text: str) -> None:
        """Keep what went wrong, for torch's logging data."""
        self.error = text


def _weakly(method: Callable[[int], list[str]]) -> Callable[[int], list[str]]:
    """``method`` for one who must not keep its object alive; nothing, once that is gone."""
    held = weakref.WeakMethod(method)

    def call(argument: int) -> list[str]:
        living = held()
        return [] if living is None else living(argument)

    return call


def _nothing() -> None:
    """A reference to what is no more."""


class _Ending:
    """Called at the end of a backward pass; the engine drops it when the pass fails."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        with torch.no_grad():
            self._reducer.end_of_backward()
