"""How many descriptors this process has open, and how many of them stay."""

from __future__ import annotations

import os

from tests.waiting import until


def open_files() -> int:
    """Descriptors that are open now."""
    return len(os.listdir("/proc/self/fd"))


def still_open(before: int) -> int:
    """Descriptors that stay open, beyond those there were before."""
    until(lambda: open_files() <= before)  # what answers other ranks may end after its group
    return max(0, open_files() - before)
