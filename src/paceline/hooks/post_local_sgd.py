"""Post-local SGD: average over all ranks at first, later only over a subgroup.

Use it with a model averager, which averages the parameters every few steps. With ``ddp.samples``,
the gradient of a subgroup is weighted by its share of all samples, so that the plain mean of the
parameters is right.
"""

import logging
from pathlib import Path
from typing import Any
from uuid import UUID

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .._exchange import done, gather_later, mean_later, part_of
from ..errors import HookStateError
from ..groups import group_or_default

log = logging.getLogger(__name__)


class PostLocalSGDState:
    """State of :func:`post_localSGD_hook`: the groups to average over, and when to switch.

    Until step ``start_localSGD_iter`` gradients are averaged over ``process_group``, then over
    ``subgroup``; with ``post_local_gradient_allreduce=False`` they are then not averaged at all.
    ``subgroup=None`` is a group of the ranks on this host; all ranks open it when it is first
    needed.
    """

    __slots__ = [
        "_opened",
        "iter",
        "post_local_gradient_allreduce",
        "process_group",
        "start_localSGD_iter",
        "subgroup",
    ]

    def __init__(
        self,
        process_group: ProcessGroup | None,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        self._opened = False  # the subgroup is one that this state has opened
        log.info("Local SGD will be started after %s steps.", start_localSGD_iter)

    def follow_group(self, process_group: ProcessGroup) -> None:
        """Continue in another group, as the wrapper does, with a new subgroup."""
        if self.subgroup is not None and not self._opened:
            raise HookStateError(
                f"rank {process_group.rank()}: the wrapper would continue in another group, and "
                "PostLocalSGDState has a subgroup of the old one. Nothing was changed here; every "
                "rank with such a state stops.",
                "Before the wrapper changes its group, set state.subgroup to None for the ranks of "
                "each host, or state.process_group and state.subgroup to new ones.",
            )
        self.process_group, self.subgroup = process_group, None

    def maybe_increase_iter(self, bucket: Any) -> None:
        """Count a step when its last bucket arrives."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                log.info("Gradients are averaged over subgroups only, after %s steps", self.iter)


def post_localSGD_hook(
    state: PostLocalSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks, and after some steps over a subgroup."""
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return mean_later(group_or_default(state.process_group), bucket.buffer())
    if not state.post_local_gradient_allreduce:
        return done(bucket.buffer())
    if state.subgroup is None:
        group = group_or_default(state.process_group)
        state.subgroup = _on_this_machine(group, bucket.buffer().device)
        state._opened = True
    return mean_later(state.subgroup, bucket.buffer())


def _on_this_machine(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    """Return a group of the ranks on this host; all ranks of ``group`` call it."""
    mine = torch.tensor(list(_machine()), dtype=torch.uint8, device=device)
    machines: dict[tuple[int, ...], list[int]] = {}
    for rank, name in enumerate(gather_later(group, mine).wait().tolist()):
        machines.setdefault(tuple(name), []).append(rank)
    return part_of(group, list(machines.values()))


def _machine() -> bytes:
    """Return a name of this host that is unique until the next boot."""
    return UUID(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()).bytes
