"""PowerSGD: gradients as products of two thin matrices (Vogels et al., 2019, arXiv:1905.13727).

For a gradient M, averaged over ranks but never formed: ``P = M Q`` is averaged and made orthonormal
on every rank alike; ``Q = Mᵀ P`` is averaged; ``P Qᵀ`` is M projected on the columns of P. Two
collectives for a bucket: the first carries every P and, with them, the gradients that are too small
to be worth it; the second carries every Q.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .._exchange import (
    LowRankPlan,
    MatrixBatch,
    mean_later,
    mean_now,
    orthonormal,
    plan_low_rank,
    random_columns,
    widened,
)
from ..groups import group_or_default
from .powersgd_state import PowerSGDState


def powerSGD_hook(
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, approximating each gradient by a low-rank matrix."""
    group, buffer = group_or_default(state.process_group), bucket.buffer()
    indices = state.indices_of(bucket.parameters())
    if state.averages_plainly or buffer.is_sparse:
        state.maybe_increase_iter(bucket)
        return mean_later(group, buffer)
    shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
    layout = plan_low_rank(shapes, state.matrix_approximation_rank, state.min_compression_rate)
    exchange = _prepare(state, bucket, group, layout, indices)
    return state.start(lambda: exchange.run(buffer), buffer.device)


def batched_powerSGD_hook(
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as one square low-rank matrix: faster, and usually much less precise."""
    group, buffer = group_or_default(state.process_group), bucket.buffer()
    if state.averages_plainly or buffer.is_sparse:
        state.maybe_increase_iter(bucket)
        return mean_later(group, buffer)
    side = math.ceil(math.sqrt(buffer.numel()))
    rank = min(side, state.matrix_approximation_rank)
    layout = LowRankPlan((side * side,), (), (MatrixBatch(side, side, rank, (0,)),))
    exchange = _prepare(state, bucket, group, layout, [bucket.index()])

    def job() -> Tensor:
        square = buffer.new_zeros(side * side)
        square[: buffer.numel()] = buffer
        return buffer.copy_(exchange.run(square)[: buffer.numel()])

    return state.start(job, buffer.device)


def _prepare(
    state: PowerSGDState,
    bucket: Any,
    group: ProcessGroup,
    layout: LowRankPlan,
    indices: Sequence[int],
) -> "_PowerSGDExchange":
    """All that is taken from the state's counters, which go on before the job runs."""
    state.count(layout, last=bucket.is_last())
    seeds = [state.seed_for(index) for index in indices]
    state.maybe_increase_iter(bucket)
    return _PowerSGDExchange(
        state, group, layout, indices, seeds, getattr(bucket, "weight", 1.0) or 1.0
    )


@dataclass
class _PowerSGDExchange:
    """The communication of one bucket."""

    state: PowerSGDState
    group: ProcessGroup
    layout: LowRankPlan
    indices: Sequence[int]  # of the parameters, by slot
    seeds: Sequence[int]
    weight: float  # that this rank's gradients were multiplied by; errors are kept without it

    def run(self, buffer: Tensor) -> Tensor:
        """Put the average into ``buffer``, approximately."""
        parts = list(buffer.split(self.layout.sizes))
        batches = self.layout.batches
        gradients = [self._with_errors(batch, parts) for batch in batches]
        first = [self._first_q(batch, buffer) for batch in batches]
        ps = [self._times(m, q) for m, q in zip(gradients, first, strict=True)]
        whole = [parts[slot] for slot in self.layout.whole]
        averaged = self._average([*whole, *ps], buffer.dtype)
        for part, mean in zip(whole, averaged, strict=False):
            part.copy_(mean)
        epsilon = self.state.orthogonalization_epsilon
        ps = [orthonormal(widened(p), epsilon) for p in averaged[len(whole) :]]
        pairs = zip(gradients, ps, strict=True)
        qs = [self._times([m.t() for m in ms], p) for ms, p in pairs]
        qs = [widened(q) for q in self._average(qs, buffer.dtype)]
        for batch, ms, p, q in zip(batches, gradients, ps, qs, strict=True):
            self._finish(batch, parts, ms, p, q)
        return buffer

    def _with_errors(self, batch: MatrixBatch, parts: Sequence[Tensor]) -> list[Tensor]:
        """The batch's gradients, each with what was left out of it before."""
        found = []
        for slot in batch.slots:
            matrix = widened(parts[slot]).view(batch.rows, batch.columns)
            error = self.state.error_dict.get(self.indices[slot])
            if error is not None and error.numel() == matrix.numel():
                matrix = torch.add(matrix, error.to(matrix).view_as(matrix), alpha=self.weight)
            found.append(matrix)
        return found

    def _first_q(self, batch: MatrixBatch, like: Tensor) -> Tensor:
        """Start from the ``Q`` of the last step, or from random columns."""
        found = []
        for slot in batch.slots:
            q = self.state.q_memory_dict.get(self.indices[slot])
            if q is None or q.shape != batch.q_shape[1:] or not self.state.warm_start:
                q = random_columns(batch.columns, batch.rank, self.seeds[slot])
            found.append(q.to(like.device, widened(like[:0]).dtype))
        return orthonormal(torch.stack(found), self.state.orthogonalization_epsilon)

    def _times(self, matrices: list[Tensor], thin: Tensor) -> Tensor:
        if self.state.batch_tensors_with_same_shape and len(matrices) > 1:
            return torch.bmm(torch.stack(matrices), thin)
        return torch.stack([m @ t for m, t in zip(matrices, thin, strict=True)])

    def _average(self, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The means of several tensors, which travel together, in the bucket's type."""
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
        parts = mean_now(self.group, flat).split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def _finish(
        self,
        batch: MatrixBatch,
        parts: Sequence[Tensor],
        gradients: list[Tensor],
        p: Tensor,
        q: Tensor,
    ) -> None:
        """Multiply out, and remember, unless somebody's gradient was not a number.

        A step that a gradient scaler will skip must not spoil all that follow. What is not a number
        on one rank has come to all of them through P, so they decide alike.
        """
        remembers = bool(p.isfinite().all() & q.isfinite().all())
        for at, slot in enumerate(batch.slots):
            index, result = self.indices[slot], p[at] @ q[at].t()
            if remembers and self.state.use_error_feedback:
                error = gradients[at] - result
                self.state.error_dict[index] = error.div_(self.weight).view(-1)
            if remembers and self.state.warm_start:
                self.state.p_memory_dict[index] = p[at].clone()
                self.state.q_memory_dict[index] = q[at].clone()
            parts[slot].copy_(result.view(-1))  # now: without errors the gradient was still there
