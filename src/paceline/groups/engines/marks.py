"""DeviceMarks: how far a GPU has come with the calls of a group that were handed to it.

A call on a GPU returns when it is in the queue. Two events say more: one that comes before the
latest call, and one that comes behind it. They are used again for each call, and cost about a
microsecond (some 50 where ranks share a GPU under MPS); nobody asks about them unless a call takes
too long.
"""

from __future__ import annotations

from functools import cached_property

import torch


class DeviceMarks:
    """The marks of one engine's latest call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device  # which need not be the current one
        self._has_before = self._has_behind = False

    @cached_property
    def _before(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    @cached_property
    def _behind(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def comes(self) -> None:
        """A call is handed to the device next."""
        self._has_behind = False
        self._has_before = not torch.cuda.is_current_stream_capturing()
        if self._has_before:
            self._before.record(torch.cuda.current_stream(self._device))

    def came(self) -> None:
        """It was handed over, and whatever comes next waits for it."""
        self._has_behind = self._has_before and not torch.cuda.is_current_stream_capturing()
        if self._has_behind:
            self._behind.record(torch.cuda.current_stream(self._device))

    def is_reached(self) -> bool:
        """Whether the device is done with what was there before the call, as far as is known."""
        return not self._has_before or self._before.query()

    def is_completed(self) -> bool:
        """Whether it is done with the call, as far as is known."""
        return not self._has_behind or self._behind.query()
