"""Work: a collective under way.

``wait`` has three duties besides waiting: it finishes what must happen on this side (a result
copied back into a strided tensor, an average divided), it lets the group's hooks know, and it
raises what went wrong. They happen once, in whichever thread sees the end first; on a device they
are in that thread's stream, and whoever waits on another stream has it wait for them
(``_torch/streams.py``).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future
from typing_extensions import Self

from .._torch.c10d import source_rank
from .._torch.streams import StreamMark, devices_holding, used_here
from ..errors import WaitTimeoutError
from ..recorder import events
from ..recorder.events import now

Finisher = Callable[[BaseException | None], object]


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """torch's timeouts in seconds; "none given" (zero or less) is None."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    return timeout if timeout is not None and timeout > 0 else None


_NO_TIMEOUT = timedelta(0)  # torch's word for it


def wait_for(work: TorchWork, seconds: float | None) -> bool:
    """Wait for any Work, ours or torch's, always with a timeout, as torch's C++ does.

    False when it took longer: it goes on, and can be waited for again.
    """
    try:
        work.wait(_NO_TIMEOUT if seconds is None else timedelta(seconds=seconds))
    except WaitTimeoutError:
        return False
    except RuntimeError as error:
        if seconds is not None and "Operation timed out!" in str(error):  # torch's word for it
            return False
        raise
    return True


