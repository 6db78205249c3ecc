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
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import Work as TorchWork

from .work import Finished

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
_SUM = ReduceOp.SUM
_BY_IDENTITY = {id(op): name for name, op in TORCH_OPS.items()}  # hashing the op itself is slow


def reduction_of(op: ReduceOp | ReduceOp.RedOpType) -> str:
    """torch's reduction by our name."""
    name = _BY_IDENTITY.get(id(op))
    if name is not None:
        return name
    return "sum" if op == _SUM else REDUCTIONS[int(op.op)]  # type: ignore[union-attr]


def factor_of(op: ReduceOp) -> float | Tensor:
    """What a PREMUL_SUM multiplies by."""
    factor = op.__getstate__()[1]  # type: ignore[attr-defined]
    return factor.reshape(()) if isinstance(factor, Tensor) else factor


@dataclass(eq=False, slots=True)
class Call:
    """One collective, as hooks and engines receive it."""

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
        """The number of bytes that this rank contributes."""
        inputs = self.inputs
        return inputs[0].nbytes if len(inputs) == 1 else sum(t.nbytes for t in inputs)


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do. Ask this instead of trying and catching errors.

    Nothing else tells engines apart. The defaults promise nothing.
    """

    backend: str
    """Its name, for people. An engine that does not check agreement has it in its errors' text."""

    devices: frozenset[str]
    """Kinds of devices whose tensors it takes, such as ``cpu``."""

    in_place_memory: bool = False
    """``allocate`` gives memory that is reduced without a copy."""

    abortable: bool = False
    """``abort`` frees ranks that wait."""

    names_dead_ranks: bool = False
    """A dead peer is noticed at once and named."""

    checks_agreement: bool = False
    """Differing calls of two ranks are an error that names both."""

    may_crash_on_mismatch: bool = True
    """Where agreement is not checked: a difference may end a process before anybody can ask it, so
    the recorder tells the others of each new kind of call beforehand."""

    averages: bool = False
    """It divides by the number of ranks while it adds."""

    capturable: bool = False
    """Its calls can be part of a CUDA graph, and are made again with each replay."""

    peers: bool = True
    """Other ranks take part. Without them nobody is waited for, nothing is moved or watched, and
    tensors need no memory."""

    one_process: bool = False
    """The ranks are threads of one process."""

    quiet_starts: bool = False
    """A call may be started with ``quiet``: then no thread works at it, it moves in ``progress``
    and when somebody waits."""

    name_in_torch: str = ""
    """What torch's C++ is told instead of ``backend``, where it would look for an engine of its own
    under that name and not find it."""

    found_by_torch: bool = False
    """torch's C++ may find the engine itself in the group, through ``lend_to(group)``."""

    max_ranks: int | None = None
    """How many ranks a group can have; None where there is no limit."""


class Engine(Protocol):
    """Carries out the calls of a group on one rank.

    A subclass has to define ``capabilities`` and ``run``; the other methods have simple defaults.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Return what the engine can do."""
        ...

    def run(self, call: Call) -> None:
        """Carry out ``call`` and return when it is complete on this rank; raise if it fails."""
        ...

    def start(self, call: Call) -> TorchWork:
        """Start ``call``; the engine owns its tensors until the work is complete."""
        self.run(call)
        return Finished(call.outputs or call.inputs, call.root if call.kind == "recv" else -1)

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        """Return whether the engine can reduce tensors of ``dtype`` with ``op``."""
        return True

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized flat tensor in memory that the engine can use directly."""
        return torch.empty(numel, dtype=dtype)

    def progress(self) -> None:
        """Advance calls that have been started, without waiting, if no thread does so."""

    def abort(self) -> None:
        """Make all waiting threads raise, and stop working. Any thread may call it."""

    def shutdown(self) -> None:
        """Complete the calls that have been started and free all resources."""


class LentEngine(Engine, Protocol):
    """An engine with ``found_by_torch``."""

    def lend_to(self, group: ProcessGroup) -> None:
        """Let torch's C++ find it in ``group``, which was made around it."""
        ...
