"""Gradients that no hook noticed: found before an optimizer uses them.

A backward pass is seen at the outputs of the wrapper's forward, and at some parameters. One that
comes by neither leaves gradients of this rank alone. A look at every ``optimizer.step()`` finds
them; it costs next to nothing unless a forward has been answered by no pass.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch.optim.optimizer import Optimizer

from .steps import look_before_steps, steps

if TYPE_CHECKING:
    from .reducer import Reducer


def guard(reducer: Reducer) -> None:
    """Look at the gradients of ``reducer`` whenever an optimizer is about to step."""
    look_before_steps(reducer, _look)


def _look(reducer: Reducer, optimizer: Optimizer) -> None:
    numbers = reducer.unseen()
    if not numbers:
        return
    # Ranks that are threads share this; each steps with an optimizer of its own parameters.
    its = steps(optimizer)
    names = [reducer.names[n] for n in numbers if id(reducer.params[n]) in its]
    if names:
        reducer.listeners.hear_all()
        warnings.warn(
            f"rank {reducer.group.rank()}: {names[0]} has a gradient of this rank alone: "
            "no backward pass was seen that brought it, after a forward through the wrapper. "
            "If your program sets .grad itself, this is as in torch. Otherwise return from "
            "forward what the loss is made of, so that other ranks do not wait for it.",
            RuntimeWarning,
            stacklevel=5,
        )
