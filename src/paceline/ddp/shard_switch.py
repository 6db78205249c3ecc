"""ShardSwitch: ``no_sync`` and ``accumulate`` have no meaning where a step is made of shards."""

from __future__ import annotations

from typing import Any

from ..errors import ModuleStateError
from .averaging import AveragingSwitch


class ShardSwitch(AveragingSwitch):
    """The switch of a wrapper with shards, which refuses to be turned off."""

    def __init__(self, rank: int) -> None:
        self._rank, self._on = rank, True
        super().__init__()

    @property
    def on(self) -> bool:
        """Always: shards are averaged when their step ends."""
        return self._on

    @on.setter
    def on(self, value: bool) -> None:
        if not value:
            self._refuse("require_backward_grad_sync = False")

    def _refuse(self, what: str) -> None:
        raise ModuleStateError(
            f"rank {self._rank}: {what} for a model wrapped with shards=. Every rank raises this.",
            "Shards gather by themselves, and are averaged when their step ends.",
        )

    def no_sync(self) -> Any:
        self._refuse("no_sync()")

    def accumulate(self, steps: int) -> Any:
        self._refuse(f"accumulate({steps})")
