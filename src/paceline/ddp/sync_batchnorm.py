"""Batch normalization over the batches of all ranks, as if they were one batch.

torch's ``SyncBatchNorm`` refuses tensors that are not on an accelerator; this one takes them. Every
rank sends its count, mean and sum of squared deviations, and puts the ranks' together by Chan's
formula, which does not cancel where the mean is large; ranks count by what they have, nothing
included. In backward one sum over the ranks completes the gradient of the input. Those of weight
and bias stay this rank's own: averaging them is DistributedDataParallel's part. Where that
gives ranks weights (``ddp.samples``), so does the sum: the loss of all ranks is then a weighted
mean of theirs.

All ranks must do the same: forward in training mode is a collective, and so is backward wherever
the input needs a gradient. A rank whose loss skips the layer, while others' do not, keeps them
waiting; one with nothing to do calls it with an empty batch. Inside Join a rank may also have run
out (``rows.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from .._reducer import Ledger
from .._torch.nn import batch_norm, check_batch
from ..errors import ModuleStateError
from ..groups import Group
from .rows import Rows

__all__ = ["SyncBatchNorm", "adopt", "lend_rows", "own_group"]


def adopt(module: nn.Module, group: ProcessGroup, ledger: Ledger | None = None) -> None:
    """Make the SyncBatchNorm layers in ``module`` work over ``group``, where torch's cannot.

    Those layers of torch's become ours in place: same objects, same state. Layers on accelerators
    keep torch's kernels if ``torch.distributed`` is initialized, without which those would quietly
    not synchronize. A layer's own ``process_group`` counts for more than ``group``. ``ledger``
    knows how much this rank's loss counts.
    """
    lent = Lent(Group.wrap(group, _device_of(module)), ledger or Ledger())
    for number, layer in enumerate(module.modules()):
        # Not subclasses: what somebody has overridden there would be lost.
        if type(layer) in (nn.SyncBatchNorm, SyncBatchNorm) and not _torch_can(_device_of(layer)):
            layer.__class__ = SyncBatchNorm
            assert isinstance(layer, SyncBatchNorm)
            layer._paceline_group, layer._paceline_number = lent, number


def lend_rows(module: nn.Module, group: Group) -> Lent | None:
    """Begin a Join context for the layers in ``module``, which is kept in step over ``group``.

    None where there are none. Raises, before anything is sent, where it cannot be.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.SyncBatchNorm)]
    if not layers or group.size() == 1:
        return None
    rank, lent = group.rank(), getattr(layers[0], "_paceline_group", Lent())
    if any(getattr(layer, "_paceline_group", None) is not lent for layer in layers):
        why, remedy = "of torch's", "Wrap them by paceline, without torch's default group."
    elif any(layer.process_group is not None for layer in layers):
        why, remedy = "with a process_group of their own", "Make them without one."
    elif lent.group is None or lent.group is group:
        why = "whose group is the model's, since no other could be split off it"
        remedy = "Pass a group from paceline.new_group to DistributedDataParallel."
    else:
        lent.rows = Rows(lent.group, max(m.num_features for m in layers), _device_of(layers[0]))
        return lent
    raise ModuleStateError(
        f"rank {rank}: a Join context was entered with SyncBatchNorm layers {why}. A rank that has "
        "run out could not take part in their collectives.",
        remedy,
    )


def own_group(module: nn.Module, group: Group) -> Group:
    """A group for the layers alone, where one can be made: all ranks call it.

    Their collectives in backward stand between those of the buckets, in an order that ranks with
    different graphs need not agree on.
    """
    layers = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    if not layers or group.size() == 1 or group.store is None:
        return group
    return group.split(range(group.size())) or group


def _device_of(module: nn.Module) -> torch.device:
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            return tensor.device
    return torch.device("cpu")


def _torch_can(device: torch.device) -> bool:
    return device.type != "cpu" and dist.is_available() and dist.is_initialized()


@dataclass(eq=False)
class Lent:
    """What layers use and do not own: copies share it, a pickle goes without."""

    group: Group | None = None
    ledger: Ledger = field(default_factory=Ledger)
    rows: Rows | None = None  # inside Join

    def __deepcopy__(self, memo: object) -> Lent:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Lent, ()


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's ``SyncBatchNorm``, which also works on the CPU and over any group.

    The group is ``process_group``, or that of the DistributedDataParallel around it, or torch's
    default group. In ``eval`` mode, or with one rank, it is plain batch normalization.
    """

    _paceline_group: Lent = Lent()
    _paceline_number: int = 0

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` (batch, channels, …) with statistics over all ranks."""
        if self._paceline_group.group is None and _torch_can(input.device):
            return super().forward(input)
        group = self._group(input.device) if self.training else None
        # Not for nothing: dividing by the number of elements, torch's kernels end a process on x86.
        if group is None or (group.size() == 1 and input.numel()):
            return batch_norm(self, input)
        check_batch(self, input)
        line = Line(group, self._paceline_group, self._paceline_number)
        statistics = gather_statistics(input, line)
        if statistics.count == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, over all ranks together; "
                f"rank {group.rank()} got an input of size {tuple(input.shape)}."
            )
        if self.track_running_stats:
            self._track(statistics)
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, statistics, self.eps, line
        )
        return output

    def _group(self, device: torch.device) -> Group | None:
        own = self.process_group
        if own is None and self._paceline_group.group is not None:
            return self._paceline_group.group
        if own is None and dist.is_available() and dist.is_initialized():
            own = dist.group.WORLD
        # Wrapped anew in every pass: a wrapper that is kept would outlive destroy_process_group.
        return None if own is None else Group.wrap(own, device)

    @torch.no_grad()
    def _track(self, statistics: Statistics) -> None:
        assert self.num_batches_tracked is not None, "track_running_stats comes with it"
        self.num_batches_tracked.add_(1)
        if self.momentum is None:  # the mean over all batches so far
            share = 1.0 / self.num_batches_tracked.item()
        else:
            share = self.momentum
        if statistics.count and self.running_mean is not None and self.running_var is not None:
            mean, var = statistics.mean, statistics.unbiased_var()
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(var.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: ProcessGroup | None = None
    ) -> nn.Module:
        """Replace every BatchNorm layer in ``module`` by a SyncBatchNorm with the same state.

        If ``module`` is such a layer itself, the new layer is returned.
        """
        converted: nn.Module = super().convert_sync_batchnorm(  # type: ignore[no-untyped-call]
            module, process_group
        )
        if type(converted) is nn.SyncBatchNorm:  # children come through here, too
            converted.__class__ = cls
        return converted


