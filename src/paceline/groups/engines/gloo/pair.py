"""Pair: two ranks over gloo that send each other what they have.

gloo's all-reduce goes to and fro twice, and each time its receiver first says that it is ready.
For two ranks one exchange moves the same bytes in half the trips. gloo's own exchanges send first
and receive later; then its word that it is ready can queue up behind its own data, and the two
directions run one after the other. Here the receive comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import Work as TorchWork
from torch.distributed import distributed_c10d as c10d

from ...._torch.autograd import end_with, is_profiling
from ...._torch.c10d import all_gather_flat
from ...engine import Call
from ...work import Together, Watcher, Work, Wrapped

_TAG = 0x70616366  # of the messages
_FEW = 64 * 1024  # bytes: so many are gathered, which costs one work instead of two
_MANY = 16 * 1024 * 1024  # more would take too much memory beside them


class Pair:
    """The two ranks of ``inner``, seen from one of them."""

    def __init__(self, inner: ProcessGroup, watcher: Watcher) -> None:
        self._inner, self._watcher = inner, watcher
        self._rank, self._peer = inner.rank(), 1 - inner.rank()

    def takes(self, call: Call) -> bool:
        """Whether this call is faster as an exchange of two ranks."""
        if call.kind not in self._WAYS or call.input_splits or call.output_splits:
            return False
        tensor = call.inputs[0]
        if tensor.device.type != "cpu" or not 0 < tensor.nbytes <= _MANY:
            return False
        if not call.reduction:
            return tensor.nbytes > _FEW
        wide = tensor.dtype in (torch.float32, torch.float64)
        return wide and call.reduction in ("sum", "avg")

    def start(self, call: Call) -> TorchWork:
        """Begin it; a profiler sees it under gloo's name."""
        if not is_profiling():
            return self._WAYS[call.kind](self, call)
        record = torch.autograd.profiler.record_function(f"gloo:{call.kind}")
        record.__enter__()
        work = self._WAYS[call.kind](self, call)
        end_with(record, work.get_future())
        return work

    def _all_reduce(self, call: Call) -> TorchWork:
        mine = call.outputs[0].view(-1)
        if mine.nbytes <= _FEW:
            both = mine.new_empty(2, mine.numel())
            work: Work = self._gather(both, mine, call)
            return _then_add(work, both[0], both[1], mine, call)
        theirs = torch.empty_like(mine)
        first, second = (mine, theirs) if self._rank == 0 else (theirs, mine)
        return _then_add(self._swap(mine, theirs, call), first, second, mine, call)

    def _reduce_scatter(self, call: Call) -> TorchWork:
        kept, parts = call.outputs[0].view(-1), call.inputs[0].view(2, -1)
        mine, theirs = parts[self._rank], torch.empty_like(parts[self._rank])
        first, second = (mine, theirs) if self._rank == 0 else (theirs, mine)
        return _then_add(self._swap(parts[self._peer], theirs, call), first, second, kept, call)

    def _all_gather(self, call: Call) -> TorchWork:
        mine, rows = call.inputs[0].view(-1), call.outputs[0].view(2, -1)
        _copy(rows[self._rank], mine)
        return self._swap(mine, rows[self._peer], call)

    def _all_to_all(self, call: Call) -> TorchWork:
        given, taken = call.inputs[0].view(2, -1), call.outputs[0].view(2, -1)
        work = self._swap(given[self._peer], taken[self._peer], call)
        _copy(taken[self._rank], given[self._rank])
        return work

    # Functions, not methods of this object: it would hold itself, and with it gloo's threads and
    # descriptors, until the garbage collector comes by.
    _WAYS: ClassVar[dict[str, Callable[[Any, Call], TorchWork]]] = {
        "all_reduce": _all_reduce,
        "reduce_scatter_single": _reduce_scatter,
        "all_gather_single": _all_gather,
        "all_to_all_single": _all_to_all,
    }

    def _gather(self, both: Tensor, mine: Tensor, call: Call) -> Work:
        options = c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=call.timeout)
        inner = all_gather_flat(self._inner, both.view(-1), mine, options)
        return Wrapped(inner, call.outputs, self._watcher)

    def _swap(self, mine: Tensor, theirs: Tensor, call: Call) -> Work:
        received = self._inner.recv([theirs], self._peer, _TAG)
        sent = self._inner.send([mine], self._peer, _TAG)
        return _PairExchange([received, sent], call.outputs, self._watcher, call.timeout)


class _PairExchange(Together):
    """What two ranks send each other; such works are told their time when they are waited for."""

    tells = False

    def __init__(
        self, works: list[TorchWork], outputs: Sequence[Tensor], watcher: Watcher, seconds: float
    ) -> None:
        super().__init__(works, outputs, watcher)
        self._seconds = seconds

    def _block(self, seconds: float | None) -> bool:
        return super()._block(self._seconds if seconds is None else seconds)


def _then_add(work: Work, first: Tensor, second: Tensor, out: Tensor, call: Call) -> Work:
    """Add in the order of ranks, so that both have the same bits."""

    def add() -> None:
        torch.add(first, second, out=out)
        if call.reduction == "avg":
            out.div_(2)

    return work.then_do(add)


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
