"""Replays: a compiled step as one CUDA graph, captured once and started again for each batch.

Where the GPU is done with a step before Python has launched its kernels, a step takes as long as
the launching. A CUDA graph is launched by one call. What is captured is what the compiler made of a
whole step: forward, backward, the exchange (``_reducer/repeated.py``), clipping and the optimizer.

The graph stands behind Dynamo's guards, as a backend does that Dynamo calls: whatever makes Dynamo
compile anew (a module in another mode, another number in the loss) leads to another graph. What a
graph is given lies in memory that stays where it is: parameters, buffers, the optimizer's state and
the buckets do so anyway, and are checked; everything else is copied there before each replay, and
back if the step writes it. Random numbers go on from replay to replay, since torch counts them for
each.

A step that a graph cannot be, or not now, is done without; the other ranks notice nothing.
"""

from __future__ import annotations

import logging
import statistics
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .._reducer import RepeatedExchange, is_usual, obstacle_to_replays
from .._torch.capture import end_failed_capture
from .._torch.effects import Effects, effects_of, kept_copy
from ..errors import NotCapturedError
from .binding import Binding
from .module_hooks import PassageGate
from .wire import Wire

log = logging.getLogger("paceline.compiled")

WARM_UP = 3  # steps without a graph before the first with one; the last of them are timed
TRIAL = 4  # replays that are timed, where the graph has to show that it pays
PAYS = 0.95  # it does if a replay takes less of a step without
GRAPHS = 4  # kept for each program: one for each shape of a batch, the latest used
IN_USE = 32  # a graph that was replayed in so many of the last steps makes room for no other
SHAPES = 256  # of batches that are counted; then counting begins anew

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Captured:
    """What a function did on the GPU, to be done again."""

    start: Callable[[], None]
    results: Any  # where they are after each start
    end: Callable[[], None]  # gives back what it holds


Capture = Callable[[Callable[[], Any]], Captured]
_PATIENCE = 1.0  # seconds for a start that is being made, before a graph ends


class Replays:
    """The graphs of one step."""

    def __init__(
        self, wire: Wire, binding: Binding, *, asked: bool, capture: Capture | None = None
    ) -> None:
        self.wire, self.binding, self.asked = wire, binding, asked
        self.device = wire.reducer.params[0].device
        self.capture = capture or CudaCapture(self.device)
        self.count = 0  # steps that were replays
        self.reason = ""  # why there are none
        self._now = False  # the step that comes may be one
        self._replayers: weakref.WeakSet[Replayer] = weakref.WeakSet()
        wire.reducer.group.before_end(_call_while_alive(self, Replays.drop))

    def prepare(self) -> None:
        """Look whether the step that comes may be a replay."""
        reducer = self.wire.reducer
        if not self.reason:
            self._refuse(obstacle_to_replays(reducer))
        self._now = not self.reason and is_usual(reducer)

    def _refuse(self, reason: str) -> None:
        if reason and self.asked:
            raise NotCapturedError(self.wire.rank, reason)
        self.give_up(reason)

    def give_up(self, reason: str) -> None:
        """Replay nothing from now on, if there is a reason."""
        self.reason = reason
        if reason:
            log.info("rank %d: train_step: no CUDA graph: %s", self.wire.rank, reason)

    def backend(self, compiler: Callable[..., Compiled]) -> Callable[..., Compiled]:
        """What Dynamo is given instead of ``compiler``."""

        def compile_(graph: Any, inputs: Any) -> Compiled:
            kept = kept_copy(graph)
            replayer = Replayer(self, compiler(graph, inputs), kept)
            self._replayers.add(replayer)
            return replayer

        return compile_

    def drop(self) -> None:
        """End all graphs: NCCL's collectives in them keep the group's engine from ending."""
        for replayer in list(self._replayers):
            replayer.drop()

    @property
    def now(self) -> bool:
        """Whether the step that runs may be a replay."""
        return self._now and not self.reason

    def is_weighted(self) -> bool:
        """Whether this rank's gradients count by a weight."""
        ledger = self.wire.reducer.ledger
        return ledger.weighs or ledger.unit != 1.0

    def refused(self, error: Exception) -> None:
        """A capture has failed, and random numbers may come from elsewhere than for the others."""
        self.drop()
        reason = error.reason if isinstance(error, NotCapturedError) else str(error)
        if self.asked:
            raise NotCapturedError(self.wire.rank, reason) from error
        self.give_up(reason)


