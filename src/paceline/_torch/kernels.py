"""CUDA kernels of our own, compiled when they are first needed by the compiler torch brings along.

``torch.cuda._compile_kernel`` is NVRTC behind a Python function: no host compiler, no headers. A
public name would be ``torch.cuda.compile_kernel``, which its documentation mentions already.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Kernel(Protocol):
    """A compiled kernel; tensors are passed as pointers, ints as ``int``."""

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Any]
    ) -> None:
        """Launch it on the current stream of the current device."""


def compiled(source: str, name: str, device: torch.device) -> Kernel | None:
    """The kernel ``name`` for one device; None where there is no way to compile it."""
    if torch.version.cuda is None or not hasattr(torch.cuda, "_compile_kernel"):
        return None
    try:
        with torch.cuda.device(device):
            kernel: Kernel = torch.cuda._compile_kernel(source, name)
    except Exception:  # no NVRTC, a driver too old: there is a slower way
        logging.getLogger(__name__).debug("no kernel %s here", name, exc_info=True)
        return None
    return kernel
