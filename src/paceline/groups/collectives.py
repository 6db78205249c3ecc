# mypy: disable-error-code="override, assignment"
# (torch's stubs give its methods narrower signatures, and other ones in every version)
"""The collectives of a Group: one method each.

**Calling.** Every collective takes a tensor, checks its arguments before anything is sent, and
returns a Work that is already done. With ``async_op=True`` it returns at once; ``work.wait()``
blocks. Called the way torch calls a group (lists of tensors, or an options object such as
``AllreduceOptions``) a method behaves as torch's does and returns at once. ``timeout`` is for
this call alone. All ranks make the same calls in the same order; ``send`` and ``recv`` are ordered
only among themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed import Work as TorchWork
from torch.distributed import distributed_c10d as c10d

from ..errors import CollectiveArgumentError
from ..recorder import events
from .calling import CallMaking, Op, Timeout
from .dense import make_dense
from .engine import Call, Kind, reduction_of
from .work import Finished

_OPTIONS = frozenset(
    {
        c10d.AllreduceOptions,
        c10d.AllreduceCoalescedOptions,
        c10d.BroadcastOptions,
        c10d.ReduceOptions,
        c10d.AllgatherOptions,
        c10d.GatherOptions,
        c10d.ScatterOptions,
        c10d.ReduceScatterOptions,
        c10d.AllToAllOptions,
        c10d.BarrierOptions,
    }
)
_LISTS = (list, tuple)
_NO_TIME = timedelta(0)


class Collectives(CallMaking):
    """The collectives of a :class:`Group`."""

    # -- reductions ---------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensor | Sequence[Tensor],
        op: Op | c10d.AllreduceOptions = ReduceOp.SUM,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Reduce ``tensor`` over all ranks, in place."""
        if opts is not None:
            op = opts
        if type(op) is c10d.AllreduceOptions:  # as _read has it; most calls of torch's are these
            async_op = op.asyncOp if async_op is None else async_op
            if (given := op.timeout) > _NO_TIME:
                timeout = given
            op = op.reduceOp
        elif type(op) in _OPTIONS:
            op, timeout, async_op = _read(op, timeout, async_op)
        tensors, async_op = _listed(tensor, async_op)
        if len(tensors) != 1:
            return self.make_calls(_in_place(tensors), timeout, async_op, op)
        if isinstance(tensors[0], Tensor) and tensors[0].is_sparse:
            return self._sparse_all_reduce(tensors[0], op, timeout)
        return self.make_call("all_reduce", tensors, tensors, timeout, async_op, op)

    def _sparse_all_reduce(self, tensor: Tensor, op: Any, timeout: Any) -> TorchWork:
        """Sum sparse tensors: their entries are gathered and added, whatever their number."""
        reduction = reduction_of(op)
        if reduction not in ("sum", "avg"):
            raise CollectiveArgumentError(
                self._rank, "all_reduce", "op", "SUM or AVG for a sparse tensor", reduction.upper()
            )
        own = tensor.coalesce()
        counts = torch.empty(self._size, dtype=torch.int64, device=tensor.device)
        self.all_gather_single(counts, counts.new_tensor([own.values().shape[0]]), timeout)
        entries = [int(n) for n in counts.tolist()]
        indices = [own.indices().new_empty(n, own.sparse_dim()) for n in entries]
        values = [own.values().new_empty(n, *own.values().shape[1:]) for n in entries]
        self.all_gather(indices, own.indices().t().contiguous(), timeout)
        self.all_gather(values, own.values(), timeout)
        with torch.sparse.check_sparse_tensor_invariants(False):  # torch warns unless one chooses
            total = torch.sparse_coo_tensor(
                torch.cat(indices).t(), torch.cat(values), tensor.shape
            ).coalesce()
        with torch.no_grad():
            tensor.copy_(total / self._size if reduction == "avg" else total)
        return Finished((tensor,)).marked()

    def start_all_reduce(
        self, tensor: Tensor, op: Op = ReduceOp.SUM, *, quiet: bool = False
    ) -> TorchWork:
        """Start :meth:`all_reduce` and return a Work.

        With ``quiet`` no thread of the engine works on it, if the engine allows that: it advances
        in :meth:`~Group.progress` and in ``wait``.
        """
        tensors = (tensor,)
        return self.make_call("all_reduce", tensors, tensors, None, True, op, quiet=quiet)

    def repeated_all_reduce(
        self, tensor: Tensor, op: Op = ReduceOp.SUM, *, quiet: bool = False
    ) -> Callable[[], TorchWork]:
        """Return a function that calls :meth:`start_all_reduce` on this tensor, many times.

        Arguments are checked here, once.
        """
        tensors, reduction = (tensor,), reduction_of(op)
        call = Call("all_reduce", tensors, tensors, reduction, timeout=self._timeout)
        self._checker.check(call)
        nbytes, usual = call.nbytes, make_dense(call, self._rank) is None

        def start() -> TorchWork:
            special = self._closed or self._hooks or self._coalescing is not None
            if special or not usual or reduction == "premul_sum":
                return self.start_all_reduce(tensor, op, quiet=quiet)
            call = Call("all_reduce", tensors, tensors, reduction, timeout=self._timeout)
            call.sequence, call.quiet = next(self._sequence), quiet
            self.traffic.note("all_reduce", nbytes)
            return self._start(call, None if self.board is None else self.board.begin(call, nbytes))

        return start

    def captured_all_reduce(
        self, tensor: Tensor, op: Op = ReduceOp.SUM
    ) -> tuple[TorchWork, Callable[[], events.Entry | None]]:
        """Add an all-reduce to a CUDA graph that is being captured; it is sent at each replay.

        Returns its Work and a function. Call the function at each replay: it counts and records
        the collective, and returns the record.
        """
        tensors, reduction = (tensor,), reduction_of(op)
        call = Call("all_reduce", tensors, tensors, reduction, timeout=self._timeout)
        self._checker.check(call)
        nbytes = call.nbytes

        def note() -> events.Entry | None:
            call.sequence = next(self._sequence)
            self.traffic.note("all_reduce", nbytes)
            if self.board is None:
                return None
            entry = self.board.begin(call, nbytes)
            entry.finished = events.now()
            return entry

        return self._engine.start(call), note

    @property
    def refuses_capture(self) -> str:
        """Return why collectives cannot be captured in a CUDA graph; empty if they can."""
        if not self._engine.capabilities.capturable:
            return f"calls over {self._engine.capabilities.backend} cannot be captured"
        if self._hooks:
            return "the group has hooks, which are called with each call"
        return "the group checks each call beforehand" if self._strict else ""

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        op: Op | c10d.AllreduceCoalescedOptions = ReduceOp.SUM,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Reduce several tensors over all ranks, in place."""
        if opts is not None or type(op) in _OPTIONS:
            op, timeout, async_op = _read(opts or op, timeout, async_op)
        return self.make_calls(_in_place(tensors), timeout, async_op, op)

    def reduce(
        self,
        tensor: Tensor | Sequence[Tensor],
        root: int | c10d.ReduceOptions = 0,
        op: Op = ReduceOp.SUM,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Reduce ``tensor`` over all ranks into that of the root; others are unchanged."""
        if opts is not None or type(root) in _OPTIONS:
            opts = opts or root
            op, timeout, async_op = _read(opts, timeout, async_op)
            root = opts.rootRank
        tensors, async_op = _listed(tensor, async_op)
        return self.make_call("reduce", tensors, tensors, timeout, async_op, op, root=root)

    def reduce_scatter(
        self,
        output: Tensor | Sequence[Tensor],
        inputs: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        op: Op | c10d.ReduceScatterOptions = ReduceOp.SUM,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Reduce ``inputs[r]`` over all ranks into ``output`` of rank r; sizes may differ by r."""
        if opts is not None or type(op) in _OPTIONS:
            op, timeout, async_op = _read(opts or op, timeout, async_op)
        outputs, async_op = _listed(output, async_op)
        return self.make_call("reduce_scatter", _inner(inputs), outputs, timeout, async_op, op)

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        op: Op | c10d.ReduceScatterOptions = ReduceOp.SUM,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Reduce one tensor over all ranks; each rank gets an equal part of the result."""
        if opts is not None or type(op) in _OPTIONS:
            op, timeout, async_op = _read(opts or op, timeout, async_op)
        return self.make_call("reduce_scatter_single", (input,), (output,), timeout, async_op, op)

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: Op | c10d.ReduceScatterOptions = ReduceOp.SUM,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Call :meth:`reduce_scatter_single` for several tensors at once."""
        if opts is not None or type(op) in _OPTIONS:
            op, timeout, async_op = _read(opts or op, timeout, async_op)
        self._same_length("reduce_scatter_single_coalesced", outputs, inputs)
        pairs = zip(inputs, outputs, strict=True)
        calls = [("reduce_scatter_single", (i,), (o,)) for i, o in pairs]
        return self.make_calls(calls, timeout, async_op, op)

    def start_reduce_scatter(
        self, output: Tensor, input: Tensor, op: Op = ReduceOp.SUM, *, quiet: bool = False
    ) -> TorchWork:
        """Start :meth:`reduce_scatter_single`; ``quiet`` is that of :meth:`start_all_reduce`.

        ``output`` may be this rank's part of ``input``.
        """
        kind: Kind = "reduce_scatter_single"
        return self.make_call(kind, (input,), (output,), None, True, op, quiet=quiet)

    # -- moving -------------------------------------------------------------------------------

    def broadcast(
        self,
        tensor: Tensor | Sequence[Tensor],
        root: int | c10d.BroadcastOptions = 0,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Copy ``tensor`` of the root into ``tensor`` of all other ranks."""
        if opts is not None or type(root) in _OPTIONS:
            opts = opts or root
            _, timeout, async_op = _read(opts, timeout, async_op)
            root = opts.rootRank
        tensors, async_op = _listed(tensor, async_op)
        return self.make_call("broadcast", tensors, tensors, timeout, async_op, root=root)

    def all_gather(
        self,
        outputs: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        tensor: Tensor | Sequence[Tensor],
        timeout: Timeout | c10d.AllgatherOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Copy ``tensor`` of each rank into ``outputs`` on all ranks; sizes may differ per rank."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        tensors, async_op = _listed(tensor, async_op)
        return self.make_call("all_gather", tensors, _inner(outputs), timeout, async_op)

    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        timeout: Timeout | c10d.AllgatherOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Concatenate ``input`` of all ranks into one ``output`` on all ranks."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        return self.make_call("all_gather_single", (input,), (output,), timeout, async_op)

    def all_gather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        timeout: Timeout | c10d.AllgatherOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Gather several tensors; ``output_lists[r][i]`` receives ``inputs[i]`` of rank r."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        for row in output_lists:
            self._same_length("all_gather_coalesced", row, inputs)
        columns = zip(*output_lists, strict=True)
        calls = [("all_gather", (i,), outs) for i, outs in zip(inputs, columns, strict=True)]
        return self.make_calls(calls, timeout, async_op)

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        timeout: Timeout | c10d.AllgatherOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Call :meth:`all_gather_single` for several tensors at once."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        self._same_length("all_gather_single_coalesced", outputs, inputs)
        pairs = zip(inputs, outputs, strict=True)
        return self.make_calls(
            [("all_gather_single", (i,), (o,)) for i, o in pairs], timeout, async_op
        )

    def gather(
        self,
        outputs: Sequence[Tensor] | Sequence[Sequence[Tensor]] | None,
        tensor: Tensor | Sequence[Tensor],
        root: int | c10d.GatherOptions = 0,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Copy ``tensor`` of each rank into ``outputs`` on the root; it is empty on other ranks."""
        if opts is not None or type(root) in _OPTIONS:
            opts = opts or root
            _, timeout, async_op = _read(opts, timeout, async_op)
            root = opts.rootRank
        tensors, async_op = _listed(tensor, async_op)
        return self.make_call("gather", tensors, _inner(outputs), timeout, async_op, root=root)

    def gather_single(
        self,
        output: Tensor | None,
        input: Tensor,
        root: int | c10d.GatherOptions = 0,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Concatenate ``input`` of all ranks into one ``output`` on the root."""
        if opts is not None or type(root) in _OPTIONS:
            opts = opts or root
            _, timeout, async_op = _read(opts, timeout, async_op)
            root = opts.rootRank
        rows = self._rows(output, input) if root == self._rank else ()
        return self.make_call("gather", (input,), rows, timeout, async_op, root=root)

    gather_into_tensor = gather_single

    def _rows(self, output: Tensor | None, like: Tensor) -> Sequence[Tensor]:
        """The parts of ``output`` that take each rank's tensor."""
        numel = self._size * like.numel()
        if output is None or output.numel() != numel or not output.is_contiguous():
            found = "nothing" if output is None else f"{output.numel()} elements"
            if output is not None and not output.is_contiguous():
                found += ", not contiguous"
            expected = f"a contiguous tensor of {numel} elements, {self._size} times the input"
            raise CollectiveArgumentError(self._rank, "gather_single", "output", expected, found)
        return output.view(self._size, *like.shape).unbind()

    def scatter(
        self,
        output: Tensor | Sequence[Tensor],
        inputs: Sequence[Tensor] | Sequence[Sequence[Tensor]] | None,
        root: int | c10d.ScatterOptions = 0,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Copy ``inputs[r]`` of the root into ``output`` of rank r; it is empty on other ranks."""
        if opts is not None or type(root) in _OPTIONS:
            opts = opts or root
            _, timeout, async_op = _read(opts, timeout, async_op)
            root = opts.rootRank
        outputs, async_op = _listed(output, async_op)
        return self.make_call("scatter", _inner(inputs), outputs, timeout, async_op, root=root)

    def all_to_all(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        timeout: Timeout | c10d.AllToAllOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Copy ``inputs[r]`` of this rank into ``outputs[this rank]`` of rank r."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        return self.make_call("all_to_all", inputs, outputs, timeout, async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        timeout: Timeout | c10d.AllToAllOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Send rows of ``input`` to each rank, and receive rows of ``output`` from each.

        The split sizes count rows (the first dimension), one size per rank; by default rows are
        divided equally.
        """
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        give = tuple(input_split_sizes) if input_split_sizes else ()
        take = tuple(output_split_sizes) if output_split_sizes else ()
        return self.make_call(
            "all_to_all_single", (input,), (output,), timeout, async_op, splits=(give, take)
        )

    def send(
        self,
        tensor: Tensor | Sequence[Tensor],
        dst: int,
        tag: int = 0,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Send ``tensor`` to rank ``dst``, which calls :meth:`recv` with the same ``tag``."""
        tensors, async_op = _listed(tensor, async_op)
        return self.make_call("send", tensors, (), timeout, async_op, root=dst, tag=tag)

    def recv(
        self,
        tensor: Tensor | Sequence[Tensor],
        src: int | None = None,
        tag: int = 0,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Receive into ``tensor`` from rank ``src``, or from any rank.

        ``work.source_rank()`` returns the sender.
        """
        tensors, async_op = _listed(tensor, async_op)
        root = -1 if src is None else src
        return self.make_call("recv", (), tensors, timeout, async_op, root=root, tag=tag)

    def recv_anysource(
        self, tensor: Tensor | Sequence[Tensor], tag: int = 0, timeout: Timeout = None
    ) -> TorchWork:
        """Call :meth:`recv` for any sender, with torch's arguments."""
        return self.recv(tensor, None, tag, timeout)

    # torch's other names for the same
    allreduce = all_reduce
    allreduce_coalesced = all_reduce_coalesced
    allgather = all_gather
    allgather_coalesced = all_gather_coalesced
    all_gather_into_tensor = _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor = _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall = all_to_all
    alltoall_base = all_to_all_single

    # -- barriers -----------------------------------------------------------------------------

    def barrier(
        self,
        timeout: Timeout | c10d.BarrierOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Block until all ranks have called it."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        return self.make_call("barrier", (), (), timeout, async_op)


def _in_place(tensors: Iterable[Tensor]) -> list[tuple[Any, Sequence[Tensor], Sequence[Tensor]]]:
    """All-reduces, of which inputs and outputs are one: two would be kept apart by a copy."""
    return [("all_reduce", one, one) for one in ((t,) for t in tensors)]


def _read(options: Any, timeout: Any, async_op: bool | None) -> tuple[Any, Any, bool]:
    """(reduction, timeout, async_op) of one of torch's options objects."""
    asynchronous = options.asyncOp if async_op is None else async_op
    given = options.timeout
    if given > _NO_TIME:
        timeout = given
    return getattr(options, "reduceOp", None), timeout, asynchronous


def _listed(tensor: Any, async_op: bool | None) -> tuple[Sequence[Tensor], bool]:
    """One tensor as a tuple; a list is how torch calls, and then a call does not block."""
    if isinstance(tensor, _LISTS):
        return tensor, True if async_op is None else async_op
    return (tensor,), False if async_op is None else async_op


def _inner(tensors: Any) -> Sequence[Tensor]:
    """torch nests lists for several devices in one process; there is one now, and one list."""
    if tensors and len(tensors) == 1 and isinstance(tensors[0], _LISTS):
        return tensors[0]
    return tensors or ()
