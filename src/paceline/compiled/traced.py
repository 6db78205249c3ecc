"""A group's collectives inside a graph: three operators, and what a call of a method becomes.

A traced call does not change tensors under the compiler's eyes: ``run`` takes tensors and returns
new ones, which are then copied to where the caller wants them, and the compiler removes that copy
where it can. ``start`` returns a ticket, and ``finish`` the results for it. Inside, each makes the
very call that eager mode makes, on the group that is *given to the graph*, so its checks, hooks and
counters see it.

As in eager mode, autograd does not know of collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed import Work as TorchWork

from ..errors import UnsupportedError
from ..groups import Group
from . import operators

IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast"})
NO_TIMEOUT = -1.0
_OPS = {
    name: getattr(ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_CALL = (
    "(Tensor[] inputs, Tensor[] outputs, str kind, str reduction, SymInt root, SymInt tag, "
    "SymInt[] input_splits, SymInt[] output_splits, float timeout, {group} group)"
)


# -- what runs --------------------------------------------------------------------------------


class Tickets:
    """Collectives that were started in a graph and not yet finished, by group and number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pending: WeakKeyDictionary[Group, dict[int, tuple[TorchWork, list[Tensor]]]]
        self._pending = WeakKeyDictionary()

    def issue(self, group: Group, work: TorchWork, results: list[Tensor]) -> Tensor:
        """A ticket for ``results``, which are there when ``work`` is done."""
        number = next(self._numbers)
        self._pending.setdefault(group, {})[number] = (work, results)
        return torch.tensor(number)

    def redeem(self, group: Group, ticket: Tensor, timeout: float) -> list[Tensor]:
        """The results, waited for; after a timeout the ticket stays valid."""
        number = int(ticket.item())
        work, results = self._pending[group][number]
        if timeout == NO_TIMEOUT:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout))
        del self._pending[group][number]
        return results


_tickets = Tickets()