class Work(TorchWork):
    """A collective that has been started; subclasses define how to wait for it."""

    # Of the class, since most works never get others: making a work must cost next to nothing.
    entry: events.Entry | None = None  # in the recorder
    _finishers: Sequence[Finisher] = ()
    _once: threading.Lock | None = None  # for whoever runs the finishers, if there are any
    _turn: threading.RLock | None = None  # for whoever waits, where only one may
    _room: Sequence[Tensor] = ()  # that finishers read
    _devices: Collection[torch.device] = ()  # where the results are
    _marks: Sequence[StreamMark] = ()  # behind what was done at the end
    tells = True  # the engine can be asked whether it is done; else a thread has to wait
    is_message = False  # nobody knows when it comes: a thread that waits for it does nothing else
    receives = False  # a message
    _is_awaited = False  # by such a thread
    _ended = False
    _error: BaseException | None = None

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        TorchWork.__init__(self)
        self._outputs = outputs

    def _block(self, seconds: float | None) -> bool:
        """Wait for the engine; False when it took longer. Raises what went wrong."""
        raise NotImplementedError

    def _poll(self) -> bool:
        """Whether :meth:`_block` would return or raise at once."""
        raise NotImplementedError

    def _watcher(self) -> Watcher:
        """The thread that completes futures of this work."""
        raise NotImplementedError

    def finally_do(self, finisher: Finisher) -> None:
        """Call ``finisher`` once when the work is complete, with its error or None.

        If there are several, they are called in the order in which they were added.
        """
        if self._once is None:
            self._once = threading.Lock()
        self._finishers = (*self._finishers, finisher)

    def then_do(self, action: Callable[[], object], *room: Tensor) -> Self:
        """Call ``action`` when the work has completed without an error.

        ``room`` is memory of ours that the engine or ``action`` uses.
        """

        def finish(error: BaseException | None) -> None:
            if error is None:
                with torch.no_grad():  # in whichever thread
                    action()

        self.finally_do(finish)
        return self.using(room)

    def using(self, room: Sequence[Tensor]) -> Self:
        """The engine uses ``room``, which nobody else has: a device may after we let go of it."""
        self._room = (*self._room, *room)
        return self

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the work is complete. After ``timeout`` it raises, and the work continues."""
        if not self._ended:
            self._come_to_the_end(None if timeout is None else seconds_of(timeout))
        if self._error is None:
            for mark in self._marks:
                mark.join()
            return True
        try:
            raise self._error
        finally:
            del self  # the error's traceback has this frame, and would hold what holds the error

    def _come_to_the_end(self, seconds: float | None) -> None:
        """Wait; an error of the work is kept and not raised."""
        if self._turn is None:
            self._wait(seconds)
        else:
            self._wait_in_turn(self._turn, seconds)

    def _wait_in_turn(self, turn: threading.RLock, seconds: float | None) -> None:
        """Wait, or wait for the thread that waits already.

        A message of gloo's is handed to one who waits for it; a second would wait for ever.
        """
        began = time.monotonic()
        if not turn.acquire(timeout=-1 if seconds is None else seconds):
            if self._ended:  # in this moment
                return
            raise WaitTimeoutError(seconds or 0.0)
        try:
            if not self._ended:
                spent = time.monotonic() - began
                self._wait(None if seconds is None else max(seconds - spent, 0.001))
        finally:
            turn.release()

    def _wait(self, seconds: float | None) -> None:
        try:
            over = self._block(seconds)
        except BaseException as error:
            if not self._owns(error):
                raise
            if self.entry is not None:
                events.failed(self.entry, error)
            self._end(error.with_traceback(None))  # whoever waits is in it when it is raised again
            self._let_go()
        else:
            if not over:
                raise WaitTimeoutError(seconds or 0.0)
            self._end(None)

    def _owns(self, error: BaseException) -> bool:
        """Whether the work failed with it; an interrupt ends the waiting, and the work goes on.

        Except if it does not tell: an interrupt comes when gloo has handed over a message, and who
        waits for it once more waits for ever.
        """
        return isinstance(error, Exception) or not self.tells

    def _let_go(self) -> None:
        """Hold nothing of an engine that has failed.

        Whoever catches the error may keep this work, and with it gloo's connections and threads.
        """

    def _end(self, error: BaseException | None) -> None:
        if self._once is None:  # then it is no matter who comes first
            if self._devices or self._room:
                self._finish(error)
            else:
                self._note_end(error)
                self._ended = True
            return
        with self._once:
            if not self._ended:
                self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        self._note_end(error)
        finishers, self._finishers = self._finishers, ()
        try:
            for finisher in finishers:
                finisher(error)
        except BaseException as raised:
            self._error = self._error or raised.with_traceback(None)
        try:
            self._mark_streams()
        except Exception as raised:  # of a device that has failed
            self._error = self._error or raised.with_traceback(None)
        finally:
            self._room = ()
            self._ended = True

    def _mark_streams(self) -> None:
        """Note behind what other streams have to wait, and that this one uses what we let go of."""
        used_here(self._room)
        if self._devices:
            self._marks = [StreamMark(device) for device in self._devices]

    def _note_end(self, error: BaseException | None) -> None:
        if self.entry is not None and not self.entry.finished:
            self.entry.finished = now()
        self._error = error

    def is_over(self) -> bool:
        """Whether waiting would take no time, as far as is known; does nothing about it."""
        return self._is_there() if self._ended else self._poll()

    def is_completed(self) -> bool:
        """Return whether the work is complete, so that the results can be read."""
        if not self._ended:
            if not self.tells:
                self._have_awaited()
            elif self._poll():  # asked once: it may be done a moment later
                self._come_to_the_end(None)  # whoever waits gets its error
        return self._ended and self._is_there()

    def _is_there(self) -> bool:
        """Whether devices have done what there was to do at the end."""
        return all(mark.is_reached() for mark in self._marks)

    def _is_around(self, *works: TorchWork) -> None:
        """It tells no more than ``works`` do."""
        if not all(getattr(work, "tells", True) for work in works):
            self.tells = False
        if any(getattr(work, "is_message", False) for work in works):
            self.is_message = True
        if any(getattr(work, "receives", False) for work in works):
            self.receives = True

    def be_on_its_device(self) -> None:
        """Let this thread be where the results are: callbacks of futures are there, too."""
        for device in self._devices:
            torch.cuda.set_device(device)

    def _have_awaited(self) -> None:
        """Let a thread wait for it, once."""
        if not self._is_awaited:
            self._is_awaited = True
            self._watcher().open(Future(), self)

    def is_success(self) -> bool:
        """Return whether the work has completed without an error."""
        return self._ended and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the work, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Wait for the work and return its output tensors."""
        self.wait()
        return list(self._outputs)

    def synchronize(self) -> None:
        """Wait for the work, without a timeout of its own."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank that sent the message."""
        return -1

    def _source_rank(self) -> int:  # the name torch calls; subclasses define the one above
        return self.source_rank()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the output tensors; a thread completes it, even if nobody waits."""
        # An exception set on a future from Python crashes C++ that waits for it (torch 2.13); one
        # that is raised in a callback arrives as an error.
        gate: Future[None] = Future(devices=list(self._devices))
        future: Future[list[Tensor]] = gate.then(lambda _: self.result())
        if self._ended:
            gate.set_result(None)
        else:
            self._watcher().open(gate, self)
        return future


class Finished(Work):
    """A call that was complete when it returned; for a received message it has the source rank."""

    _ended = True
    _source = -1

    def __init__(self, outputs: Sequence[Tensor] = (), source: int = -1) -> None:
        TorchWork.__init__(self)
        self._outputs = outputs
        if source >= 0:
            self._source = source

    def marked(self) -> Self:
        """What was done is in the current stream, and others that wait wait for it."""
        self._devices = devices_holding(self._outputs)
        self._mark_streams()
        return self

    def source_rank(self) -> int:
        return self._source


class Wrapped(Work):
    """Another engine's work, with duties of ours at its end."""

    def __init__(
        self,
        inner: TorchWork,
        outputs: Sequence[Tensor],
        watcher: Watcher,
        devices: Collection[torch.device] | None = None,
    ) -> None:
        super().__init__(outputs)
        self._devices = devices_holding(outputs) if devices is None else devices
        self._is_around(inner)
        self._inner = inner
        self._completer = watcher
        self._turn = threading.RLock()

    def _block(self, seconds: float | None) -> bool:
        return wait_for(self._inner, seconds)

    def _poll(self) -> bool:
        return events.is_over(self._inner)

    def _watcher(self) -> Watcher:
        return self._completer

    def _owns(self, error: BaseException) -> bool:
        return super()._owns(error) or _failed_with(self._inner, error)

    def _let_go(self) -> None:
        self._inner = FINISHED

    def source_rank(self) -> int:
        return int(source_rank(self._inner))


