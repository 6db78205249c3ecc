# mypy: disable-error-code="import-not-found, import-untyped, misc, no-any-return"
# (Lightning is optional: where types are checked it need not be there)
"""A Strategy with which Lightning Fabric trains on paceline; importing this module offers it. ::

    import paceline.integrations.lightning

    fabric = Fabric(accelerator="cpu", devices=2, strategy="paceline")

What Fabric's own ``ddp`` strategy can do, this one can: it starts processes or finds those that a
launcher started, and it keeps gradients local under ``fabric.no_backward_sync``. Two things differ:
the default group is one of ours, and ``setup_module`` wraps in our DistributedDataParallel.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..ddp import DistributedDataParallel
from ..errors import IntegrationMissingError

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
except ModuleNotFoundError:
    try:  # Fabric is also published by itself
        from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
    except ModuleNotFoundError as missing:
        raise IntegrationMissingError(__name__, "lightning", "lightning") from missing

__all__ = ["PacelineStrategy"]

NAME = "paceline"


class PacelineStrategy(DDPStrategy):
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


PacelineStrategy.register_strategies(STRATEGY_REGISTRY)
