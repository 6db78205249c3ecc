"""Gradients that nobody saw coming: said before an optimizer uses them.

A backward pass is seen at the outputs of the wrapper's forward, and at some parameters. One that
comes by neither leaves gradients of this rank alone. A look at every ``optimizer.step()`` finds
them; it costs next to nothing unless a forward has been answered by no pass.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from .reducer import Reducer

_guarded: weakref.WeakSet[Reducer] = weakref.WeakSet()
_handle: list[RemovableHandle] = []  # torch's, while there is somebody to guard


def guard(reducer: Reducer) -> None:
    """Look at the gradients of ``reducer`` whenever an optimizer is about to step."""
    _guarded.add(reducer)
    if not _handle:
        _handle.append(register_optimizer_step_pre_hook(_look))


def unguard(reducer: Reducer) -> None:
    """Look no more."""
    _guarded.discard(reducer)
    _leave_if_empty()


def _leave_if_empty() -> None:
    if not _guarded and _handle:
        _handle.pop().remove()


def _look(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for reducer in list(_guarded):
        numbers = reducer.unseen()
        # Ranks that are threads share this; each steps with an optimizer of its own parameters.
        its = {id(p) for group in optimizer.param_groups for p in group["params"] if numbers}
        names = [reducer.names[n] for n in numbers if id(reducer.params[n]) in its]
        if names:
            reducer.listeners.hear_all()
            warnings.warn(
                f"rank {reducer.group.rank()}: {names[0]} has a gradient of this rank alone: "
                "no backward pass was seen that brought it, after a forward through the wrapper. "
                "If your program sets .grad itself, all is as under torch. Otherwise return from "
                "forward what the loss is made of, so that other ranks do not wait for it.",
                RuntimeWarning,
                stacklevel=4,
            )
    _leave_if_empty()
