"""A hybrid engine's calls in numbers, for ranks to compare, and in bytes, for gloo to move.

Nothing here waits or sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ...._transport import DTYPE_CODES, KIND_CODES
from ...engine import REDUCTIONS, Call

HEAD = 6  # numbers in the description of a call
INLINE = 128  # bytes; so little travels with the description of the call, and nothing after it

DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_KINDS = {code: kind for kind, code in KIND_CODES.items()}
_PAIRWISE = frozenset({"gather", "scatter", "all_to_all"})  # each pair of ranks has its own size


def describe(call: Call, size: int) -> list[int]:
    """A call in numbers that are the same on all ranks if the calls fit together.

    Sizes that each pair of ranks has of its own are not among them; ``_agree_on_pairs`` has those.
    """
    kind = call.kind.removesuffix("_single")
    if kind == "barrier":
        return [KIND_CODES[kind], 0, 0, 0, 0, 0]
    tensor = (*call.inputs, *call.outputs)[0]
    counts = _counts(call, kind, size)
    count, digest = (counts[0], 0) if len(set(counts)) == 1 else (sum(counts), _digest(counts))
    reduction = REDUCTIONS.index(call.reduction) if call.reduction else -1
    return [KIND_CODES[kind], DTYPE_CODES[tensor.dtype], reduction, call.root, count, digest]


def is_inline(call: Call) -> bool:
    """Whether what any rank gives fits into the description; all ranks that agree decide alike."""
    if call.kind == "all_gather":
        return max(t.nbytes for t in call.outputs) <= INLINE
    kinds = ("all_reduce", "reduce", "broadcast", "all_gather_single")
    return call.kind in kinds and call.inputs[0].nbytes <= INLINE


def _counts(call: Call, kind: str, size: int) -> list[int]:
    """Elements, for each rank where they may differ between ranks."""
    if kind in _PAIRWISE:
        return [0]
    if call.kind == "reduce_scatter_single":
        return [call.outputs[0].numel()]
    several = {"all_gather": call.outputs, "reduce_scatter": call.inputs}.get(call.kind)
    return [t.numel() for t in several or call.inputs]


def _digest(counts: Sequence[int]) -> int:
    told = ",".join(map(str, counts)).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=7).digest(), "big")


def tell(row: list[int]) -> str:
    """A description in words."""
    kind, dtype, reduction, root, count, digest = row
    name = _KINDS[kind]
    if name == "barrier":
        return "barrier()"
    parts = [str(DTYPES[dtype])]
    if name not in _PAIRWISE:
        parts[0] = f"{count} x {parts[0]}"
    if digest:
        parts[0] += f" over all ranks, in unequal parts ({digest:x})"
    if reduction >= 0:
        parts.append(REDUCTIONS[reduction].upper())
    if root >= 0:
        parts.append(f"root {root}")
    return f"{name}({', '.join(parts)})"


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` as a flat tensor of bytes."""
    flat = tensor.reshape(-1)
    # A single element is contiguous whatever its stride, which torch does not take for bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def pairs(call: Call, rank: int, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """The bytes this rank has for each rank, and where it takes those of each."""
    nothing = torch.empty(0, dtype=torch.uint8)
    give, take = [nothing] * size, [nothing] * size
    if call.kind == "all_to_all_single":
        return (
            _cut(call.inputs[0], call.input_splits, size),
            _cut(call.outputs[0], call.output_splits, size),
        )
    if call.kind == "gather":
        give[call.root] = as_bytes(call.inputs[0])
        return give, [as_bytes(t) for t in call.outputs] or take
    if call.kind == "scatter":
        take[call.root] = as_bytes(call.outputs[0])
        return [as_bytes(t) for t in call.inputs] or give, take
    return [as_bytes(t) for t in call.inputs], [as_bytes(t) for t in call.outputs]


def _cut(flat: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """The bytes of each rank's rows."""
    rows = flat.shape[0] if flat.dim() else 1
    row = flat.nbytes // rows if rows else 0
    return list(as_bytes(flat).split([n * row for n in splits or [rows // size] * size]))
