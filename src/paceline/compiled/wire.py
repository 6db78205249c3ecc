"""Wire: a wrapper as compiled code reaches it, and the operators by which a graph does so.

Gradients are given to the reducer, which copies them into its buckets and sends off those that are
complete; then all is waited for. So the collectives of a compiled step are those of an eager one:
weights, Join, communication hooks, unused parameters and failures that other ranks are told of need
no second implementation (``_reducer/handed.py``).

A graph is the same on every rank and in every process: nothing of this rank is a constant in it.
Which wrapper is meant is a number in a tensor, ``wire``, that the graph is given when it is called.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .._reducer import Reducer, RepeatedExchange
from .._torch.dynamo import in_compiled_autograd
from ..ddp import DistributedDataParallel, wrapper_numbered
from ..errors import ModuleStateError
from . import operators

_wires: WeakKeyDictionary[DistributedDataParallel, Wire] = WeakKeyDictionary()


class Wire:
    """What compiled code needs of one rank's wrapper: its module, its reducer, and its forwards."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._first: Callable[[], None] = _nothing  # called before anything is sent
        self._gathered: dict[int, Tensor] = {}  # gradients of a pass that is not averaged
        self._captured: RepeatedExchange | None = None  # of a CUDA graph that is being captured

    @property
    def ddp(self) -> DistributedDataParallel:
        """The wrapper."""
        ddp = self._ddp()
        assert ddp is not None, "a graph is called with a wrapper"
        return ddp

    @property
    def module(self) -> nn.Module:
        """What it wraps."""
        module: nn.Module = self.ddp.module
        return module

    @property
    def reducer(self) -> Reducer:
        """The reducer of now: another one comes when parameters are frozen."""
        return self.ddp.replica.reducer

    @property
    def number(self) -> Tensor:
        """What a graph is given to find this wire again."""
        return self.ddp.traced.number

    def buffers(self) -> list[Tensor]:
        """The memory of the buckets; lazy ones have it from now to the end of the pass."""
        for bucket in self.reducer.buckets:
            bucket.claim()
        return [bucket.buffer for bucket in self.reducer.buckets]

    @property
    def rank(self) -> int:
        """This rank, in the wrapper's group."""
        return self.reducer.group.rank()

    # -- around a step ------------------------------------------------------------------------

    def begin_step(self, batch: Sequence[Any]) -> Sequence[Any]:
        """What the wrapper does before a forward; returns the batch, on its device."""
        inputs: Sequence[Any]
        inputs, _ = self.ddp.traced.begin_forward(*batch)
        return inputs

    def before_sending(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, before the next graph hands anything over."""
        self._first = callback

    def end_forward(self, loss: Tensor) -> None:
        """The step has a loss, and its gradients come later, or are only gathered."""
        self.ddp.traced.end_forward(loss)

    def end_step(self, loss: Tensor) -> None:
        """The step has a loss, and its gradients were averaged with it."""
        self.ddp.traced.end_forward(loss)
        self.ddp.replica.expect_no_backward()
        self.reducer.handed.graph_ended()

    # -- a step that is one graph -------------------------------------------------------------

    def launch(self, indices: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Hand gradients over."""
        if self._captured is not None:
            self._captured.take(indices, grads)
            return
        self._say_first()
        self.reducer.handed.take(indices, grads)

    def settle(self, given: Sequence[Tensor], trouble: Tensor) -> None:
        """Wait for the averages, and see to it that ``given`` holds them.

        ``trouble`` is above zero from then on where a rank could not go on.
        """
        if self._captured is not None:
            self._captured.settle()
            _fill(given, self.buffers())
            trouble.copy_(self._captured.trouble)
            return
        self._say_first()
        own = self.buffers()
        said = self.reducer.handed.average()
        _fill(given, own)
        if said is None:  # it has been read, and all is well
            trouble.zero_()
        else:
            trouble.copy_(said)

    @contextlib.contextmanager
    def captured_into(self, exchange: RepeatedExchange | None) -> Iterator[None]:
        """Within it a graph is captured: nothing is sent, ``exchange`` learns what will be."""
        if exchange is not None:
            exchange.begin()
        self._captured = exchange
        try:
            yield
        finally:
            self._captured = None

    def _say_first(self) -> None:
        first, self._first = self._first, _nothing
        first()

    # -- a wrapper whose forward and backward are a graph each --------------------------------

    def before_forward(self, given: Sequence[Tensor], alone: bool) -> None:
        """What the wrapper does around a forward; ``given`` holds the module's buffers then."""
        if alone and self.reducer.averages:
            raise ModuleStateError(
                "A wrapper was compiled while it averaged nothing, and now it has a weight or a "
                "hook, which the graph does not have.",
                "Enter ddp.samples() around the first call too, or call torch.compiler.reset().",
            )
        self._gathered = {}  # of a backward pass that failed
        self.ddp.traced.begin_forward()
        self.reducer.handed.expect_graph()
        self.ddp.traced.end_forward(None)
        _fill(given, [self.ddp.traced.beat, *self.module.buffers()])

    def hand_over(self, indices: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Hand gradients over, to be averaged in this pass or in a later one."""
        if self.ddp.replica.averaging.now():
            self.reducer.handed.take(indices, grads)
        else:
            self._gathered.update(zip(indices, [grad.clone() for grad in grads], strict=True))

    def average(self) -> None:
        """Every gradient of the graph has been handed over."""
        if self.ddp.replica.averaging.now():
            self.reducer.handed.graph_complete(at_once=in_compiled_autograd())
        else:
            gathered, self._gathered = self._gathered, {}
            count = len(self.reducer.params)
            self.reducer.handed.gather([gathered.get(number) for number in range(count)])


def wire_of(ddp: DistributedDataParallel) -> Wire:
    """The wire of a wrapper; there is one."""
    if ddp not in _wires:
        _wires[ddp] = Wire(ddp)
    return _wires[ddp]


def wire_numbered(wire: Tensor) -> Wire:
    """The wire of a wrapper, by the number that a graph is given."""
    return wire_of(wrapper_numbered(wire))


def _fill(given: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """Copy the results to ``given`` if a backend works on copies of its inputs."""
    for copy, original in zip(given, own, strict=True):
        if copy.data_ptr() != original.data_ptr():
            copy.copy_(original)


def _launch(grads: Sequence[Tensor], indices: Sequence[int], wire: Tensor) -> Tensor:
    wire_numbered(wire).launch(indices, grads)
    return torch.empty((), dtype=torch.int64)


def _settle(
    buffers: Sequence[Tensor], trouble: Tensor, _tickets: Sequence[Tensor], wire: Tensor
) -> None:
    wire_numbered(wire).settle(buffers, trouble)


def _before_forward(buffers: Sequence[Tensor], trains: bool, alone: bool, wire: Tensor) -> None:
    with torch.set_grad_enabled(trains):
        wire_numbered(wire).before_forward(buffers, alone)


def _hand_over(grads: Sequence[Tensor], indices: Sequence[int], wire: Tensor) -> Tensor:
    wire_numbered(wire).hand_over(indices, grads)
    return torch.zeros(())


def _average(_tickets: Tensor, wire: Tensor) -> Tensor:
    wire_numbered(wire).average()
    return torch.zeros(())


def _a_ticket(*_: object) -> Tensor:
    return torch.empty((), dtype=torch.int64)


def _a_number(*_: object) -> Tensor:
    return torch.empty(())


def _nothing(*_: object) -> None:
    return None


# ``launch`` and ``hand_over`` write to the buckets too, and the compiler is not told: nothing in a
# graph reads them before ``settle``, which waits for every ticket and is what the compiler knows
# as the writer, or before ``average``, behind which there is nothing.
_GIVE = "(Tensor[] grads, int[] indices, Tensor wire) -> Tensor"
_OPERATORS: tuple[tuple[str, str, Callable[..., object], Callable[..., object]], ...] = (
    ("launch", _GIVE, _launch, _a_ticket),
    (
        "settle",
        "(Tensor(a!)[] buffers, Tensor(b!) trouble, Tensor[] tickets, Tensor wire) -> ()",
        _settle,
        _nothing,
    ),
    (
        "before_forward",
        "(Tensor(a!)[] buffers, bool trains, bool alone, Tensor wire) -> ()",
        _before_forward,
        _nothing,
    ),
    ("hand_over", _GIVE, _hand_over, _a_number),
    ("average", "(Tensor tickets, Tensor wire) -> Tensor", _average, _a_number),
)


def define_operators() -> None:
    """Make the operators; called once."""
    for name, schema, kernel, shapes in _OPERATORS:
        operators.define(name, schema, kernel, shapes)
