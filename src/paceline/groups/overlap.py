"""Tensors of one collective that lie in the same memory.

**Two outputs** are refused: which of the two results would stay there depends on the engine and on
time. **Inputs** may lie where outputs are written.

Other ranks may still read an input, or an engine may not have sent it yet, when the first output
is written over it. Such inputs are copied first. Where a rank's own part stays in its place (the
input of an all-gather inside its output, the output of a reduce-scatter inside its input) there is
nothing to lose, and nothing is copied. Each rank decides for itself: to the others a copy is like
any input.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from torch import Tensor

from ..errors import CollectiveArgumentError
from .engine import Call


def refuse_shared(kind: str, outputs: Sequence[Tensor], rank: int) -> None:
    """Raise if two of ``outputs`` share memory; of strided ones, only if they are the same."""
    places: dict[object, int] = {}
    dense: list[tuple[int, int, int]] = []
    for i, tensor in enumerate(outputs):
        if not tensor.nbytes:
            continue
        start = tensor.data_ptr()
        first = places.setdefault((start, tensor.shape, tensor.stride()), i)
        if first != i:
            _refuse(kind, rank, first, i)
        if tensor.is_contiguous():
            dense.append((start, start + tensor.nbytes, i))
    dense.sort()
    for (_, end, i), (start, _, j) in itertools.pairwise(dense):
        if start < end:
            _refuse(kind, rank, *sorted((i, j)))


def _refuse(kind: str, rank: int, first: int, second: int) -> None:
    expected, found = "memory of its own", f"that of outputs[{first}]"
    raise CollectiveArgumentError(rank, kind, f"outputs[{second}]", expected, found)


def keep_apart(call: Call, rank: int, size: int) -> None:
    """Replace inputs that outputs would overwrite by copies."""
    given, taken = call.inputs, call.outputs
    if len(given) == len(taken) == 1:
        if _meet(given[0], taken[0]) and not _stays(call, rank, size):
            call.inputs = [given[0].clone()]
        return
    hit = _Stretches(taken)
    if any(map(hit.touches, given)):
        own = _own_pair(call, rank)
        call.inputs = [t.clone() if hit.touches(t) and t is not own else t for t in given]


def _meet(a: Tensor, b: Tensor) -> bool:
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + b.nbytes and other < start + a.nbytes


def _stays(call: Call, rank: int, size: int) -> bool:
    """Whether one input and one output overlap only in what this rank has for itself."""
    given, taken = call.inputs[0], call.outputs[0]
    if call.kind == "all_gather_single":
        return given.data_ptr() == taken.data_ptr() + rank * given.nbytes
    if call.kind == "reduce_scatter_single":
        return taken.data_ptr() == given.data_ptr() + rank * taken.nbytes
    return size == 1 and _same(given, taken)


def _own_pair(call: Call, rank: int) -> Tensor | None:
    """The input that this rank has for itself, where it is the very memory it is taken to."""
    given = call.inputs[rank if len(call.inputs) > 1 else 0]
    taken = call.outputs[rank if len(call.outputs) > 1 else 0]
    return given if _same(given, taken) else None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.nbytes == b.nbytes


class _Stretches:
    """Where tensors lie in memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes)
        self._starts = [start for start, _ in ranges]
        self._ends = list(itertools.accumulate((end for _, end in ranges), max))

    def touches(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        before = bisect.bisect_left(self._starts, start + tensor.nbytes)
        return tensor.nbytes > 0 and before > 0 and self._ends[before - 1] > start
