"""Optimizers and the gradient scaler: what their other users are told, and who hooks in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def note_step(optimizer: Optimizer) -> None:
    """Let schedulers of the learning rate know that the optimizer has stepped.

    They wrap ``optimizer.step`` to see it, and warn when what steps is something else.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody is to be called before or after each step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def scale_of(scaler: torch.amp.GradScaler, device: torch.device) -> Tensor:
    """The scale, a tensor that the scaler changes in place; the first caller names its device."""
    if scaler._scale is None:
        scaler.scale(torch.zeros((), device=device))  # makes it
    assert scaler._scale is not None
    return scaler._scale


def found_by_graph(scaler: torch.amp.GradScaler, optimizer: Optimizer, found: Tensor) -> None:
    """Tell a scaler whether gradients were not finite that it did not divide itself.

    Without that, ``scaler.update()`` raises an error.
    """
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found.device: found}


class OpenGradScaler(torch.amp.GradScaler):
    """torch's GradScaler, with a public name for the method that a subclass overrides."""

    def unscale_grads(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide the gradients by the scale; return for each device whether one was not finite."""
        usual: Any = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return dict(usual)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale_grads(optimizer, inv_scale, found_inf, allow_fp16)
