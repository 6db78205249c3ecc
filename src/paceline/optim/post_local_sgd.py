"""PostLocalSGDOptimizer: any optimizer, then an averager, at every step."""

from __future__ import annotations

import warnings
from typing import Any

from torch.distributed.algorithms.model_averaging.averagers import ModelAverager as TorchAverager
from torch.optim import Optimizer

from .wrapping import Closure, Wrapping


class PostLocalSGDOptimizer(Wrapping):
    """Steps ``optim`` on this rank, then lets ``averager`` average the parameters when due.

    With ``post_localSGD_hook``, set ``averager.warmup_steps`` to the hook's
    ``start_localSGD_iter``: until then gradients are averaged over all ranks, later over a
    subgroup, and the averager keeps the models together.
    """

    def __init__(self, optim: Optimizer, averager: TorchAverager) -> None:
        super().__init__(optim)
        self.averager = averager

    def step(self, closure: Closure = None) -> Any:
        """Step, and average if it is due; every rank calls it equally often."""
        loss = self.optim.step(closure)
        self.averager.average_parameters(params=self.param_groups)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, and under ``step`` the averager's step count."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; without a step count the averager starts from 0."""
        self.optim.load_state_dict(state_dict)
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. "
                "Setting step counter to 0.",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)
