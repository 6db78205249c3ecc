"""Which backward passes are averaged: all of them, except inside ``no_sync``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import ModuleArgumentError


class AveragingSwitch:
    """The switch of one wrapper that ``no_sync`` and ``accumulate`` turn off and on."""

    def __init__(self) -> None:
        self.on = True
        self._left_out = False  # the last forward ran while it was off
        self._micro_steps = 0  # of accumulate, so far

    def now(self) -> bool:
        """Whether a backward pass that ran now is averaged; a forward in no_sync forbids it."""
        return self.on and not self._left_out

    def note_forward(self) -> None:
        """A forward begins, and speaks for its backward pass."""
        self._left_out = not self.on

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients as they are; the first pass outside averages all that gathered."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    @contextlib.contextmanager
    def accumulate(self, steps: int) -> Iterator[bool]:
        """One of ``steps`` micro-steps; gradients are averaged in every last one, which is True."""
        if steps < 1:
            raise ModuleArgumentError(f"accumulate: expected at least one step, got {steps}.")
        last = self._micro_steps % steps == steps - 1
        with contextlib.nullcontext() if last else self.no_sync():
            yield last
        self._micro_steps += 1

    def is_first_of(self, steps: int) -> bool:
        """Whether the next micro-step of :meth:`accumulate` is the first of ``steps``."""
        return self._micro_steps % steps == 0
