"""The backward pass that runs on this thread, and the profiler around it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd import Variable

from . import patches
from .dynamo import never_trace

current_task = torch._C._current_graph_task_id
"""Which backward pass runs on this thread, a number; :data:`NO_TASK` when none does. Hooks are told
their gradient and nothing of the pass it belongs to."""

NO_TASK = -1
"""What :data:`current_task` says outside of any backward pass."""

is_profiling = torch.autograd._profiler_enabled
"""Whether a profiler listens on this thread: a range that nobody hears costs microseconds."""

keeping_versions = torch.autograd._unsafe_preserve_version_counter
"""A context in which tensors are written without autograd's noticing that saved ones have changed;
public code can only give a tensor other memory, which captured graphs do not follow."""


def call_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward pass that runs now has ended: no public hook tells of it.

    Spelled out, because Dynamo knows the call by these names when it traces a backward pass.
    """
    Variable._execution_engine.queue_callback(function)


# -- backward passes that fail ----------------------------------------------------------------

PATIENCE = 5.0  # seconds; what waits is let go of once a thread of autograd's gets its turn


class EndAwaiter(Protocol):
    """What autograd calls when a backward pass has ended, and lets go of when it fails."""

    def is_awaited(self) -> bool:
        """Whether the program must not go on before autograd has let go of it."""
        ...


@dataclass(eq=False)
class _BackwardCall:
    """A thread's call of a backward pass, and what waits for the pass to end."""

    thread: int = field(default_factory=threading.get_ident)
    waiting: list[weakref.ref[EndAwaiter]] = field(default_factory=list)

    def await_release(self) -> None:
        until = time.monotonic() + PATIENCE
        for reference in self.waiting:
            waiting = reference()
            if waiting is None or not waiting.is_awaited():
                continue
            released = threading.Event()
            weakref.finalize(waiting, released.set)
            del waiting  # it may end here
            released.wait(max(until - time.monotonic(), 0.0))


_calls: list[_BackwardCall] = []  # that have not returned


class _PatientBackward(torch._C._ImperativeEngine):
    """Raises the failure of a backward pass when all that waited for its end has heard of it."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = engine

    def run_backward(self, *arguments: Any, **options: Any) -> Any:
        if current_task() != NO_TASK:  # inside another one, which goes on
            return self._engine.run_backward(*arguments, **options)
        call = _BackwardCall()
        try:
            _calls.append(call)
            return self._engine.run_backward(*arguments, **options)
        except BaseException:
            call.await_release()
            raise
        finally:
            if call in _calls:  # an interrupt may come first
                _calls.remove(call)


def note_waiting(waiting: EndAwaiter) -> None:
    """A failure of the backward pass that runs now is raised after it was let go of ``waiting``.

    If :func:`wait_for_failures` was called before the pass. A thread of autograd's does not know
    which of several calls it works for: each of them waits. (What autograd hands to its threads,
    ``_stash_obj_in_tls``, loses count of references in torch 2.11.)
    """
    calls, here = list(_calls), threading.get_ident()
    for call in [call for call in calls if call.thread == here] or calls:
        call.waiting.append(weakref.ref(waiting))


def may_run_on_threads() -> bool:
    """Whether autograd may run passes on threads of its own, as it does for devices.

    What counts is that the process uses one, be it only for the loss, or for what a model computes
    between its parameters and its outputs.
    """
    device = torch.accelerator.current_accelerator()
    if device is None:
        return False
    is_used = getattr(getattr(torch, device.type, None), "is_initialized", None)
    return is_used is None or bool(is_used())


def wait_for_failures() -> None:
    """From now on a backward pass that fails raises when all know of it (:func:`note_waiting`).

    On a GPU a thread of autograd's runs the pass. It wakes the program's thread and lets go of
    the pass afterwards, when the program may have gone on already.
    """
    if isinstance(Variable._execution_engine, _PatientBackward):
        return
    never_trace(note_waiting)
    for method in (
        _PatientBackward.run_backward,
        _BackwardCall.__init__,
        _BackwardCall.await_release,
    ):
        never_trace(method, callees=False)  # what they call may be compiled autograd
    patches.put(Variable, "_execution_engine", _PatientBackward(Variable._execution_engine))


def end_with(record: Any, future: Any) -> None:
    """Let the range ``record`` of the profiler last until ``future`` is there."""
    record._call_end_callbacks_on_future(future)
