"""Turns: who compiles first, so that the others find the work done, and nobody runs out of time.

Compiled code is kept on disk, for all processes of a host. When all ranks compile at once, all do
the same work, and whoever is done first waits in a collective whose timeout was never meant for
that. So the first rank of each host compiles while the others wait, then the others find what it
left, and only then the first collective of a step begins. Both waits have a timeout of their own.
"""

from __future__ import annotations

import os
from datetime import timedelta

from ..ddp import DistributedDataParallel


class Turns:
    """The first step; every rank goes through it once, whether it compiles or not."""

    def __init__(self, ddp: DistributedDataParallel, timeout: timedelta) -> None:
        self._ddp = ddp
        self._group = ddp._replica.group
        self._timeout = timeout
        self._leads = os.environ.get("LOCAL_RANK", str(self._group.rank())) == "0"
        self._reducer = ddp._replica.reducer
        self._passes = self._reducer.passes
        self._open = False

    def before(self) -> None:
        """Wait until it is this rank's turn.

        No turns are taken behind other passes, or in a Join: there a rank that has run out could
        not take part, and all ranks have to decide alike.
        """
        reducer = self._ddp._replica.reducer
        first = reducer is self._reducer and reducer.passes == self._passes
        self._open = first and self._group.size() > 1 and not self._ddp._join_config.enable
        if self._open and not self._leads:
            self._group.barrier(self._timeout)

    def after(self) -> None:
        """This rank has compiled: wait for all others, unless it has done so already."""
        if not self._open:
            return
        self._open = False
        if self._leads:
            self._group.barrier(self._timeout)
        self._group.barrier(self._timeout)
