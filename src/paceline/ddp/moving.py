"""What follows a wrapper into another group: hooks and layers that were given the old one.

Only what holds the very group the wrapper had: another wrapper may still use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from ..groups import Group

Hook = tuple[Callable[..., Any], object]


class Move:
    """From one group to another, each as the user gave it and with our interface around it."""

    def __init__(self, old: tuple[ProcessGroup, Group], new: tuple[ProcessGroup, Group]) -> None:
        self._old, self._new = old, new

    def follow(self, held: Any) -> Any:
        """The new group in place of the old one; anything else as it is."""
        if held is self._old[0]:
            return self._new[0]
        return self._new[1] if held is self._old[1] else held

    def hook(self, hook: Hook) -> Hook:
        """``hook`` with a state that has the new group: as the state itself, or in it."""
        function, state = hook
        held = getattr(state, "process_group", None)
        if any(held is group for group in self._old):
            group = self.follow(held)
            if hasattr(state, "follow_group"):
                state.follow_group(group)
            else:
                state.process_group = group  # type: ignore[attr-defined]
        return function, self.follow(state)

    def layers(self, module: nn.Module) -> None:
        """SyncBatchNorm layers that were made with the old group."""
        for layer in module.modules():
            if isinstance(layer, nn.SyncBatchNorm) and layer.process_group is not None:
                layer.process_group = self.follow(layer.process_group)
