"""Matrices of low rank: which gradients are compressed, and the arithmetic. Nothing is sent here.

A gradient of ``n`` rows and ``m`` columns is approximated by ``P Qᵀ``, with ``rank`` columns each.
Gradients of one shape stand together, so that one batched call serves them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MatrixBatch:
    """Matrices of one shape, by their slots in the bucket."""

    rows: int
    columns: int
    rank: int
    slots: tuple[int, ...]

    @property
    def p_shape(self) -> tuple[int, int, int]:
        """The shape of all ``P`` together."""
        return len(self.slots), self.rows, self.rank

    @property
    def q_shape(self) -> tuple[int, int, int]:
        """The shape of all ``Q`` together."""
        return len(self.slots), self.columns, self.rank


@dataclass(frozen=True)
class LowRankPlan:
    """Which gradients of a bucket are approximated, and which are sent whole."""

    sizes: tuple[int, ...]  # of the gradients, in elements
    whole: tuple[int, ...]  # slots that travel as they are
    batches: tuple[MatrixBatch, ...]

    @property
    def numel(self) -> int:
        """Elements in the bucket."""
        return sum(self.sizes)

    @property
    def numel_sent(self) -> int:
        """Elements that travel instead."""
        low = sum(math.prod(b.p_shape) + math.prod(b.q_shape) for b in self.batches)
        return low + sum(self.sizes[slot] for slot in self.whole)


def plan_low_rank(shapes: Sequence[Sequence[int]], rank: int, min_rate: float) -> LowRankPlan:
    """Approximate what gets smaller by more than ``min_rate``; the rest travels whole."""
    whole: list[int] = []
    groups: dict[tuple[int, int], list[int]] = {}
    for slot, shape in enumerate(shapes):
        rows, columns = as_matrix(shape)
        if worth_it(rows, columns, min(rows, columns, rank), min_rate):
            groups.setdefault((rows, columns), []).append(slot)
        else:
            whole.append(slot)
    batches = [MatrixBatch(n, m, min(n, m, rank), tuple(slots)) for (n, m), slots in groups.items()]
    return LowRankPlan(tuple(map(math.prod, shapes)), tuple(whole), tuple(batches))


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a gradient: the first dimension, and all others together."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def worth_it(rows: int, columns: int, rank: int, min_rate: float) -> bool:
    """Whether ``P`` and ``Q`` are smaller than the matrix by more than ``min_rate``."""
    return (rows + columns) * rank * min_rate < rows * columns


def orthonormal(matrices: Tensor, epsilon: float = 0.0) -> Tensor:
    """Matrices whose columns span the same space and are orthonormal, in one call for the batch.

    Columns that depend on others, zeros for instance, are replaced by some that do not. With
    ``epsilon``, a column is the shorter the less of it was its own: ``norm / (norm + epsilon)``.
    """
    q, r = torch.linalg.qr(widened(matrices))
    if epsilon:
        norms = r.diagonal(dim1=-2, dim2=-1).abs()
        q = q * (norms / (norms + epsilon)).unsqueeze(-2)
    found: Tensor = q.to(matrices.dtype)
    return found


def left_factors(matrices: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Tensor]:
    """``P = M Q`` for each matrix, or batch of them; linear, so ranks may average it."""
    return [m @ q for m, q in zip(matrices, starts, strict=True)]


def right_factors(matrices: Sequence[Tensor], lefts: Sequence[Tensor]) -> list[Tensor]:
    """``Q = Mᵀ P`` for each, where all ranks have the same orthonormal ``P``; linear as well."""
    return [m.mT @ p for m, p in zip(matrices, lefts, strict=True)]


def widened(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that linear algebra supports."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def random_columns(columns: int, rank: int, seed: int) -> Tensor:
    """Where the search for ``Q`` begins: the same on every rank that is given the same seed."""
    return torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed))


@dataclass
class Seeds:
    """Random seeds. Each depends on its arguments alone, not on how many were drawn before."""

    seed: int

    def at(self, *occasion: int) -> int:
        """The seed for these arguments."""
        value = self.seed & _MASK
        for number in occasion:
            value = _mixed(value ^ _mixed(number + 1))
        return value & 0x7FFF_FFFF_FFFF_FFFF

    def get_state(self) -> tuple[str, int]:
        """The state, in the format of numpy's generators."""
        return type(self).__name__, self.seed


_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """Hash a number; neighbouring numbers get unrelated results (SplitMix64)."""
    value = (value + 0x9E37_79B9_7F4A_7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)
