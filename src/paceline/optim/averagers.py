"""Averagers: the mean of a model's parameters over a group, every so many steps.

The names and the counting of steps are those of ``torch.distributed.algorithms.model_averaging``.
Unlike there, parameters keep their memory: the mean is written into it, so views of it, buckets and
captured graphs stay valid; and parameters of different types travel separately, each in its own
precision (half ones in float32).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager as TorchAverager

from .._exchange import FlatBuffer, Standing, WeightedMean, group_for_buffers
from ..errors import AveragingArgumentError, UnsupportedParametersError
from ..groups import Group, group_or_default

Params = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]

WARMUP = "Arg ``warmup_steps`` must be a non-negative number."
NOT_NEEDED = (
    "no need to use model averaging: exchanging parameters at every step costs no less than "
    "exchanging gradients, which DistributedDataParallel does while backward still runs."
)


def average_parameters(params: Iterable[nn.Parameter], process_group: ProcessGroup | None) -> None:
    """Replace each parameter by its mean over the group; every rank of the group calls it.

    On a rank that is not in the group, parameters are unchanged.
    """
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if process_group is outside:
        return
    tensors: list[Tensor] = list(params)
    if not tensors:
        return
    if tensors[0].device.type != "cpu":
        torch.accelerator.synchronize()  # two NCCL groups must not be at work at a time
    group = Group.wrap(group_or_default(process_group), tensors[0].device)
    pieces = [FlatBuffer(part, WeightedMean(group)) for part in group_for_buffers(tensors)]
    for piece in pieces:
        piece.start(Standing(1.0))
    for piece in pieces:
        piece.finish()


def get_params_to_average(params: Params) -> list[nn.Parameter]:
    """Return the parameters that have a gradient, from parameters or parameter groups."""
    found: list[nn.Parameter] = []
    for entry in params:
        if isinstance(entry, nn.Parameter):
            found.append(entry)
        elif isinstance(entry, Mapping):
            found.extend(entry["params"])
        else:
            raise UnsupportedParametersError(
                f"Parameter input of type {type(entry)} is not supported.",
                "Give model.parameters() or optimizer.param_groups.",
            )
    return [param for param in found if param.grad is not None]


def average_parameters_or_parameter_groups(
    params: Params, process_group: ProcessGroup | None
) -> None:
    """Call :func:`average_parameters` for the parameters that have a gradient."""
    average_parameters(get_params_to_average(params), process_group)


class ModelAverager(TorchAverager):
    """Base class: decides when parameters are averaged, and over which group.

    ``step`` counts the calls of :meth:`average_parameters`; training loops and checkpoints may set
    it. It is a subclass of torch's ModelAverager.
    """

    process_group: ProcessGroup

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        super().__init__(group_or_default(process_group))


class PeriodicModelAverager(ModelAverager):
    """Averages every ``period`` steps, starting at step ``warmup_steps`` (counted from 0)."""

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: ProcessGroup | None = None
    ) -> None:
        super().__init__(process_group)
        if warmup_steps < 0:
            raise AveragingArgumentError(WARMUP)
        if period < 1:
            raise AveragingArgumentError("Arg ``period`` must be a positive value.")
        if period == 1:
            warnings.warn(f"When period is 1, {NOT_NEEDED}", stacklevel=2)
        self.warmup_steps, self.period = warmup_steps, period

    def average_parameters(self, params: Params) -> None:
        """Count a step, and average if it is due; every rank calls it in every step."""
        done = self.step - self.warmup_steps
        if done >= 0 and done % self.period == 0:
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1
