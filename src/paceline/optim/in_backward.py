"""InBackward: an optimizer whose step is the end of the backward pass.

A gradient may be used when it is final: averaged over all ranks, weighted, with whatever came late
added to it, and with no rank in trouble. That is known when the backward pass ends and not before.
A global norm needs all gradients as well. So the step has two phases, both inside ``backward()``:
first the norm of all averages, then, with one common factor, the update of every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import OptimizerArgumentError, OptimizerTypeError
from .clip import clip_grad_norm_
from .wrapping import Wrapping


class Tells(Protocol):
    """A model that tells when a backward pass has left averages in ``.grad``."""

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def after_backward(self, callback: Callable[[], None]) -> RemovableHandle: ...


class InBackward(Wrapping):
    """Steps ``optimizer_class`` at the end of every backward pass that averages gradients::

        optimizer = InBackward(ddp, torch.optim.AdamW, lr=1e-3, max_norm=1.0)
        for batch in loader:
            loss(ddp(batch)).backward()  # averages, clips, steps, and clears the gradients

    ``model`` is a Paceline ``DistributedDataParallel``. Passes inside ``no_sync`` accumulate and do
    not step. ``max_norm`` clips gradients by their global norm, which is then in :attr:`norm`. With
    a ``scaler`` (``torch.amp.GradScaler``) gradients are unscaled first, and steps with infinite
    gradients are skipped; you scale the loss and call ``scaler.update()``.

    It is a ``torch.optim.Optimizer``, so schedulers and checkpoints work. You can leave
    :meth:`step` and :meth:`zero_grad` in the training loop; they do nothing.
    """

    def __init__(
        self,
        model: Tells,
        optimizer_class: type[Optimizer],
        params: Iterable[Any] | None = None,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scaler: torch.amp.GradScaler | None = None,
        **defaults: Any,
    ) -> None:
        _check(model, optimizer_class, max_norm)
        trained = [p for p in model.parameters() if p.requires_grad]
        super().__init__(optimizer_class(trained if params is None else params, **defaults))
        self.max_norm, self.norm_type, self.scaler = max_norm, norm_type, scaler
        self.norm: Tensor | None = None  # of the last averages, before they were clipped
        self.steps = 0  # passes that were stepped, those a scaler left out included
        self._handle = model.after_backward(self._step_now)

    @torch.no_grad()
    def _step_now(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optim)
        if self.max_norm is not None:
            params = [p for group in self.optim.param_groups for p in group["params"]]
            self.norm = clip_grad_norm_(params, self.max_norm, self.norm_type)
        with torch.enable_grad():
            self.optim.step() if self.scaler is None else self.scaler.step(self.optim)
        self.optim.zero_grad(set_to_none=True)
        self.steps += 1
        self._opt_called = True  # schedulers ask for it

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do nothing, since the backward pass steps; call ``closure`` if given."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def detach(self) -> None:
        """Stop stepping in backward passes; gradients then stay in ``.grad``."""
        self._handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, in its own format."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the inner optimizer."""
        self.optim.load_state_dict(state_dict)


def _check(model: object, optimizer_class: object, max_norm: float | None) -> None:
    if not callable(getattr(model, "after_backward", None)):
        raise OptimizerTypeError(
            f"InBackward: expected a paceline DistributedDataParallel, got an object of type "
            f"{type(model).__name__}.",
            "Wrap the model first: InBackward steps when its backward passes have averaged.",
        )
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise OptimizerTypeError(
            f"InBackward: expected a class of optimizers, got {optimizer_class!r}.",
            "Give the class, such as torch.optim.AdamW, and its arguments by name.",
        )
    if max_norm is not None and not max_norm > 0:
        raise OptimizerArgumentError(
            f"InBackward: max_norm is {max_norm}.", "Give a norm above zero, or None not to clip."
        )
