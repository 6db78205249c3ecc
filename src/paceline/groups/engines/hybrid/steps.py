"""What hybrid collectives are made of: a step among the ranks of a host, a step between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from ...._transport import Clock
from ...engine import Call, Kind
from ..shm import ShmEngine
from .hosts import Gloo, Hosts


class Time:
    """What is left of a call's timeout, for each of its steps.

    Steps that wait for a rank that waits itself get a little more, so that the rank that waits for
    the culprit gives up first, and says who it was. On a busy machine it may not be the first;
    whoever is gives it some more time to say so (``engine.py``).
    """

    def __init__(self, seconds: float) -> None:
        self._clock = Clock(timedelta(seconds=seconds))
        self._patience = min(0.5, seconds / 10)

    def left(self, detours: int = 0) -> float:
        return self._clock.left() + detours * self._patience


class Steps:
    """What a rank can do with those of its host, and with its counterparts on the other hosts."""

    def __init__(self, hosts: Hosts, local: ShmEngine, gloo: Gloo | None) -> None:
        self.hosts, self.size = hosts, len(hosts.places)
        self.local, self._groups = local, gloo
        self.detour = False  # the latest step among the ranks of this host waits for one that waits
        self._where = torch.tensor(list(hosts.places.values())).unbind(1)

    @property
    def gloo(self) -> Gloo:
        assert self._groups is not None, "on one host nothing is sent across"
        return self._groups

    def exchange(self, row: Tensor, time: Time) -> Tensor:
        """Every rank's ``row`` of numbers, by rank."""
        hosts, width = self.hosts, row.numel()
        if self._groups is None:
            rows = row.new_empty(self.size, width)
            self.locally("all_gather_single", [row], [rows], time)
            return rows
        longest = max(map(len, hosts.components))
        block = row.new_zeros(longest, width)
        table = row.new_empty(len(hosts.components), longest, width)
        taken = list(block[: len(hosts.here)]) if hosts.place == 0 else []
        self.locally("gather", [row], taken, time, root=0)
        if hosts.place == 0:
            self.across("all_gather_single", [block.view(-1)], [table.view(-1)], time)
        self.locally("broadcast", [table], [table], time, root=0, detours=2)
        return table[self._where]

    def locally(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        time: Time,
        reduction: str = "",
        root: int = -1,
        detours: int = 0,
    ) -> None:
        """A step among the ranks of this host, who are numbered by their places."""
        if len(self.hosts.here) == 1 and inputs and outputs and inputs[0] is outputs[0]:
            return
        seconds, self.detour = time.left(detours), detours > 0
        self.local.run(Call(kind, inputs, outputs, reduction, root, timeout=seconds))

    def across(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        time: Time,
        root: int = -1,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        """A step between this rank's counterparts on all hosts, who are numbered by host."""
        self.start_across(kind, inputs, outputs, time, root, splits).wait()

    def start_across(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        time: Time,
        root: int = -1,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> TorchWork:
        call = Call(kind, inputs, outputs, "", root, 0, *splits, time.left(1))
        return self.gloo.stripe.start(call)
