"""Optimizers and the gradient scaler: what their other users are told, and who hooks in."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def note_step(optimizer: Optimizer) -> None:
    """Let schedulers of the learning rate know that the optimizer has stepped.

    They wrap ``optimizer.step`` to see it, and warn when what steps is something else.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody is to be called before or after each step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def can_skip(optimizer: Optimizer) -> bool:
    """Whether a device can tell it, in the middle of a step, to leave all as it is.

    Fused optimizers ask for that, for the sake of ``torch.amp.GradScaler``.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


_flags: WeakKeyDictionary[Optimizer, tuple[Tensor, RemovableHandle]] = WeakKeyDictionary()


def skip_where(optimizer: Optimizer, flag: Tensor) -> None:
    """Let the step that begins change nothing where ``flag``, on its device, is above zero."""
    forget_flag(optimizer)
    given = getattr(optimizer, "found_inf", None)  # a scaler's
    combined = flag if given is None else torch.maximum(given, flag.to(given.device, given.dtype))
    optimizer.found_inf = combined  # type: ignore[attr-defined]
    handle = optimizer.register_step_post_hook(lambda own, _args, _kwargs: forget_flag(own))
    _flags[optimizer] = combined, handle


def forget_flag(optimizer: Optimizer) -> None:
    """A step is over, or has failed; a scaler takes what it gave back by itself."""
    flag, handle = _flags.pop(optimizer, (None, None))
    if handle is not None:
        handle.remove()
    if flag is not None and getattr(optimizer, "found_inf", None) is flag:
        optimizer.found_inf = None  # type: ignore[attr-defined]


class OpenGradScaler(torch.amp.GradScaler):
    """torch's GradScaler, with a name for the one thing that a subclass may do otherwise."""

    def unscale_grads(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide the gradients by the scale; for each device, whether something is not finite."""
        usual: Any = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return dict(usual)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale_grads(optimizer, inv_scale, found_inf, allow_fp16)
