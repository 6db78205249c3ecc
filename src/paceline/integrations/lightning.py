# mypy: disable-error-code="misc, no-any-return"
# (Lightning is optional: where types are checked it need not be there)
"""A Strategy with which Lightning Fabric trains on paceline; importing this module offers it. ::

    import paceline.integrations.lightning

    fabric = Fabric(accelerator="cpu", devices=2, strategy="paceline")

What Fabric's own ``ddp`` strategy can do, this one can: it starts processes or finds those that a
launcher started, and it keeps gradients local under ``fabric.no_backward_sync``. Two things differ:
the default group is one of ours, and ``setup_module`` wraps in our DistributedDataParallel. With
``lightning_fabric`` instead of ``lightning.fabric``, import that first.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..ddp import DistributedDataParallel
from .published import strategies_of

__all__ = ["PacelineStrategy"]

NAME = "paceline"
_strategies = strategies_of(__name__, "lightning.fabric", "lightning_fabric")
_DDPStrategy: Any = _strategies.DDPStrategy


class PacelineStrategy(_DDPStrategy):
    """Fabric's strategy for copies of one model on many processes, on paceline.

    Takes what Fabric's DDPStrategy takes; further keywords go to our DistributedDataParallel.
    ``process_group_backend`` may name another backend of torch's, such as ``"gloo"``.
    """

    def __init__(self, *args: Any, process_group_backend: str = NAME, **kwargs: Any) -> None:
        super().__init__(*args, process_group_backend=process_group_backend, **kwargs)

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap ``module``; Fabric calls it."""
        device_ids = self._determine_ddp_device_ids()
        return DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Offer the strategy under its name, unless that is done."""
        if NAME not in strategy_registry:
            strategy_registry.register(NAME, cls, description="DDP on paceline")


PacelineStrategy.register_strategies(_strategies.STRATEGY_REGISTRY)
