# mypy: disable-error-code="override, assignment"
# (torch's stubs give its methods narrower signatures, and other ones in every version)
"""The collectives of a Group: one method each, and how a call is carried out.

**Calling.** Every collective takes a tensor, checks its arguments before anything is sent, and
returns a Work that is already done. With ``async_op=True`` it returns at once; ``work.wait()``
blocks. Called the way torch calls a group (lists of tensors, or an options object such as
``AllreduceOptions``) a method behaves as torch's does and returns at once. ``timeout`` is for
this call alone. All ranks make the same calls in the same order; ``send`` and ``recv`` are ordered
only among themselves.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import Work as TorchWork
from torch.distributed import distributed_c10d as c10d

from ..errors import CollectiveArgumentError, ForkedError, GroupClosedError
from ..recorder import events
from ..recorder.events import now
from .checks import Checker
from .dense import make_dense, scale
from .engine import Call, Engine, Kind, factor_of, reduction_of
from .overlap import keep_apart, refuse_shared
from .strict import agree
from .traffic import Traffic
from .work import FINISHED, Finished, Finisher, Together, Watcher, Work, Wrapped, seconds_of

Timeout = timedelta | float | None
Op = ReduceOp | ReduceOp.RedOpType

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
FORKED = "forked"  # why a group is closed in a child of the process that opened it


@dataclass(frozen=True)
class Hooks:
    """What a user wants to be told of every collective of a group."""

    before: Callable[[Call], None] | None
    after: Callable[[Call], None] | None
    on_error: Callable[[Call, BaseException], None] | None


class Collectives(ProcessGroup):
    """What a group does for its ranks; :class:`Group` adds what a group is."""

    def __init__(self, engine: Engine, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub lacks this form
        self._engine = engine
        self._closed = ""  # why no call is possible any more
        self._moves = engine.capabilities.peers  # else its tensors may have no memory
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._checker = Checker(rank, size, engine)
        self._hooks: OrderedDict[int, Hooks] = OrderedDict()
        self._sequence = itertools.count(1)
        self.traffic = Traffic(size)
        self._watcher = Watcher("paceline-group-futures")
        self._coalescing: list[TorchWork] | None = None
        self.board: events.Board | None = None  # where calls are recorded
        self._strict = False  # every call comes from the same line on all ranks

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
        """Reduce ``tensor`` over all ranks, in place on each."""
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
            return self._do_all(_in_place(tensors), timeout, async_op, op)
        if isinstance(tensors[0], Tensor) and tensors[0].is_sparse:
            return self._sparse_all_reduce(tensors[0], op, timeout)
        return self._do("all_reduce", tensors, tensors, timeout, async_op, op)

    def start_all_reduce(
        self, tensor: Tensor, op: Op = ReduceOp.SUM, *, quiet: bool = False
    ) -> TorchWork:
        """:meth:`all_reduce` that returns at once.

        ``quiet``: no thread of the engine's works at it where the engine leaves that to us; it
        moves in :meth:`~Group.progress` and when somebody waits.
        """
        tensors = (tensor,)
        return self._do("all_reduce", tensors, tensors, None, True, op, quiet=quiet)

    def repeated_all_reduce(
        self, tensor: Tensor, op: Op = ReduceOp.SUM, *, quiet: bool = False
    ) -> Callable[[], TorchWork]:
        """:meth:`start_all_reduce` of one tensor, to be called again and again.

        What is the same each time is checked and decided here.
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

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        op: Op | c10d.AllreduceCoalescedOptions = ReduceOp.SUM,
        timeout: Timeout = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Reduce several tensors, each as :meth:`all_reduce` does."""
        if opts is not None or type(op) in _OPTIONS:
            op, timeout, async_op = _read(opts or op, timeout, async_op)
        return self._do_all(_in_place(tensors), timeout, async_op, op)

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
        """Reduce ``tensor`` over all ranks into the root's; the others' stay as they are."""
        if opts is not None or type(root) in _OPTIONS:
            opts = opts or root
            op, timeout, async_op = _read(opts, timeout, async_op)
            root = opts.rootRank
        tensors, async_op = _listed(tensor, async_op)
        return self._do("reduce", tensors, tensors, timeout, async_op, op, root=root)

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
        """Reduce ``inputs[r]`` over all ranks into rank r's ``output``; sizes may differ by r."""
        if opts is not None or type(op) in _OPTIONS:
            op, timeout, async_op = _read(opts or op, timeout, async_op)
        outputs, async_op = _listed(output, async_op)
        return self._do("reduce_scatter", _inner(inputs), outputs, timeout, async_op, op)

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
        """Reduce one tensor over all ranks and leave each rank its equal part of it."""
        if opts is not None or type(op) in _OPTIONS:
            op, timeout, async_op = _read(opts or op, timeout, async_op)
        return self._do("reduce_scatter_single", (input,), (output,), timeout, async_op, op)

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
        """Several of :meth:`reduce_scatter_single`."""
        if opts is not None or type(op) in _OPTIONS:
            op, timeout, async_op = _read(opts or op, timeout, async_op)
        self._same_length("reduce_scatter_single_coalesced", outputs, inputs)
        pairs = zip(inputs, outputs, strict=True)
        calls = [("reduce_scatter_single", (i,), (o,)) for i, o in pairs]
        return self._do_all(calls, timeout, async_op, op)

    def start_reduce_scatter(
        self, output: Tensor, input: Tensor, op: Op = ReduceOp.SUM, *, quiet: bool = False
    ) -> TorchWork:
        """:meth:`reduce_scatter_single` that returns at once; ``quiet`` as above.

        ``output`` may be this rank's part of ``input``.
        """
        kind: Kind = "reduce_scatter_single"
        return self._do(kind, (input,), (output,), None, True, op, quiet=quiet)

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
        """Copy the root's ``tensor`` into every other rank's."""
        if opts is not None or type(root) in _OPTIONS:
            opts = opts or root
            _, timeout, async_op = _read(opts, timeout, async_op)
            root = opts.rootRank
        tensors, async_op = _listed(tensor, async_op)
        return self._do("broadcast", tensors, tensors, timeout, async_op, root=root)

    def all_gather(
        self,
        outputs: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        tensor: Tensor | Sequence[Tensor],
        timeout: Timeout | c10d.AllgatherOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Copy every rank's ``tensor`` into every rank's ``outputs``; sizes may differ by rank."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        tensors, async_op = _listed(tensor, async_op)
        return self._do("all_gather", tensors, _inner(outputs), timeout, async_op)

    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        timeout: Timeout | c10d.AllgatherOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Copy every rank's ``input``, one after the other, into one ``output``."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        return self._do("all_gather_single", (input,), (output,), timeout, async_op)

    def all_gather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        timeout: Timeout | c10d.AllgatherOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Several of :meth:`all_gather`; ``output_lists[r][i]`` takes rank r's ``inputs[i]``."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        for row in output_lists:
            self._same_length("all_gather_coalesced", row, inputs)
        columns = zip(*output_lists, strict=True)
        calls = [("all_gather", (i,), outs) for i, outs in zip(inputs, columns, strict=True)]
        return self._do_all(calls, timeout, async_op)

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        timeout: Timeout | c10d.AllgatherOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Several of :meth:`all_gather_single`."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        self._same_length("all_gather_single_coalesced", outputs, inputs)
        pairs = zip(inputs, outputs, strict=True)
        return self._do_all(
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
        """Copy every rank's ``tensor`` into the root's ``outputs``; elsewhere those are empty."""
        if opts is not None or type(root) in _OPTIONS:
            opts = opts or root
            _, timeout, async_op = _read(opts, timeout, async_op)
            root = opts.rootRank
        tensors, async_op = _listed(tensor, async_op)
        return self._do("gather", tensors, _inner(outputs), timeout, async_op, root=root)

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
        """Copy every rank's ``input``, one after the other, into the root's one ``output``."""
        if opts is not None or type(root) in _OPTIONS:
            opts = opts or root
            _, timeout, async_op = _read(opts, timeout, async_op)
            root = opts.rootRank
        rows = self._rows(output, input) if root == self._rank else ()
        return self._do("gather", (input,), rows, timeout, async_op, root=root)

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
        """Copy the root's ``inputs[r]`` into rank r's ``output``; elsewhere inputs are empty."""
        if opts is not None or type(root) in _OPTIONS:
            opts = opts or root
            _, timeout, async_op = _read(opts, timeout, async_op)
            root = opts.rootRank
        outputs, async_op = _listed(output, async_op)
        return self._do("scatter", _inner(inputs), outputs, timeout, async_op, root=root)

    def all_to_all(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        timeout: Timeout | c10d.AllToAllOptions = None,
        *,
        async_op: bool | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """Copy ``inputs[r]`` into ``outputs[this rank]`` of rank r."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        return self._do("all_to_all", inputs, outputs, timeout, async_op)

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
        """Send rows of ``input`` to each rank and take rows of ``output`` from each.

        The sizes count rows (the first dimension), one for each rank; without them, equal parts.
        """
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        splits = (input_split_sizes or (), output_split_sizes or ())
        return self._do("all_to_all_single", (input,), (output,), timeout, async_op, splits=splits)

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
        """Send ``tensor`` to rank ``dst``, for its :meth:`recv` with the same ``tag``."""
        tensors, async_op = _listed(tensor, async_op)
        return self._do("send", tensors, (), timeout, async_op, root=dst, tag=tag)

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

        ``work.source_rank()`` says who it was.
        """
        tensors, async_op = _listed(tensor, async_op)
        root = -1 if src is None else src
        return self._do("recv", (), tensors, timeout, async_op, root=root, tag=tag)

    def recv_anysource(
        self, tensor: Tensor | Sequence[Tensor], tag: int = 0, timeout: Timeout = None
    ) -> TorchWork:
        """:meth:`recv` from any rank, as torch calls it."""
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
        """Return when every rank has called it."""
        if opts is not None or type(timeout) in _OPTIONS:
            _, timeout, async_op = _read(opts or timeout, None, async_op)
        return self._do("barrier", (), (), timeout, async_op)

    # -- how a call is done -------------------------------------------------------------------

    def call(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        op: Any = None,
        *,
        root: int = -1,
        tag: int = 0,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
        timeout: Any = None,
        async_op: bool = False,
    ) -> TorchWork:
        """Make a collective whose kind is known only when it is called, as a compiled graph does.

        All the methods above come down to it; ``inputs`` and ``outputs`` are flat lists.
        """
        return self._do(
            kind, inputs, outputs, timeout, async_op, op, root=root, tag=tag, splits=splits
        )

    def _do(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        timeout: Any,
        async_op: bool | None,
        op: Any = None,
        *,
        root: Any = -1,
        tag: int = 0,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
        quiet: bool = False,
    ) -> TorchWork:
        if self._closed:
            self._alive(kind)
        seconds = self._timeout if timeout is None else self._seconds(timeout)
        reduction = "" if op is None else reduction_of(op)
        call = Call(kind, inputs, outputs, reduction, root, tag, *splits, seconds)
        call.sequence, call.quiet = next(self._sequence), quiet
        if reduction == "premul_sum":
            call.reduction, call.factor = "sum", factor_of(op)
        self._checker.check(call)
        nbytes = call.nbytes
        self.traffic.note(kind, nbytes)
        if len(call.outputs) > 1 and self._moves:
            refuse_shared(kind, call.outputs, self._rank)
        finisher = make_dense(call, self._rank)
        if call.outputs is not call.inputs and call.outputs and call.inputs and self._moves:
            keep_apart(call, self._rank, self._size)
        if self._hooks or finisher is not None:
            return self._observed(call, async_op, finisher)
        if call.factor is not None:
            scale(call, call.factor, self._rank)
        entry = None if self.board is None else self.board.begin(call, nbytes)
        if async_op:
            work = self._start(call, entry)
            return work if self._coalescing is None else self._collected(work)
        self._run(call, entry)
        if kind == "recv":
            return Finished(call.outputs, call.root)
        return FINISHED

    def _run(self, call: Call, entry: events.Entry | None) -> None:
        try:
            if self._strict:
                self._agree_on(call)
            self._engine.run(call)
        except BaseException as error:
            if entry is not None:
                events.failed(entry, error)
            raise
        if entry is not None:
            entry.finished = now()

    def _start(self, call: Call, entry: events.Entry | None) -> TorchWork:
        try:
            if self._strict:
                self._agree_on(call)
            work = self._engine.start(call)
        except BaseException as error:
            if entry is not None:
                events.failed(entry, error)
            raise
        if entry is None:
            return work
        if type(work) is Finished:
            entry.finished = now()
        else:
            self._follow(call, work, entry)
        return work

    def _follow(self, call: Call, work: TorchWork, entry: events.Entry) -> None:
        tensors = call.inputs or call.outputs
        entry.follow(work, on_device=bool(tensors) and not tensors[0].is_cpu)
        if isinstance(work, Work):
            work.entry = entry

    def _agree_on(self, call: Call) -> None:
        if call.kind not in ("send", "recv"):
            agree(call, self._engine, self._rank, self._size)

    def _observed(self, call: Call, async_op: bool | None, finisher: Finisher | None) -> TorchWork:
        """Make ``call`` between the hooks that want to see it before and after."""
        hooks = list(self._hooks.values())
        for hook in hooks:
            if hook.before is not None:
                hook.before(call)
        wanted = call.outputs
        if call.factor is not None:
            scale(call, call.factor, self._rank)
        entry = None if self.board is None else self.board.begin(call, call.nbytes)

        def end(error: BaseException | None) -> None:
            if finisher is not None:
                finisher(error)
            for hook in hooks:
                if error is None and hook.after is not None:
                    hook.after(call)
                if error is not None and hook.on_error is not None:
                    hook.on_error(call, error)

        if async_op:
            try:
                work = Wrapped(self._start(call, entry), wanted, self._watcher)
            except BaseException as error:
                end(error)
                raise
            work.finally_do(end)
            return self._collected(work)
        try:
            self._run(call, entry)
        except BaseException as error:
            end(error)
            raise
        end(None)
        return Finished(wanted, call.root) if call.kind == "recv" else FINISHED

    def _do_all(
        self,
        calls: Iterable[tuple[Any, Sequence[Tensor], Sequence[Tensor]]],
        timeout: Any,
        async_op: bool | None,
        op: Any = None,
    ) -> TorchWork:
        asynchronous = async_op is None or async_op
        calls = list(calls)
        self._check_all(calls, op)
        works: list[TorchWork] = []
        results: list[Tensor] = []
        for kind, inputs, outputs in calls:
            works.append(self._do(kind, inputs, outputs, timeout, asynchronous, op))
            results.extend(outputs)
        return Together(works, results, self._watcher) if asynchronous else FINISHED

    def _check_all(
        self, calls: Sequence[tuple[Any, Sequence[Tensor], Sequence[Tensor]]], op: Any
    ) -> None:
        """Before the first of them is sent: what is wrong with the last is wrong with all."""
        reduction = "" if op is None else reduction_of(op)
        reduction = "sum" if reduction == "premul_sum" else reduction
        for kind, inputs, outputs in calls:
            self._checker.check(Call(kind, inputs, outputs, reduction))
        if self._moves and calls:
            taken = [tensor for _, _, outputs in calls for tensor in outputs]
            refuse_shared(calls[0][0], taken, self._rank)

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
        tensor.copy_(total / self._size if reduction == "avg" else total)
        return Finished((tensor,))

    def _seconds(self, timeout: Timeout) -> float:
        if timeout is None:
            return self._timeout
        if isinstance(timeout, bool) or not isinstance(timeout, timedelta | float | int):
            raise TypeError(
                f"rank {self._rank}: timeout: expected a datetime.timedelta or seconds, "
                f"got an object of type {type(timeout).__name__}"
            )
        seconds = seconds_of(timeout)
        return self._timeout if seconds is None else seconds

    def _same_length(self, operation: str, a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        if len(a) != len(b):
            raise CollectiveArgumentError(
                self._rank, operation, "outputs", f"as many as inputs, {len(b)}", str(len(a))
            )

    def _alive(self, operation: str) -> None:
        if self._closed == FORKED:
            raise ForkedError(self._rank, operation, 0, (self._rank,))
        if self._closed:
            raise GroupClosedError(
                self._rank, operation, 0, (self._rank,), aborted=self._closed == "aborted"
            )

    def _collected(self, work: TorchWork) -> TorchWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work


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
    """torch nests lists for several devices in one process; there is one now."""
    if tensors and isinstance(tensors[0], _LISTS):
        return tensors[0]
    return tensors or ()
