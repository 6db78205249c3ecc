"""Waiting for what comes by itself: another process ends, a thread does, a letter arrives."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 300.0  # seconds: far more than it takes, also on a busy machine


def until(condition: Callable[[], object]) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True
