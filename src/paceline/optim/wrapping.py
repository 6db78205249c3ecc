"""Wrapping: an optimizer around an optimizer, which passes on everything but the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import AveragingTypeError

Closure = Callable[[], Any] | None


class Wrapping(Optimizer):
    """Base class of optimizers around another one, ``optim``, whose groups and state it has.

    They are looked up each time, not copied: loading a state dict replaces them, and schedulers
    that hold this object must see the new ones.
    """

    asks_first = True  # before a step, whether the last backward pass failed; see ddp/pending.py

    def __init__(self, optim: Optimizer) -> None:
        if not isinstance(optim, Optimizer):
            raise AveragingTypeError(
                f"{type(self).__name__}: expected a torch.optim.Optimizer to wrap, got an object "
                f"of type {type(optim).__name__}.",
                "Make the optimizer first and give it to the constructor.",
            )
        self.optim = optim
        # Not Optimizer.__init__, which would take the parameters for itself. This makes the rest of
        # what it makes: the tables of step hooks, and the step that calls them.
        self.__setstate__({"defaults": optim.defaults})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the inner optimizer; schedulers change them."""
        return self.optim.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The state of the inner optimizer."""
        return self.optim.state

    def __repr__(self) -> str:
        return repr(self.optim)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer."""
        self.optim.add_param_group(param_group)
