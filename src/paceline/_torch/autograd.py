"""The backward pass that runs on this thread, and the profiler around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

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


def end_with(record: Any, future: Any) -> None:
    """Let the range ``record`` of the profiler last until ``future`` is there."""
    record._call_end_callbacks_on_future(future)