@dataclass(frozen=True)
class Line:
    """How a layer communicates with the same layer on the other ranks."""

    group: Group
    lent: Lent
    number: int  # of the layer

    def gather(self, own: Tensor) -> Tensor:
        """Every rank's ``own``, by rank."""
        if self.lent.rows is not None:
            return self.lent.rows.gather(2 * self.number + 1, own)
        parts = own.new_empty(self.group.size(), own.numel())
        self.group.all_gather_single(parts, own)
        return parts

    def add_up(self, sums: Tensor) -> Tensor:
        """All ranks' ``sums`` of gradients, in the measure of this rank's loss; may overwrite them.

        Each counts as much as its rank's loss does; and since what this rank makes of the result
        will be weighted too, it is divided by this rank's own.
        """
        weight = self.lent.ledger.weight
        if weight == 0:
            sums.zero_()  # they may not be numbers, being of a mean over nothing
        elif weight != 1:
            sums.mul_(weight)
        if self.lent.rows is None:
            self.group.all_reduce(sums)
        else:
            parts = self.lent.rows.gather(2 * self.number + 2, sums)
            sums = parts.sum(0).view_as(sums).to(sums.dtype)
        return sums.div_(weight or 1.0)


@dataclass(frozen=True)
class Statistics:
    """What all ranks' inputs have in common, per channel; the same bits on every rank."""

    mean: Tensor
    var: Tensor  # over the count, not one less
    count: int

    @classmethod
    def combine(cls, parts: Tensor, dtype: torch.dtype) -> Statistics:
        """Put ranks together; a row of ``parts`` is a rank's means, variances and count."""
        counts = parts[:, -1:]
        means, variances = parts[:, :-1].chunk(2, dim=1)
        count = counts.sum()
        shares = counts / count.clamp(min=1)
        mean = (shares * means).sum(0)
        var = (shares * (variances + (means - mean).square())).sum(0)
        return cls(mean.to(dtype), var.to(dtype), int(count))

    def unbiased_var(self) -> Tensor:
        return self.var * (self.count / (self.count - 1))


@torch.no_grad()
def gather_statistics(input: Tensor, line: Line) -> Statistics:
    """The statistics of all ranks' inputs; every rank must call it."""
    channels = input.size(1)
    count = input.numel() // channels
    dtype = torch.promote_types(input.dtype, torch.float32)
    own = input.new_zeros(2 * channels + 1, dtype=torch.float64)  # float32 counts to 2**24 only
    if count:
        mean, var = torch.batch_norm_update_stats(input.to(dtype), None, None, 0.0)
        own[:channels], own[channels:-1], own[-1] = mean, var, count
    return Statistics.combine(line.gather(own), dtype)


class _Normalize(torch.autograd.Function):
    """The arithmetic of batch normalization with given statistics that depend on the input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        eps: float,
        line: Line,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.statistics, ctx.eps, ctx.line = statistics, eps, line
        return _affine(input, statistics, weight, bias, eps).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        statistics, eps = ctx.statistics, ctx.eps
        mean, var, count = statistics.mean, statistics.var, statistics.count
        wants = ctx.needs_input_grad
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        # As if the statistics were constants: a sum over this rank's elements gives the gradients
        # of weight and bias, and they are just what the ranks must add up for the rest.
        if input.numel():
            grad_input, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad.to(mean.dtype),
                input.to(mean.dtype),
                *(scale, mean, var, None, None, False, eps),
                [wants[0], True, True],
            )
        else:  # torch's kernels divide by the number of elements, which ends a process on x86
            grad_input = torch.zeros_like(input, dtype=mean.dtype)
            grad_weight, grad_bias = torch.zeros_like(mean), torch.zeros_like(mean)
        if wants[0]:
            sums = ctx.line.add_up(torch.stack([grad_weight, grad_bias]))
            # The statistics move with every element of any rank: take away what that does.
            slope, shift = sums * (scale * (var + eps).rsqrt() / max(count, 1))
            grad_input -= _affine(input, statistics, slope, shift, eps)
            grad_input = grad_input.to(input.dtype)
        return (
            grad_input if wants[0] else None,
            grad_weight.to(weight.dtype) if wants[1] else None,
            grad_bias if wants[2] else None,
            *(None, None, None),
        )


def _affine(
    input: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """``weight * normalized input + bias``, in the type of the statistics."""
    mean, var = statistics.mean, statistics.var
    if not input.numel():
        return torch.zeros_like(input, dtype=mean.dtype)
    weight, bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
    return F.batch_norm(input.to(mean.dtype), mean, var, weight, bias, training=False, eps=eps)
