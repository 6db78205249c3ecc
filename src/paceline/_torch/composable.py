"""Which composable functions (``replicate``, ``fully_shard``) a module has been given to.

torch notes it on the module itself, and each of them looks there for the others. The table has no
public reader: ``replicate`` must enter itself, and must see ``fully_shard``.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem, _get_registry

_REPLICATE = "replicate"


def note_replicated(module: nn.Module) -> None:
    """Enter ``replicate`` for ``module``."""
    module.__dict__.setdefault(REGISTRY_KEY, {})[_REPLICATE] = RegistryItem()


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` has ``module``."""
    return "fully_shard" in (_get_registry(module) or ())


def without_replicated(state: dict[str, Any]) -> None:
    """Take the entry of :func:`note_replicated` out of a copy of a module's attributes."""
    if REGISTRY_KEY in state:
        state[REGISTRY_KEY] = {k: v for k, v in state[REGISTRY_KEY].items() if k != _REPLICATE}
