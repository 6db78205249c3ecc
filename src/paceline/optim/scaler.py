"""GradScaler for gradients that lie in stretches: all ranks skip a step, or none does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._exchange import by_kind
from .._torch import foreach
from .._torch.optim import OpenGradScaler
from .._torch.tensors import values_of
from ..errors import OptimizerArgumentError
from ..groups import ReduceOp
from .clip import Gradients


class GradScaler(OpenGradScaler):
    """torch's GradScaler, extended for optimizers whose gradients are divided between ranks.

    Without it, a rank that finds an inf in its part would skip a step that the others take. An
    optimizer with divided gradients has a method ``gradients``; for all others this class behaves
    like torch's.
    """

    def unscale_grads(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        offered = getattr(optimizer, "gradients", None)
        gradients = offered() if callable(offered) else None
        if not isinstance(gradients, Gradients) or gradients.group is None:
            return super().unscale_grads(optimizer, inv_scale, found_inf, allow_fp16)
        found = found_inf.clone()
        _unscale([*gradients.whole, *gradients.parts], inv_scale, found, allow_fp16)
        gradients.group.all_reduce(found, ReduceOp.MAX)
        return {found.device: found}


@torch.no_grad()
def _unscale(grads: list[Tensor], inv_scale: Tensor, found: Tensor, allow_fp16: bool) -> None:
    """Multiply by ``inv_scale``, and set ``found`` to 1 where something is not finite."""
    if not allow_fp16 and any(grad.dtype is torch.float16 for grad in grads):
        raise OptimizerArgumentError(
            "Attempting to unscale FP16 gradients.", "Keep the parameters in float32."
        )
    for some in by_kind(values_of(grad) if grad.is_sparse else grad for grad in grads):
        here = found.to(some[0].device)
        foreach.unscale_(some, here, inv_scale.to(here.device))
        if here is not found:
            found.copy_(torch.maximum(found, here.to(found.device)))
