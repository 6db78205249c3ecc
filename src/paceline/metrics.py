"""Sums, means and gathers over all ranks' shards of an evaluation, however unequal the shards are.

A *shard* is what one rank has: a tensor with one row for each of its samples. It may have any
number of rows, also none; dtype and the other dimensions are the same on all ranks. A number, or a
tensor without dimensions, is a shard of one row.

The mean of the ranks' means is not the mean over samples when shards differ. Here numerators and
counts are added up apart, integers as int64 and floats as float64, in the order of ranks; so the
result is that of one process with all rows, up to the rounding of float64, and has the same bits on
every rank.

All ranks call the same function; each blocks until all have. ``group`` may be one of ours or one of
torch's; without it, the current process group or torch's default group is meant. Results are on the
device of ``values``. Shards that do not fit together are an error on every rank. ::

    losses = torch.cat([loss_of_each_sample(batch) for batch in loader])
    print(metrics.mean(losses))

    print(metrics.weighted_mean(mean_loss_of_batch, number_of_tokens))
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ._torch.c10d import devices_of
from .errors import RendezvousError, ShardArgumentError, ShardMismatchError
from .groups import Group, current_process_group

__all__ = ["gather", "mean", "sum", "weighted_mean"]


def sum(values: Tensor | float, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum of all rows of all ranks: int64 for integers and bools, else float64."""
    shards = _meet("sum", values, group)
    return shards.total(_widened(shards.own).sum(0))


def mean(values: Tensor | float, group: ProcessGroup | None = None) -> Tensor:
    """Return the mean of all rows of all ranks as float64; NaN if there are none."""
    shards = _meet("mean", values, group)
    return _floating(shards.total(_widened(shards.own).sum(0))) / builtins.sum(shards.rows)


def weighted_mean(
    values: Tensor | float, weights: Tensor | float, group: ProcessGroup | None = None
) -> Tensor:
    """Return the weighted mean of all rows of all ranks as float64.

    ``weights`` has one number for each row. A row with weight 0 is ignored, even if it is NaN, such
    as the mean loss of an empty batch. If all weights are 0, the result is NaN.
    """
    shards = _meet("weighted_mean", values, group, weights)
    rows = _floating(_widened(shards.own))
    scale = _rows(weights).to(rows.device, torch.float64)
    scale = scale.view(-1, *[1] * (rows.dim() - 1))
    weighted = torch.where(scale == 0, torch.zeros_like(rows), rows * scale)
    return shards.total(weighted.sum(0)) / shards.total(scale.sum())


def gather(values: Tensor | float, group: ProcessGroup | None = None) -> Tensor:
    """Return all rows of all ranks, in the order of ranks, on every rank."""
    shards = _meet("gather", values, group)
    return torch.cat(shards.all_gather(shards.own, shards.rows)).to(shards.home)


# -- how shards meet --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shards:
    """One rank's shard, on a device of the group, and what is known of the others'."""

    group: Group
    own: Tensor
    rows: Sequence[int]  # by rank
    home: torch.device  # where the caller has it

    def total(self, part: Tensor) -> Tensor:
        """The sum of the ranks' parts, which have one shape."""
        parts = self.all_gather(part.unsqueeze(0), [1] * self.group.size())
        return functools.reduce(torch.add, parts).squeeze(0).to(self.home)

    def all_gather(self, own: Tensor, rows: Sequence[int]) -> list[Tensor]:
        """Every rank's tensor, of so many rows."""
        shapes = [(n, *own.shape[1:]) for n in rows]
        outputs = [own.new_empty(shape) for shape in shapes]
        # As bytes, because not every engine knows every dtype; where there are none, nobody calls.
        if any(output.numel() for output in outputs):
            self.group.all_gather([_bytes(output) for output in outputs], _bytes(own))
        return outputs


def _meet(
    operation: str,
    values: Tensor | float,
    group: ProcessGroup | None,
    weights: Tensor | float = 1,
) -> _Shards:
    """Bring this rank's shard and learn of the others', or raise on all ranks if they do not fit.

    Whatever is wrong here must reach the others: they are waiting.
    """
    meeting = _wrapped(group, values)
    problem = _problem(values) or _problem(weights)
    own = _rows(0 if problem else values).to(meeting.device)
    if not problem and operation == "weighted_mean" and _rows(weights).shape != own.shape[:1]:
        problem = f"weights of shape {_shape(weights)} for values of shape {_shape(values)}"
    kind = f"{operation}({own.dtype}, rows of shape {list(own.shape[1:])})"
    told = meeting.all_gather_object([kind, problem, len(own)])
    kinds, problems, rows = zip(*told, strict=True)
    for rank, found in enumerate(problems):
        if found:
            raise ShardArgumentError(meeting.rank(), operation, rank, found)
    for rank, found in enumerate(kinds):
        if found != kinds[0]:
            raise ShardMismatchError(meeting.rank(), 0, kinds[0], rank, found)
    home = values.device if isinstance(values, Tensor) else torch.device("cpu")
    return _Shards(meeting, own, rows, home)


def _wrapped(group: ProcessGroup | None, values: object) -> Group:
    """The group as one of ours, with a device for the collectives: that of ``values`` if it can."""
    group = group or current_process_group() or dist.group.WORLD
    if group is None:
        raise RendezvousError(
            "there is no process group to reduce over",
            "Pass group=, or call torch.distributed.init_process_group first.",
        )
    wanted = values.device if isinstance(values, Tensor) else torch.device("cpu")
    kinds = [device.type for device in devices_of(group)]
    if wanted.type in kinds or not kinds:
        return Group.wrap(group, wanted)
    return Group.wrap(group, torch.device(kinds[0]))


def _problem(values: object) -> str:
    """Say what is wrong with a shard; empty if nothing is."""
    if isinstance(values, Tensor):
        return "" if values.layout is torch.strided else f"a tensor of layout {values.layout}"
    return "" if isinstance(values, int | float) else f"an object of type {type(values).__name__}"


def _rows(values: Tensor | float) -> Tensor:
    """The shard as a tensor of rows."""
    if not isinstance(values, Tensor):
        dtype = torch.float64 if isinstance(values, float) else torch.int64
        values = torch.tensor(values, dtype=dtype)
    values = values.detach().resolve_conj().resolve_neg()
    return values.unsqueeze(0) if values.dim() == 0 else values


def _shape(values: Tensor | float) -> list[int]:
    return list(values.shape) if isinstance(values, Tensor) else []


def _widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def _floating(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is not torch.int64 else tensor.to(torch.float64)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
