"""How many descriptors this process has open, and how many of them stay."""

from __future__ import annotations

import os
import time

PATIENCE = 30.0  # seconds; what answers other ranks' questions may end after its group


def open_files() -> int:
    """Descriptors that are open now."""
    return len(os.listdir("/proc/self/fd"))


def still_open(before: int) -> int:
    """Descriptors that stay open, beyond those there were before."""
    end = time.monotonic() + PATIENCE
    while open_files() > before and time.monotonic() < end:
        time.sleep(0.01)
    return max(0, open_files() - before)