class Replayer:
    """What one program of the compiler's became; called as the program is."""

    def __init__(self, owner: Replays, run: Compiled, traced: GraphModule) -> None:
        """``traced`` is what ``run`` was compiled from."""
        self._owner, self._run, self._traced = owner, run, traced
        self._effects: Effects | None = None  # of the program, once they are needed
        self._graphs: OrderedDict[object, StepGraph] = OrderedDict()  # by what is copied in
        self._runs: Counter[object] = Counter()
        self._trials: dict[object, Trial] = {}
        self._moved: dict[object, int] = {}  # the call in which a graph's memory was elsewhere
        self._calls = 0

    def __call__(self, *arguments: Any) -> Any:
        owner = self._owner
        if not owner.now:
            return self._run(*arguments)
        lasting = {t.data_ptr() for t in owner.binding.lasting()}
        key = (owner.is_weighted(), *(_key_of(given, lasting) for given in arguments))
        self._calls += 1
        if len(self._runs) > SHAPES:
            self._runs.clear()
            self._moved.clear()
            self._trials = {k: t for k, t in self._trials.items() if k in self._graphs}
        trial = self._trials.setdefault(key, Trial(owner.device))
        graph = self._graphs.get(key)
        if graph is None or not graph.fits(arguments):
            self._runs[key] += 1
            if self._runs[key] <= WARM_UP:
                return trial.time(trial.without, lambda: self._run(*arguments))
            if not (self._has_room() if graph is None else self._may_move(key)):
                return self._run(*arguments)
            graph = self._capture(key, arguments, lasting)
            if graph is None:
                return self._run(*arguments)
        self._graphs.move_to_end(key)
        graph.used = self._calls
        owner.count += 1
        if owner.asked:
            return graph.replay(arguments)
        results = trial.time(trial.replays, lambda: graph.replay(arguments))
        if reason := trial.objection():
            self.drop()
            owner.give_up(reason)
        return results

    def drop(self) -> None:
        """End all graphs; others are captured if they are needed."""
        while self._graphs:
            self._graphs.popitem()[1].end()

    def _may_move(self, key: object) -> bool:
        """Whether to capture anew what has moved: not if it moves all the time."""
        before = self._moved.get(key)
        if before is not None and self._calls - before <= IN_USE:
            return False
        self._moved[key] = self._calls
        return True

    def _has_room(self) -> bool:
        """Whether there is a place for another graph: to capture takes as long as many steps."""
        if len(self._graphs) < GRAPHS:
            return True
        return self._calls - next(iter(self._graphs.values())).used > IN_USE

    def _capture(
        self, key: object, arguments: Sequence[Any], lasting: set[int]
    ) -> StepGraph | None:
        if (outdated := self._graphs.pop(key, None)) is not None:
            outdated.end()
        while len(self._graphs) >= GRAPHS:
            self._graphs.popitem(last=False)[1].end()
        try:
            effects = self._find_effects(arguments)
            self._graphs[key] = StepGraph(self._owner, self._run, arguments, lasting, effects)
        except (NotCapturedError, RuntimeError) as error:
            self._owner.refused(error)
        return self._graphs.get(key)

    def _find_effects(self, arguments: Sequence[Any]) -> Effects:
        """What the program does beside its results, which a replay has to do too."""
        rank, device = self._owner.wire.rank, self._owner.device
        if any(isinstance(given, PassageGate) for given in arguments):
            raise NotCapturedError(rank, "a backward hook runs in Python")
        if self._effects is None:
            try:
                self._effects = effects_of(self._traced, arguments)
            except Exception as error:
                why = f"what it writes is not known ({type(error).__name__}: {error})"
                raise NotCapturedError(rank, why) from error
        for drawn_on in self._effects.drawn_on:
            if drawn_on.type != device.type:
                raise NotCapturedError(rank, f"it draws random numbers on {drawn_on}")
        return self._effects


def _key_of(given: Any, lasting: set[int]) -> object:
    if not isinstance(given, Tensor):
        return given
    if given.data_ptr() in lasting:
        return None
    return given.shape, given.stride(), given.dtype, given.device