class Timed(Wrapped):
    """A torch work that could not be told its timeout, which counts from now.

    Such are messages of gloo's, and what is made of them; they never say that they have come.
    """

    tells = False

    def __init__(
        self, inner: TorchWork, outputs: Sequence[Tensor], watcher: Watcher, seconds: float
    ) -> None:
        super().__init__(inner, outputs, watcher)
        self._until = time.monotonic() + seconds

    def _block(self, seconds: float | None) -> bool:
        left = max(self._until - time.monotonic(), 0.001)
        return super()._block(left if seconds is None else min(left, seconds))


class Together(Work):
    """Several works as one."""

    def __init__(
        self,
        works: Sequence[TorchWork],
        outputs: Sequence[Tensor],
        watcher: Watcher,
        devices: Collection[torch.device] | None = None,
    ) -> None:
        super().__init__(outputs)
        self._devices = devices_holding(outputs) if devices is None else devices
        self._is_around(*works)
        self._works = works  # that nobody has seen ending
        self._completer = watcher
        self._turn = threading.RLock()

    def _block(self, seconds: float | None) -> bool:
        end = None if seconds is None else time.monotonic() + seconds
        while self._works:  # all of them, in the time for one
            left = None if end is None else max(end - time.monotonic(), 0.001)
            if not wait_for(self._works[0], left):
                return False
            self._works = self._works[1:]  # others may be looking at it
        return True

    def _poll(self) -> bool:
        return all(map(events.is_over, self._works))

    def _owns(self, error: BaseException) -> bool:
        return super()._owns(error) or any(_failed_with(work, error) for work in self._works)

    def _let_go(self) -> None:
        self._works = ()

    def _watcher(self) -> Watcher:
        return self._completer


def _failed_with(work: TorchWork, error: BaseException) -> bool:
    return isinstance(work, Work) and work.exception() is error


class Watcher:
    """A thread that waits for works whose futures somebody holds; started by the first one.

    Messages, and what is asked for in that thread itself, get threads of their own.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[None], Work] | None] | None = None
        self._thread: threading.Thread | None = None
        self._receiving: weakref.WeakSet[Work] = weakref.WeakSet()
        self._lock = threading.Lock()

    def open(self, gate: Future[None], work: Work) -> None:
        """Complete ``gate`` when ``work`` ends, well or badly."""
        own = threading.current_thread() is self._thread  # a callback that will wait for this
        if own or work.is_message:
            one: queue.SimpleQueue[tuple[Future[None], Work] | None] = queue.SimpleQueue()
            one.put((gate, work))
            one.put(None)
            if work.receives:
                with self._lock:
                    self._receiving.add(work)
            threading.Thread(target=self._serve, args=(one,), name=self._name, daemon=True).start()
            return
        with self._lock:
            if self._queue is None:
                self._queue = queue.SimpleQueue()
                # one that nobody closes, of a group that was dropped, ends with it
                weakref.finalize(self, self._queue.put, None).atexit = False
                self._thread = threading.Thread(
                    target=self._serve, args=(self._queue,), name=self._name, daemon=True
                )
                self._thread.start()
            self._queue.put((gate, work))

    @staticmethod
    def _serve(waiting: queue.SimpleQueue[tuple[Future[None], Work] | None]) -> None:
        while (item := waiting.get()) is not None:
            gate, work = item
            with contextlib.suppress(BaseException):  # the gate's callback raises it again
                work.be_on_its_device()
                work.wait()
            gate.set_result(None)
            del item, gate, work

    def waits_for_messages(self) -> bool:
        """Whether there are threads that wait for what may never come."""
        with self._lock:
            return not all(work._ended for work in self._receiving)

    def close(self) -> None:
        """Let the thread end after what it has."""
        with self._lock:
            if self._queue is not None:
                self._queue.put(None)
                self._queue = None


FINISHED = Finished()
