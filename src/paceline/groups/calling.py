# mypy: disable-error-code="override, assignment"
# (torch's stubs give its methods narrower signatures, and other ones in every version)
"""How a call of a Group is carried out: checked, counted, recorded, seen by hooks, and made."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import Work as TorchWork

from .._torch.streams import devices_holding
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
FORKED = "forked"  # why a group is closed in a child of the process that opened it


@dataclass(frozen=True)
class Hooks:
    """What a user wants to be told of every collective of a group."""

    before: Callable[[Call], None] | None
    after: Callable[[Call], None] | None
    on_error: Callable[[Call, BaseException], None] | None


class CallMaking(ProcessGroup):
    """How a :class:`Group` makes its collectives."""

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
        self._own_watcher = Watcher("paceline-group-futures")
        self._coalescing: list[TorchWork] | None = None
        self.board: events.Board | None = None  # where calls are recorded
        self._strict = False  # every call comes from the same line on all ranks

    @property
    def _watcher(self) -> Watcher:
        """The engine's, which knows what is waited for when it ends; not every engine has one."""
        return getattr(self._engine, "watcher", None) or self._own_watcher

    def make_call(
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
        """Make one call of any kind; all collectives use it, in compiled graphs too.

        ``inputs`` and ``outputs`` are flat lists. ``quiet`` is that of :meth:`start_all_reduce`.
        """
        if self._closed:
            self._alive(kind)
        seconds = self._timeout if timeout is None else self._seconds(timeout)
        reduction = "" if op is None else reduction_of(op)
        same, inputs = outputs is inputs, tuple(inputs)  # the caller may change a list meanwhile
        outputs = inputs if same else tuple(outputs)
        call = Call(kind, inputs, outputs, reduction, root, tag, *splits, seconds)
        call.sequence, call.quiet = next(self._sequence), quiet
        if reduction == "premul_sum":
            call.reduction, call.factor = "sum", factor_of(op)
        self._checker.check(call)
        nbytes = call.nbytes
        self.traffic.note(kind, nbytes)
        if len(call.outputs) > 1 and self._moves:
            refuse_shared(kind, call.outputs, self._rank)
        given, finisher = call.inputs, make_dense(call, self._rank)
        if call.outputs is not call.inputs and call.outputs and call.inputs and self._moves:
            keep_apart(call, self._rank, self._size)
        if self._hooks or call.inputs is not given or finisher or call.factor is not None:
            return self._observed(call, async_op, finisher)
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
        if entry is None:
            return
        marks = entry.board.marks
        if marks is None:
            entry.finished = now()
        else:
            entry.handed_to(marks)

    def _start(self, call: Call, entry: events.Entry | None) -> TorchWork:
        try:
            if self._strict:
                self._agree_on(call)
            if entry is not None and not call.quiet and entry.board.marks is not None:
                entry.board.marks.comes()
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
            anywhere = self.board is not None and self.board.purpose in events.ANYWHERE
            agree(call, self._engine, self._rank, self._size, anywhere=anywhere)

    def _observed(self, call: Call, async_op: bool | None, finisher: Finisher | None) -> TorchWork:
        """Make ``call`` between the hooks, and with memory of ours in place of the caller's."""
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
                devices = devices_holding([*call.inputs, *wanted])
                work = Wrapped(self._start(call, entry), wanted, self._watcher, devices)
            except BaseException as error:
                end(error)
                raise
            work.finally_do(end)
            return self._collected(work.using([*call.inputs, *call.outputs]))
        try:
            self._run(call, entry)
        except BaseException as error:
            end(error)
            raise
        end(None)
        return Finished(wanted, call.root) if call.kind == "recv" else FINISHED

    def make_calls(
        self,
        calls: Iterable[tuple[Any, Sequence[Tensor], Sequence[Tensor]]],
        timeout: Any,
        async_op: bool | None,
        op: Any = None,
    ) -> TorchWork:
        """Make several calls and return one Work; if one of them is invalid, none is sent."""
        asynchronous = async_op is None or async_op
        calls = list(calls)
        self._check_all(calls, op)
        works: list[TorchWork] = []
        results: list[Tensor] = []
        for kind, inputs, outputs in calls:
            works.append(self.make_call(kind, inputs, outputs, timeout, asynchronous, op))
            results.extend(outputs)
        return Together(works, results, self._watcher) if asynchronous else FINISHED

    def _check_all(
        self, calls: Sequence[tuple[Any, Sequence[Tensor], Sequence[Tensor]]], op: Any
    ) -> None:
        """Before the first of them is sent: what is wrong with the last is wrong with all."""
        reduction = "" if op is None else reduction_of(op)
        factor = factor_of(op) if reduction == "premul_sum" else None
        reduction = "sum" if reduction == "premul_sum" else reduction
        for kind, inputs, outputs in calls:
            self._checker.check(Call(kind, inputs, outputs, reduction, factor=factor))
        if self._moves and calls:
            taken = [tensor for _, _, outputs in calls for tensor in outputs]
            refuse_shared(calls[0][0], taken, self._rank)

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
