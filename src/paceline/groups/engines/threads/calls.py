"""What a rank that is a thread brings to a collective, and what it takes away."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...engine import COMBINE, REDUCING, Call
from .. import integer_mean

_ROOTED = frozenset({"reduce", "broadcast", "gather", "scatter"})
_EQUAL = frozenset({"all_reduce", "reduce", "broadcast", "barrier"})  # one size on all ranks


# -- what a rank brings -----------------------------------------------------------------------


@dataclass(frozen=True)
class RankShare:
    """One rank's share in a collective: flat views of its tensors, by the rank at the other end."""

    call: Call
    name: str  # of the collective, whichever form it was called in
    give: Sequence[Tensor]  # by receiver; empty where this rank gives nothing
    take: Sequence[Tensor]  # by sender; one for all of them together, or for the root; or empty
    uneven: bool  # sizes may differ by rank

    @classmethod
    def of(cls, call: Call, rank: int, size: int) -> RankShare:
        """Cut a call's tensors up."""
        name = call.kind.removesuffix("_single")
        if name in ("reduce_scatter", "scatter", "all_to_all"):
            give = _cut(call.inputs, call.input_splits, size)
        else:
            give = [flat(t) for t in call.inputs] * size  # the same for everybody
        if name in REDUCING or name in ("broadcast", "scatter"):
            take = [flat(t) for t in call.outputs]
        else:
            take = _cut(call.outputs, call.output_splits, size)
        if name == "broadcast":
            give, take = (give, []) if call.root == rank else ([], take)
        if name == "reduce" and call.root != rank:
            take = []
        single = call.kind.endswith("_single") and not call.input_splits and not call.output_splits
        return cls(call, name, give, take, uneven=not single and name not in _EQUAL)

    @property
    def essence(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        return self.name, self.dtype, self.call.reduction, self.call.root

    @property
    def dtype(self) -> torch.dtype | None:
        tensors = self.call.inputs or self.call.outputs
        return tensors[0].dtype if tensors else None

    @property
    def count(self) -> int:
        """Elements on this rank, of the tensor that is one and the same size everywhere."""
        tensors = self.call.outputs if "scatter" in self.name else self.call.inputs
        return sum(t.numel() for t in tensors)

    def wants(self, sender: int) -> Tensor:
        return self.take[sender if len(self.take) > 1 else 0]

    def tell(self, nbytes: int | None = None) -> str:
        """The call as errors show it; ``nbytes`` is what it has or expects between two ranks."""
        if self.name == "barrier":
            return "barrier()"
        parts = [f"{self.count} x {self.dtype}"]
        if nbytes is not None:
            parts.append(f"{nbytes} bytes between the two")
        if self.name in REDUCING:
            parts.append(self.call.reduction.upper())
        if self.name in _ROOTED:
            parts.append(f"root {self.call.root}")
        return f"{self.name}({', '.join(parts)})"


def flat(tensor: Tensor) -> Tensor:
    """Give a view of one dimension, without a graph."""
    return tensor.detach().view(-1)


def _cut(tensors: Sequence[Tensor], splits: Sequence[int], size: int) -> list[Tensor]:
    """One flat piece for each rank, of one tensor for each rank or of one for all."""
    if len(tensors) != 1 or size == 1:
        return [flat(t) for t in tensors]
    tensor = tensors[0]
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits:
        row = tensor.numel() // rows if rows else 0
        return list(flat(tensor).split([count * row for count in splits]))
    return list(flat(tensor).split([tensor.numel() // size] * size))


@dataclass(frozen=True)
class Difference:
    """Two calls that do not fit."""

    rank_a: int
    call_a: str
    rank_b: int
    call_b: str


def find_difference(parts: Sequence[RankShare]) -> Difference | None:
    """The first two ranks whose parts do not fit; the same answer wherever it is asked."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if part.essence != first.essence:
            return Difference(0, first.tell(), rank, part.tell())
    if not any(part.uneven for part in parts):
        for rank, part in enumerate(parts):
            if part.count != first.count:
                return Difference(0, first.tell(), rank, part.tell())
        return None
    for s, sender in enumerate(parts):
        for r, receiver in enumerate(parts):
            if not sender.give or not receiver.take:
                continue
            sent, wanted = sender.give[r].nbytes, receiver.wants(s).nbytes
            if sent != wanted:
                return Difference(s, sender.tell(sent), r, receiver.tell(wanted))
    return None


# -- what comes out ---------------------------------------------------------------------------


def results(parts: Sequence[RankShare], rank: int) -> list[Tensor]:
    """What ``rank`` takes, in the order of its part's ``take``, in memory of its own."""
    mine = parts[rank]
    if not mine.take:
        return []
    given = [part.give[rank] for part in parts if part.give]
    if mine.name in REDUCING:
        return [reduced(given, mine.call.reduction)]
    return [piece.clone() for piece in given]


def reduces(dtype: torch.dtype, reduction: str) -> bool:
    """Whether :func:`reduced` knows how."""
    if dtype.is_complex:
        return reduction in ("sum", "avg")
    if dtype is torch.bool:
        return reduction != "avg"
    return not (dtype.is_floating_point and reduction in ("band", "bor", "bxor"))


def reduced(tensors: Sequence[Tensor], reduction: str) -> Tensor:
    """Element by element over ``tensors`` in their order, so that every rank gets the same bits."""
    dtype = tensors[0].dtype
    if dtype.is_complex:
        real = reduced([torch.view_as_real(t) for t in tensors], reduction)
        return torch.view_as_complex(real)
    if dtype is torch.bool:  # a sum is "any", a product is "all"
        reduction = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(
            reduction, reduction
        )
    if reduction == "avg" and not dtype.is_floating_point:
        return integer_mean.mean(tensors)
    if dtype is torch.uint64:
        return _reduced_uint64(tensors, reduction)
    wide = _WIDE.get(dtype, dtype)
    if dtype.is_floating_point and dtype.itemsize < 4:
        wide = torch.float32
    total = functools.reduce(COMBINE[reduction], (t.to(wide) for t in tensors))
    if reduction == "avg":
        total = total / len(tensors)
    return total.clone() if total is tensors[0] else total.to(dtype)


_WIDE = {torch.uint16: torch.int64, torch.uint32: torch.int64}  # torch cannot add these themselves


def _reduced_uint64(tensors: Sequence[Tensor], reduction: str) -> Tensor:
    """All ``tensors`` in one, on int64, which has the same bits but for their order."""
    signed = [t.view(torch.int64) for t in tensors]
    if reduction in ("min", "max"):
        lowest = torch.iinfo(torch.int64).min
        return (reduced([t ^ lowest for t in signed], reduction) ^ lowest).view(torch.uint64)
    return reduced(signed, reduction).view(torch.uint64)


def settle(tensors: Sequence[Tensor]) -> None:
    """Wait for the GPU: ranks may be on different streams."""
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
