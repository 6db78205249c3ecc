"""The shm engine: a group's calls as operations on shared memory (``_transport/shm.c``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import Store

from ..._transport import (
    DTYPE_CODES,
    KIND_CODES,
    MAX_RANKS,
    REDUCTION_CODES,
    Operation,
    Shm,
    byte_table,
    pointer_table,
)
from ..engine import Call, Capabilities
from ..work import Finished, Watcher, Work

log = logging.getLogger(__name__)

_AS_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class ShmWork(Work):
    """An operation the engine has."""

    def __init__(self, engine: ShmEngine, operation: Operation, outputs: Sequence[Tensor]) -> None:
        super().__init__(outputs)
        self._engine = engine
        self._operation = operation

    def _block(self, seconds: float | None) -> bool:
        return self._engine.shm.wait(self._operation, seconds)

    def _poll(self) -> bool:
        return self._engine.shm.done(self._operation)

    def _watcher(self) -> Watcher:
        return self._engine.watcher

    def source_rank(self) -> int:
        return int(self._operation.source)


# (kind, dtype, reduction, itemsize, root, tag, count, input, output, timeout, operation)
_Arguments = tuple[int, int, int, int, int, int, int, int, int, float, Operation | None]


class ShmEngine:
    """Ranks of one host, each with every other's memory mapped."""

    def __init__(self, shm: Shm) -> None:
        self.shm = shm
        self.watcher = Watcher("paceline-shm-futures")
        self._full = False  # it was said that shared memory has run out
        self.capabilities = Capabilities(
            backend="shm",
            devices=frozenset({"cpu"}),
            in_place_memory=True,
            abortable=True,
            names_dead_ranks=True,
            checks_agreement=True,
            averages=True,
            quiet_starts=True,
            max_ranks=MAX_RANKS,
        )

    @classmethod
    def open(
        cls, store: Store, rank: int, size: int, timeout: timedelta, *, window: int = 0
    ) -> ShmEngine:
        """Meet the other ranks; every rank calls it. ``window``: bytes per step, 0 to choose."""
        return cls(Shm.open(store, rank, size, timeout, window=window))

    # -- calls as operations ------------------------------------------------------------------

    def run(self, call: Call) -> None:
        operation = self.shm.run(*self._DESCRIBE[call.kind](self, call))
        if call.kind == "recv":
            call.root = operation.source

    def start(self, call: Call) -> Work:
        arguments = self._DESCRIBE[call.kind](self, call)
        operation = self.shm.start(call, call.quiet, *arguments)
        if operation is None:
            return Finished(call.outputs or call.inputs)
        work = ShmWork(self, operation, call.outputs or call.inputs)
        if call.kind == "recv":
            work.is_message = True
        return work

    def _reduction(self, call: Call) -> _Arguments:
        given, result = call.inputs[0], call.outputs[0]
        dtype, count = given.dtype, given.numel()
        if dtype in _AS_REAL:
            dtype, count = _AS_REAL[dtype], 2 * count
        return (
            KIND_CODES[call.kind],
            DTYPE_CODES[dtype],
            REDUCTION_CODES[call.reduction],
            dtype.itemsize,
            call.root,
            0,
            count,
            given.data_ptr(),
            result.data_ptr(),
            call.timeout,
            None,
        )

    def _move(
        self,
        call: Call,
        kind: str,
        like: Tensor,
        count: int,
        operation: Operation | None = None,
    ) -> _Arguments:
        return (
            KIND_CODES[kind],
            DTYPE_CODES[like.dtype],
            0,
            like.element_size(),
            call.root,
            call.tag,
            count,
            call.inputs[0].data_ptr() if call.inputs else 0,
            call.outputs[0].data_ptr() if call.outputs else 0,
            call.timeout,
            operation,
        )

    def _broadcast(self, call: Call) -> _Arguments:
        return self._move(call, "broadcast", call.inputs[0], call.inputs[0].numel())

    def _all_gather_single(self, call: Call) -> _Arguments:
        return self._move(call, "all_gather", call.inputs[0], call.inputs[0].numel())

    def _gather(self, call: Call) -> _Arguments:
        given = call.inputs[0]
        operation = None
        if call.outputs:
            operation = _with_tables(take=call.outputs)
        return self._move(call, call.kind, given, given.numel(), operation)

    def _scatter(self, call: Call) -> _Arguments:
        result = call.outputs[0]
        operation = _with_tables(give=call.inputs) if call.inputs else None
        return self._move(call, "scatter", result, result.numel(), operation)

    def _reduce_scatter(self, call: Call) -> _Arguments:
        result = call.outputs[0]
        operation = _with_tables(give=call.inputs)
        operation.take = byte_table([result.nbytes] * self.shm.size)
        return self._reducing_scatter(call, operation)

    def _reduce_scatter_single(self, call: Call) -> _Arguments:
        return self._reducing_scatter(call, None)

    def _reducing_scatter(self, call: Call, operation: Operation | None) -> _Arguments:
        result = call.outputs[0]
        dtype, count = result.dtype, result.numel()
        if dtype in _AS_REAL:
            dtype, count = _AS_REAL[dtype], 2 * count
        return (
            KIND_CODES["reduce_scatter"],
            DTYPE_CODES[dtype],
            REDUCTION_CODES[call.reduction],
            dtype.itemsize,
            call.root,
            0,
            count,
            call.inputs[0].data_ptr(),
            result.data_ptr(),
            call.timeout,
            operation,
        )

    def _all_to_all(self, call: Call) -> _Arguments:
        operation = _with_tables(give=call.inputs, take=call.outputs)
        return self._move(call, "all_to_all", call.inputs[0], 0, operation)

    def _all_to_all_single(self, call: Call) -> _Arguments:
        given, result = call.inputs[0], call.outputs[0]
        if not call.input_splits and not call.output_splits:
            return self._move(call, "all_to_all", given, given.numel() // self.shm.size)
        operation = Operation()
        give = _cut(given, call.input_splits, self.shm.size)
        take = _cut(result, call.output_splits, self.shm.size)
        operation.give, operation.take = byte_table(give[1]), byte_table(take[1])
        operation.src, operation.dst = pointer_table(give[0]), pointer_table(take[0])
        return self._move(call, "all_to_all", given, 0, operation)

    def _transfer(self, call: Call) -> _Arguments:
        tensor = call.inputs[0] if call.inputs else call.outputs[0]
        # who sent it is read afterwards, when another thread could have a spare operation again
        operation = Operation() if call.kind == "recv" else None
        return self._move(call, call.kind, tensor, tensor.numel(), operation)

    def _barrier(self, call: Call) -> _Arguments:
        return (KIND_CODES["barrier"], 0, 0, 1, -1, 0, 0, 0, 0, call.timeout, None)

    _DESCRIBE: ClassVar[dict[str, Callable[[ShmEngine, Call], _Arguments]]] = {
        "all_reduce": _reduction,
        "reduce": _reduction,
        "broadcast": _broadcast,
        "all_gather": _gather,
        "all_gather_single": _all_gather_single,
        "gather": _gather,
        "scatter": _scatter,
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter_single": _reduce_scatter_single,
        "all_to_all": _all_to_all,
        "all_to_all_single": _all_to_all_single,
        "send": _transfer,
        "recv": _transfer,
        "barrier": _barrier,
    }

    # -- the rest -----------------------------------------------------------------------------

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        if dtype in _AS_REAL:
            return reduction in ("sum", "avg")
        return dtype in DTYPE_CODES and self.shm.reduces(dtype, reduction)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Shared memory; where this rank has no more of it, its own, which the engine copies.

        Others need not know: each call says where its tensor lies.
        """
        try:
            return self.shm.allocate(numel, dtype)
        except MemoryError as error:
            try:
                tensor = torch.empty(numel, dtype=dtype)
            except RuntimeError:
                raise error from None
            if not self._full:
                log.warning("%s; what does not fit is in ordinary memory, and copied", error)
            self._full = True
            return tensor

    def progress(self) -> None:
        self.shm.poke()

    def abort(self) -> None:
        self.shm.abort()

    def shutdown(self) -> None:
        self.shm.close()
        self.watcher.close()


def _with_tables(
    *, give: Sequence[Tensor] | None = None, take: Sequence[Tensor] | None = None
) -> Operation:
    operation = Operation()
    if give is not None:
        operation.src = pointer_table([t.data_ptr() for t in give])
        operation.give = byte_table([t.nbytes for t in give])
    if take is not None:
        operation.dst = pointer_table([t.data_ptr() for t in take])
        operation.take = byte_table([t.nbytes for t in take])
    return operation


def _cut(flat: Tensor, splits: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """Where each rank's rows begin in memory, and how many bytes they are."""
    rows = flat.shape[0]
    splits = splits or [rows // size] * size
    row = math.prod(flat.shape[1:]) * flat.element_size()
    pointers, at = [], flat.data_ptr()
    for count in splits:
        pointers.append(at)
        at += count * row
    return pointers, [count * row for count in splits]
