"""Optimizers: what their other users are told."""

from __future__ import annotations

from torch.optim import Optimizer


def note_step(optimizer: Optimizer) -> None:
    """Let schedulers of the learning rate know that the optimizer has stepped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
