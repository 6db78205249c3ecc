# mypy: disable-error-code="misc, no-any-return"
# (Lightning is optional: where types are checked it need not be there)
"""A Strategy with which Lightning's Trainer trains on paceline; importing this module offers it. ::

    import paceline.integrations.lightning_trainer

    trainer = Trainer(accelerator="cpu", devices=2, strategy="paceline")

The Trainer has strategies of its own, apart from Fabric's (``lightning.py``), and imports for
seconds; hence a module of its own. With ``pytorch_lightning`` instead of ``lightning.pytorch``,
import that first.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..ddp import DistributedDataParallel
from .published import strategies_of

__all__ = ["PacelineStrategy"]

NAME = "paceline"
_strategies = strategies_of(__name__, "lightning.pytorch", "pytorch_lightning")
_DDPStrategy: Any = _strategies.DDPStrategy


class PacelineStrategy(_DDPStrategy):
    """The Trainer's strategy for copies of one model on many processes, on paceline.

    Takes what the Trainer's DDPStrategy takes; further keywords go to our DistributedDataParallel.
    """

    def __init__(self, *args: Any, process_group_backend: str = NAME, **kwargs: Any) -> None:
        super().__init__(*args, process_group_backend=process_group_backend, **kwargs)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap ``model``; the Trainer calls it."""
        device_ids = self.determine_ddp_device_ids()
        return DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Offer the strategy under its name, unless that is done."""
        if NAME not in strategy_registry:
            strategy_registry.register(NAME, cls, description="DDP on paceline")


PacelineStrategy.register_strategies(_strategies.StrategyRegistry)
