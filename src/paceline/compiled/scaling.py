"""Scaling: a gradient scaler as a part of a step.

The loss is multiplied by the scale before the backward pass, and the averages are divided by it, so
all ranks find the same infinities and skip the same steps. Whether a step was skipped decides what
the optimizer counts, on the host: like torch's scaler, a step with one waits for its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .._torch import foreach
from .._torch.optim import found_by_graph, scale_of
from ..errors import ModuleArgumentError
from ..groups import Group, ReduceOp


class Scaling:
    """A step's scaler; without one, or with one that is not enabled, nothing is scaled."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None

    def __bool__(self) -> bool:
        return self.scaler is not None

    def scale(self, device: torch.device) -> Tensor | None:
        """What the loss is multiplied by, in memory that stays where it is."""
        return None if self.scaler is None else scale_of(self.scaler, device)

    def refuse_halves(self, params: Sequence[Tensor], rank: int) -> None:
        """Raise an error if there is a gradient that torch's scalers refuse to divide."""
        if self.scaler is not None and any(p.dtype is torch.float16 for p in params):
            raise ModuleArgumentError(
                f"rank {rank}: train_step(scaler=...): Attempting to unscale FP16 gradients.",
                "Keep the parameters in float32, and pass autocast=torch.float16.",
            )

    def agree(self, group: Group, device: torch.device, timeout: timedelta) -> None:
        """Raise an error on all ranks if their scales differ; every rank calls it.

        ``device``: that of the model, which may be another than the group's.
        """
        own = self.scale(device)
        mine = 0.0 if own is None else float(own)
        both = torch.tensor([mine, -mine], dtype=torch.float64, device=group.device)
        group.all_reduce(both, ReduceOp.MAX, timeout)
        most, least = float(both[0]), -float(both[1])
        if most != least:
            raise ModuleArgumentError(
                f"rank {group.rank()}: train_step(scaler=...): this rank's scale is {mine:g}, and "
                f"those of all ranks go from {least:g} to {most:g} (0: no scaler): their gradients "
                "cannot be averaged. Every rank raises this.",
                "Give all ranks a scaler with the same state, or none.",
            )

    # -- a step in eager mode -----------------------------------------------------------------

    def of_loss(self, loss: Tensor) -> Tensor:
        """What is differentiated instead of ``loss``."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients, before they are clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Let the optimizer step unless a gradient is not finite, and choose the next scale."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    # -- a compiled step ----------------------------------------------------------------------

    def unscale_held(self, params: Sequence[Tensor]) -> None:
        """Divide what ``.grad`` holds behind a graph, which divides in its own memory."""
        grads = [p.grad for p in params if p.grad is not None]
        scale = None if not grads else self.scale(grads[0].device)
        if scale is not None:
            foreach.mul_(grads, inverse(scale))

    def conclude(self, optimizer: Optimizer, found: Tensor) -> None:
        """Choose the next scale, by whether the graph ``found`` what is not finite."""
        assert self.scaler is not None
        found_by_graph(self.scaler, optimizer, found)
        self.scaler.update()


def inverse(scale: Tensor) -> Tensor:
    """What gradients are multiplied by; torch too computes it in double precision."""
    return scale.double().reciprocal().float()


def divide(grads: list[Tensor], scale: Tensor) -> tuple[list[Tensor], Tensor]:
    """The gradients without their scale; and 1 if one of them is not finite, else 0."""
    largest = torch.stack([norm.float() for norm in foreach.norm(grads, torch.inf)])
    found = (~largest.isfinite().all()).float()
    return list(foreach.mul(grads, inverse(scale))), found
