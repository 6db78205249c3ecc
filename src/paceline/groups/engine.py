"""What stands between a Group and the bytes: the call it makes and the engine that carries it out.

A :class:`Call` is complete and checked: its tensors are dense, contiguous and on a device of the
engine, counts and ranks fit. An :class:`Engine` does it, now (``run``) or in its own time
(``start``). All ranks make the same calls in the same order; transfers between two ranks (``send``,
``recv``) are ordered only among themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed import Work as TorchWork

Kind = Literal[
    "all_reduce",  # inputs (t,), outputs (t,): the same tensor
    "reduce",  # the same; only the root's tensor changes
    "broadcast",  # inputs (t,), outputs (t,)
    "all_gather",  # inputs (t,), outputs one for each rank, of any sizes
    "all_gather_single",  # inputs (t,), outputs (flat,)
    "gather",  # inputs (t,), outputs one for each rank, on the root
    "scatter",  # inputs one for each rank, on the root; outputs (t,)
    "reduce_scatter",  # inputs one for each rank, outputs (t,)
    "reduce_scatter_single",  # inputs (flat,), outputs (t,)
    "all_to_all",  # one for each rank, both
    "all_to_all_single",  # inputs (flat,), outputs (flat,), cut by rows as the splits say
    "send",  # inputs (t,), root is the peer
    "recv",  # outputs (t,), root is the peer, -1 for any
    "barrier",
]
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"})

# One step of each reduction, in torch's arithmetic; an average is divided at the end.
COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

# By the number of torch's RedOpType.
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
TORCH_OPS = {name: getattr(ReduceOp, name.upper()) for name in REDUCTIONS}
_BY_IDENTITY = {id(op): name for name, op in TORCH_OPS.items()}  # hashing the op itself is slow


def reduction_of(op: ReduceOp | ReduceOp.RedOpType) -> str:
    """torch's reduction by our name."""
    name = _BY_IDENTITY.get(id(op))
    return name if name is not None else op.op.name.lower()  # type: ignore[union-attr]


def factor_of(op: ReduceOp) -> float | Tensor:
    """What a PREMUL_SUM multiplies by."""
    state = op.__getstate__()  # type: ignore[attr-defined]
    return state[1]  # type: ignore[no-any-return]


@dataclass(eq=False, slots=True)
class Call:
    """One collective, as hooks see it and engines get it."""

    kind: Kind
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    reduction: str = ""
    root: int = -1
    tag: int = 0
    input_splits: Sequence[int] = ()
    output_splits: Sequence[int] = ()
    timeout: float = 0.0  # seconds
    factor: float | Tensor | None = None  # what a PREMUL_SUM, by then a sum, multiplies by before
    quiet: bool = False  # a started call waits for progress() rather than for a thread
    sequence: int = 0  # how many calls this rank has made on the group, this one included

    @property
    def nbytes(self) -> int:
        """Bytes this rank gives."""
        return sum(t.nbytes for t in self.inputs)


@dataclass(frozen=True)
class Capabilities:
    """What a group's engine can do, so that nobody has to find out by an exception."""

    backend: str
    devices: frozenset[str]
    in_place_memory: bool  # allocate() gives memory that is reduced without a copy
    abortable: bool  # abort() frees ranks that wait
    names_dead_ranks: bool  # a dead peer is noticed at once and named
    checks_agreement: bool  # differing calls of two ranks are an error that names both
    averages: bool = False  # it divides by the number of ranks while it adds
    peers: bool = True  # other ranks take part; without them nobody is waited for
    max_ranks: int | None = None


class Engine(Protocol):
    """Carries out calls for one rank."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def run(self, call: Call) -> None:
        """Do it and return when it is done on this rank; raises what went wrong."""

    def start(self, call: Call) -> TorchWork:
        """Begin it; the engine owns the tensors until the work is done."""

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        """Whether tensors of ``dtype`` can be reduced so."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in the memory this engine likes best, with arbitrary contents."""

    def progress(self) -> None:
        """Move started calls along without waiting, where nobody else does."""

    def abort(self) -> None:
        """Free whoever waits here; the engine is of no use afterwards. Safe from any thread."""

    def shutdown(self) -> None:
        """Finish what was started and give everything back."""
