"""Captures of CUDA graphs: what other threads may ask meanwhile, and what is left of a failed one.

A capture in CUDA's strictest mode, which is torch's default, is spoilt by a thread that asks about
an event. A thread may say that it has no part in captures; torch's own watchdog does so, but there
is no name for it in Python. So the CUDA library that torch has loaded is called directly, but only
once torch uses a GPU in this process: before that there is nothing to capture, and the call would
start the driver, which crashes or hangs in a process that was forked from one with a driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import torch

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The CUDA runtime in this process, if there is one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if "/libcudart" in path:
                found = ctypes.CDLL(path)
                return found if hasattr(found, "cudaThreadExchangeStreamCaptureMode") else None
    return None


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """What this thread asks inside spoils no capture of another."""
    library = _library() if torch.cuda.is_initialized() else None
    if library is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # mode: what it was before
    try:
        yield
    finally:
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@contextlib.contextmanager
def end_failed_capture(pool: tuple[int, int]) -> Iterator[None]:
    """Within it the current device captures into ``pool``; if that fails, nothing is left of it.

    torch's own way out of a capture that CUDA has spoilt ends half way: the stream of the capture
    stays the current one, the allocator goes on to take memory for the graph, and, in some
    versions, the generator waits for a graph to give out numbers.
    """
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    generator = torch.cuda.default_generators[device]
    numbers = generator.clone_state()
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(stream)
        try:
            torch._C._cuda_endAllocateToPool(device, pool)
        except RuntimeError:  # torch has come to its end
            pass
        else:
            torch._C._cuda_releasePool(device, pool)
            generator.graphsafe_set_state(numbers)
        raise
