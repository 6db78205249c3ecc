"""Join for a wrapper: torch's names for it (``joining.py`` does it)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..join import Join, Joinable
from .joining import DDPJoinHook, any_averages, common_rank, sync_final_model
from .replica import Replica


class JoinsUneven(Joinable):
    """How ranks with unequal numbers of inputs train together; a part of the wrapper."""

    module: Any  # as in torch's class
    replica: Replica
    device: torch.device
    process_group: ProcessGroup
    require_backward_grad_sync: bool

    def _in_join(self) -> bool:
        return bool(self._join_config.enable)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have unequal numbers of inputs.

        A rank that has run out takes part in the others' steps with weight 0, without additional
        collectives. ``divide_by_initial_world_size=False`` divides by the number of ranks that
        still have inputs; it has no effect with :meth:`samples`, where the mean is over samples.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """Return the hook that takes this rank's part once it has run out of inputs."""
        return DDPJoinHook(self, by_active=not kwargs.get("divide_by_initial_world_size", True))

    @property
    def _authoritative_rank(self) -> int:
        return self.replica.buffers.root

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        sync_final_model(self, is_last_joiner)

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool:
        return any_averages(self, not is_joined_rank and self.require_backward_grad_sync)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.replica.reducer.stand_in()

    def _match_unused_params_allreduce(self) -> None:
        """Who used what rides in the buckets' header; no collective has to be matched."""

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        return common_rank(self, rank_cond)

    @property
    def join_device(self) -> torch.device:
        """The device for Join's tensors."""
        return torch.device(self.device)

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group for Join's all-reduces."""
        return self.process_group