def _fresh(kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that the engine may write to."""
    if kind in IN_PLACE:
        return [t.clone(memory_format=torch.contiguous_format) for t in inputs]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in outputs]


def _call(
    asynchronous: bool,
    inputs: list[Tensor],
    outputs: list[Tensor],
    kind: Any,
    reduction: str,
    root: int,
    tag: int,
    input_splits: list[int],
    output_splits: list[int],
    timeout: float,
    group: Group,
) -> tuple[TorchWork, list[Tensor]]:
    fresh = _fresh(kind, inputs, outputs)
    given = fresh if kind in IN_PLACE else inputs
    if kind == "barrier":
        given = []
    elif asynchronous and kind not in IN_PLACE:  # the graph may write to its own before the end
        given = [t.clone() for t in inputs]
    work = group.make_call(
        kind,
        given,
        fresh,
        None if timeout == NO_TIMEOUT else timeout,
        asynchronous,
        _OPS[reduction] if reduction else None,
        root=root,
        tag=tag,
        splits=(input_splits, output_splits),
    )
    return work, fresh


def _run(*call: Any) -> list[Tensor]:
    return _call(False, *call)[1]


def _start(*call: Any) -> Tensor:
    work, results = _call(True, *call)
    return _tickets.issue(call[-1], work, results)


def _finish(ticket: Tensor, like: list[Tensor], timeout: float, group: Group) -> list[Tensor]:
    return _tickets.redeem(group, ticket, timeout)


# -- what the compiler knows of it ------------------------------------------------------------


def _shapes_of_run(inputs: list[Tensor], outputs: list[Tensor], kind: str, *_: Any) -> list[Tensor]:
    return _shapes(inputs if kind in IN_PLACE else outputs)


def _shape_of_ticket(*_: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64)


def _shapes_of_finish(ticket: Tensor, like: list[Tensor], *_: Any) -> list[Tensor]:
    return _shapes(like)


def _shapes(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def define_operators(group_type: str) -> None:
    """Make ``torch.ops.paceline.run``, ``start`` and ``finish``, once Group has a name there."""
    call = _CALL.format(group=group_type)
    finish = f"(Tensor ticket, Tensor[] like, float timeout, {group_type} group) -> Tensor[]"
    for name, schema, kernel, shapes in (
        ("run", f"{call} -> Tensor[]", _run, _shapes_of_run),
        ("start", f"{call} -> Tensor", _start, _shape_of_ticket),
        ("finish", finish, _finish, _shapes_of_finish),
    ):
        operators.define(name, schema, kernel, shapes, in_order=True)


# -- what is traced in the place of a Group's methods -----------------------------------------


class TracedWork:
    """A collective in a graph. ``wait`` puts the results where eager mode would have put them."""

    def __init__(self, group: Group, ticket: Tensor | None, outputs: list[Tensor]) -> None:
        self._group = group
        self._ticket = ticket
        self._outputs = outputs

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """The results are in the tensors of the call from here on."""
        if self._ticket is not None:
            like = [t.detach() for t in self._outputs]
            results = torch.ops.paceline.finish(self._ticket, like, _seconds(timeout), self._group)
            self._ticket = None
            _put(results, self._outputs)
        return True

    def synchronize(self) -> None:
        """Wait, as :meth:`wait` does without a timeout."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether somebody has waited: a graph does not ask the engine."""
        return self._ticket is None

    is_success = is_completed

    def result(self) -> list[Tensor]:
        """The output tensors; waits for them."""
        self.wait()
        return list(self._outputs)


class TracedTogether:
    """Several of those as one."""

    def __init__(self, works: list[TracedWork]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """All results are in place from here on."""
        return all(work.wait(timeout) for work in self._works)

    def synchronize(self) -> None:
        """Wait, as :meth:`wait` does without a timeout."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether somebody has waited for all."""
        return all(work.is_completed() for work in self._works)

    is_success = is_completed

    def result(self) -> list[Tensor]:
        """The output tensors; waits for them."""
        return [tensor for work in self._works for tensor in work.result()]


def traced_call(
    self: Group,
    kind: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    timeout: Any,
    async_op: bool | None,
    op: Any = None,
    *,
    root: int = -1,
    tag: int = 0,
    splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
    quiet: bool = False,
) -> TracedWork:
    """What ``Group.make_call`` is inside a graph."""
    given = [t.detach() for t in inputs]
    if kind == "barrier":
        given = [torch.zeros(())]  # Inductor takes an operator's device from its tensors
    taken = [] if kind in IN_PLACE else [t.detach() for t in outputs]
    call = (
        given,
        taken,
        kind,
        _name(op),
        root,
        tag,
        list(splits[0]),
        list(splits[1]),
        _seconds(timeout),
        self,
    )
    if async_op:
        return TracedWork(self, torch.ops.paceline.start(*call), list(outputs))
    _put(torch.ops.paceline.run(*call), outputs)
    return TracedWork(self, None, list(outputs))


def traced_calls(
    self: Group, calls: Any, timeout: Any, async_op: bool | None, op: Any = None
) -> TracedTogether:
    """What ``Group.make_calls`` is inside a graph."""
    asynchronous = async_op is None or async_op
    works = [
        traced_call(self, kind, inputs, outputs, timeout, asynchronous, op)
        for kind, inputs, outputs in calls
    ]
    return TracedTogether(works)


def _put(results: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    with torch.no_grad():  # engines write to memory, and autograd is not told
        for result, output in zip(results, outputs, strict=True):
            output.copy_(result)


def _name(op: Any) -> str:
    if op is None:
        return ""
    if op.name not in _OPS:
        raise UnsupportedError(
            "torch.compile", f"{op.name} in a graph", "Multiply before the call."
        )
    return str(op.name)


def _seconds(timeout: timedelta | float | None) -> float:
    if timeout is None:
        return NO_TIMEOUT
    if isinstance(timeout, timedelta):
        # Dynamo reads these, and does not know total_seconds
        return timeout.days * 86400.0 + timeout.seconds + timeout.microseconds * 1e-6
    return float(timeout)