class StepGraph:
    """One graph, and the memory that it reads its inputs from."""

    def __init__(
        self,
        owner: Replays,
        run: Compiled,
        arguments: Sequence[Any],
        lasting: set[int],
        effects: Effects,
    ) -> None:
        wire, self._rank = owner.wire, owner.wire.rank
        self.used = 0  # the call of the program for which it was last replayed
        self._exchange: RepeatedExchange | None = None
        if wire.reducer.averages:
            keep = owner.binding.layout is not None and owner.binding.layout.keep
            weighted = owner.is_weighted()
            self._exchange = RepeatedExchange(wire.reducer, weighted=weighted, keep=keep)
        self._given: list[Any] = [_own(given, lasting, wire) for given in arguments]
        self._lasts = [
            given is own and isinstance(given, Tensor)
            for given, own in zip(arguments, self._given, strict=True)
        ]
        self._places = self._places_of(arguments)
        self._copied = [
            at
            for at, own in enumerate(self._given)
            if isinstance(own, Tensor) and not self._lasts[at]
        ]
        self._written = [at for at in self._copied if at in effects.written]
        self._refuse_shared(arguments)
        self._lock = threading.Lock()  # another thread may end the group
        with wire.captured_into(self._exchange):
            self._captured = owner.capture(lambda: run(*self._given))
        self._ended = False

    def _refuse_shared(self, arguments: Sequence[Any]) -> None:
        """Copies of what shared memory do not share it."""
        storages = Counter(_storage_of(given) for given in arguments if isinstance(given, Tensor))
        if any(storages[_storage_of(arguments[at])] > 1 for at in self._written):
            raise NotCapturedError(self._rank, "it writes to memory that two of its inputs share")

    def _places_of(self, arguments: Sequence[Any]) -> list[int]:
        pairs = zip(arguments, self._lasts, strict=True)
        return [given.data_ptr() for given, lasts in pairs if lasts]

    def fits(self, arguments: Sequence[Any]) -> bool:
        """Whether all that should lie where it lay does so."""
        return self._places_of(arguments) == self._places

    def replay(self, arguments: Sequence[Any]) -> Any:
        """Do the step for these arguments; returns what the program would."""
        for at in self._copied:
            self._given[at].copy_(arguments[at], non_blocking=True)
        if self._exchange is not None:
            self._exchange.announce()
        with self._lock:
            if self._ended:
                raise NotCapturedError(self._rank, "its group ended meanwhile")
            self._captured.start()
        for at in self._written:
            with torch.inference_mode(arguments[at].is_inference()):
                arguments[at].copy_(self._given[at])
        found = self._captured.results
        results = [r.clone() if isinstance(r, Tensor) else r for r in found]
        if self._exchange is not None:
            self._exchange.conclude()
        return type(found)(results)

    def end(self) -> None:
        """Give back what the graph holds."""
        mine = self._lock.acquire(timeout=_PATIENCE)
        try:
            if mine and not self._ended:
                self._ended = True
                self._captured.end()
        finally:
            if mine:
                self._lock.release()


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own(given: Any, lasting: set[int], wire: Wire) -> Any:
    """Memory for an argument that changes from step to step; others as they are."""
    if not isinstance(given, Tensor) or given is wire.number:
        return given
    if given.device != wire.reducer.params[0].device:
        raise NotCapturedError(wire.rank, f"a tensor that the step reads is on {given.device}")
    if given.data_ptr() in lasting:
        return given
    if 0 in given.stride() and given.numel() > 1:
        raise NotCapturedError(wire.rank, "an input is an expanded tensor")
    own = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
    return own.copy_(given)


class CudaCapture:
    """Captures what a function does on a GPU; graphs that never run at once share memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # in that pool
        self.stream: torch.cuda.Stream | None = None  # that graphs are captured on

    def __call__(self, function: Callable[[], Any]) -> Captured:
        """What ``function`` does, captured."""
        with torch.cuda.device(self._device):
            return self._capture(function)

    def _capture(self, function: Callable[[], Any]) -> Captured:
        if not self._alive:  # torch has given up a pool whose last graph has ended
            self._pool = torch.cuda.graph_pool_handle()
        self.stream = self.stream or torch.cuda.Stream()
        graph, pool = torch.cuda.CUDAGraph(), self._pool
        # Threads of torch's may ask for events meanwhile.
        with (
            end_failed_capture(pool),
            torch.cuda.graph(
                graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"
            ),
        ):
            results = function()
        # Before it captures, torch sets on that stream how far random numbers have come: to zero.
        # The first replay sets it on this stream, and must not be overtaken.
        torch.cuda.current_stream().wait_stream(self.stream)
        self._alive.add(graph)

        def end() -> None:
            self._alive.discard(graph)
            graph.reset()

        return Captured(graph.replay, results, end)


Times = list[tuple[Any, Any]]  # events before and behind


@dataclass
class Trial:
    """Does a graph pay? Steps without and with it, timed on the GPU."""

    device: torch.device
    without: Times = field(default_factory=list)
    replays: Times = field(default_factory=list)

    def time(self, times: Times, step: Callable[[], Any]) -> Any:
        """Do it, and note how long it takes the GPU, until enough is known."""
        if len(times) >= TRIAL or not torch.cuda.is_available():
            return step()
        before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(torch.cuda.current_stream(self.device))
        result = step()
        behind.record(torch.cuda.current_stream(self.device))
        times.append((before, behind))
        return result

    def objection(self) -> str:
        """What speaks against the graph, once enough is known."""
        if len(self.replays) != TRIAL or len(self.without) < 2:
            return ""
        # The first of each are not counted: code is compiled, memory is cold.
        without, replay = (_median(times[1:]) for times in (self.without, self.replays))
        self.replays.append(self.replays[-1])  # asked once
        if replay < PAYS * without:
            return ""
        return f"a replay takes {replay:.1f} ms, a step without {without:.1f}"


def _call_while_alive(owner: Replays, method: Callable[[Replays], None]) -> Callable[[], None]:
    """``method`` of ``owner``, without keeping it alive."""
    known = weakref.ref(owner)

    def call() -> None:
        if (alive := known()) is not None:
            method(alive)

    return call


def _median(times: Times) -> float:
    times[-1][1].synchronize()
    return float(statistics.median(before.elapsed_time(behind) for before, behind in times))
