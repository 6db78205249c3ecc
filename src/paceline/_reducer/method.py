"""Method: how the gradients of a pass are exchanged, which all ranks decide alike."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from ..groups import Group, ReduceOp
from ..policies import Reduction
from .bucket import Hook

_CORES = os.cpu_count() or 1


def starts_quietly(group: Group) -> bool:
    """Whether no thread is to move along what the ranks exchange during a backward pass.

    Where every core computes, such a thread would take one away.
    """
    return group.capabilities.quiet_starts and group.size() >= _CORES


@dataclass(frozen=True)
class CommHook:
    """What a user registered to average buckets."""

    call: Hook
    prompt: bool  # it makes all its collectives before it returns


@dataclass(frozen=True, slots=True)
class Method:
    """What is decided once for a whole pass."""

    ranks: int
    native: bool  # the group divides by the number of ranks
    quiet: bool  # no thread moves buckets along
    reads_late: bool  # reading what ranks said would stop a device: it is done a pass later
    hook: CommHook | None

    @classmethod
    def choose(
        cls, group: Group, policy: Reduction, hook: CommHook | None, device: torch.device
    ) -> Method:
        """For a pass that begins now."""
        ranks = group.size()
        late = device.type != "cpu" if policy.reads_late is None else policy.reads_late
        return cls(
            ranks=ranks,
            native=group.capabilities.averages and ranks > 1,
            quiet=starts_quietly(group),
            reads_late=late,
            hook=hook,
        )

    def unattended(self) -> Method:
        """How the rest of a pass is sent while the program does something else."""
        return replace(self, quiet=False)

    @property
    def op(self) -> ReduceOp.RedOpType:
        """How the group reduces."""
        return ReduceOp.AVG if self.native else ReduceOp.SUM

    @property
    def share(self) -> float:
        """What a rank's part is multiplied by on the way to a mean."""
        return 1.0 if self.native else 1 / self.ranks

    @property
    def scale(self) -> float:
        """What gradients are multiplied by on the way in; a hook gets them as they are."""
        return 1.0 if self.hook is not None else self.share

    @property
    def prompt(self) -> bool:
        """Whether all calls of a pass are made in one order, before anything is awaited."""
        return self.hook is None or self.hook.prompt
