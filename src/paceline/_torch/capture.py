"""How a thread asks a GPU how far it is while another one captures a CUDA graph.

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
