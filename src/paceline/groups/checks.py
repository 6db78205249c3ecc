"""Checks the arguments of a collective before anything is sent.

Every check ends in :class:`CollectiveArgumentError`, which says rank, operation, what was expected
and what came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from ..errors import CollectiveArgumentError, CollectiveTypeError
from .engine import REDUCING, Call, Engine

_STRIDED = torch.strided
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
# All other kinds have exactly one input, or output.
_INPUT_LISTS = frozenset({"scatter", "reduce_scatter", "all_to_all", "recv", "barrier"})
_OUTPUT_LISTS = frozenset({"all_gather", "gather", "all_to_all", "send", "barrier"})


class Checker:
    """Checks calls for one rank of a group on one engine."""

    def __init__(self, rank: int, size: int, engine: Engine) -> None:
        self._rank, self._size, self._engine = rank, size, engine
        self._devices = engine.capabilities.devices
        self._on_cpu = "cpu" in engine.capabilities.devices
        self._only_on_cpu = engine.capabilities.devices == {"cpu"}
        self._known_good: set[tuple[torch.dtype, str]] = set()  # what the engine can reduce

    def check(self, call: Call) -> None:
        """Raise if the engine could not do ``call`` as it is."""
        kind = call.kind
        first = call.inputs[0] if call.inputs else call.outputs[0] if call.outputs else None
        if kind in _ROOTED and not 0 <= call.root < self._size:
            self._refuse(call, "root", f"a rank below {self._size}", str(call.root))
        if len(call.inputs) != 1 and kind not in _INPUT_LISTS:
            self._refuse(call, "input", "one tensor", f"a list of {len(call.inputs)}")
        if len(call.outputs) != 1 and kind not in _OUTPUT_LISTS:
            self._refuse(call, "output", "one tensor", f"a list of {len(call.outputs)}")
        for tensor in call.inputs:
            self._tensor(call, "input", tensor, first)
        if call.outputs is not call.inputs:
            for tensor in call.outputs:
                self._tensor(call, "output", tensor, first)
        if kind in REDUCING:
            assert first is not None
            pair = (first.dtype, call.reduction)
            if pair not in self._known_good:
                self._reducible(call, *pair)
            if call.factor is not None:
                self._scalable(call, first, call.factor)
        shape = self._SHAPES.get(kind)
        if shape is not None:
            shape(self, call)

    def _tensor(self, call: Call, what: str, tensor: object, first: Tensor | None) -> None:
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            self._refuse(call, what, "a tensor", f"an object of type {kind}", CollectiveTypeError)
        if not (self._on_cpu and tensor.is_cpu) and tensor.device.type not in self._devices:
            devices = " or ".join(sorted(self._devices))
            self._refuse(call, what, f"a tensor on {devices}", f"one on {tensor.device}")
        if tensor.layout is not _STRIDED:
            self._refuse(call, what, "a dense tensor", f"one with layout {tensor.layout}")
        if first is tensor or first is None:
            return
        if tensor.dtype is not first.dtype:
            self._refuse(call, what, f"dtype {first.dtype} as the others", str(tensor.dtype))
        if not self._only_on_cpu and tensor.device != first.device:
            self._refuse(call, what, f"device {first.device} as the others", str(tensor.device))

    def _reducible(self, call: Call, dtype: torch.dtype, reduction: str) -> None:
        if not self._engine.reduces(dtype, reduction):
            backend = self._engine.capabilities.backend
            self._refuse(
                call, "dtype", f"one that {backend} can reduce with {reduction.upper()}", str(dtype)
            )
        self._known_good.add((dtype, reduction))

    def _scalable(self, call: Call, tensor: Tensor, factor: float | Tensor) -> None:
        dtype, product = tensor.dtype, torch.result_type(tensor, factor)
        if not torch.can_cast(product, dtype):
            found = f"one that makes {product} of it"
            self._refuse(call, "op", f"a factor that leaves {dtype} what it is", found)

    def _one_each(self, call: Call, what: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._size:
            expected = f"{self._size} tensors, one for each rank"
            self._refuse(call, what, expected, f"{len(tensors)}")

    def _same_size(self, call: Call, what: str, tensor: Tensor, numel: int) -> None:
        if tensor.numel() != numel:
            self._refuse(
                call, what, f"{numel} elements", f"{tensor.numel()} ({list(tensor.shape)})"
            )

    def _gathered(self, call: Call) -> None:
        self._one_each(call, "outputs", call.outputs)
        self._same_size(
            call, f"outputs[{self._rank}]", call.outputs[self._rank], call.inputs[0].numel()
        )

    def _gathered_flat(self, call: Call) -> None:
        self._same_size(call, "output", call.outputs[0], call.inputs[0].numel() * self._size)

    def _gather(self, call: Call) -> None:
        if self._rank == call.root:
            self._gathered(call)
        elif call.outputs:
            self._refuse(
                call, "outputs", "none, since this is not the root", f"{len(call.outputs)}"
            )

    def _scatter(self, call: Call) -> None:
        if self._rank == call.root:
            self._one_each(call, "inputs", call.inputs)
            own = call.inputs[self._rank].numel()
            self._same_size(call, "output", call.outputs[0], own)
        elif call.inputs:
            self._refuse(call, "inputs", "none, since this is not the root", f"{len(call.inputs)}")

    def _reduce_scatter(self, call: Call) -> None:
        self._one_each(call, "inputs", call.inputs)
        own = call.inputs[self._rank].numel()
        self._same_size(call, "output", call.outputs[0], own)

    def _reduce_scatter_single(self, call: Call) -> None:
        self._same_size(call, "input", call.inputs[0], call.outputs[0].numel() * self._size)

    def _all_to_all(self, call: Call) -> None:
        self._one_each(call, "inputs", call.inputs)
        self._one_each(call, "outputs", call.outputs)
        own = call.inputs[self._rank].numel()
        self._same_size(call, f"outputs[{self._rank}]", call.outputs[self._rank], own)

    def _all_to_all_single(self, call: Call) -> None:
        for what, tensor, splits in (
            ("input", call.inputs[0], call.input_splits),
            ("output", call.outputs[0], call.output_splits),
        ):
            rows = tensor.shape[0] if tensor.dim() else 1
            if splits and (len(splits) != self._size or sum(splits) != rows or min(splits) < 0):
                expected = f"{self._size} counts that add up to its {rows} rows"
                self._refuse(call, f"{what}_split_sizes", expected, str(list(splits)))
            if not splits and rows % self._size:
                self._refuse(
                    call, what, f"a number of rows that {self._size} ranks divide", f"{rows} rows"
                )
        if not call.input_splits and not call.output_splits:
            self._same_size(call, "output", call.outputs[0], call.inputs[0].numel())
        elif self._is_judge(call):
            self._same_own_part(call)

    def _is_judge(self, call: Call) -> bool:
        """Whether nobody sees later, on all ranks alike, that parts do not fit."""
        can = self._engine.capabilities
        later = can.checks_agreement and self._size > 1 and call.inputs[0].is_cpu
        return can.peers and not later

    def _same_own_part(self, call: Call) -> None:
        """Refuse what a rank can see by itself: it takes from itself all that it gives itself."""
        given = self._own_part(call.inputs[0], call.input_splits)
        taken = self._own_part(call.outputs[0], call.output_splits)
        if given != taken:
            expected = f"{given} elements from rank {self._rank} itself, as the input has"
            self._refuse(call, "output", expected, f"{taken} ({list(call.outputs[0].shape)})")

    def _own_part(self, tensor: Tensor, splits: Sequence[int]) -> int:
        """How many elements of ``tensor`` go from this rank to itself."""
        if not splits:
            return tensor.numel() // self._size
        rows = sum(splits)
        return splits[self._rank] * (tensor.numel() // rows) if rows else 0

    def _peer(self, call: Call) -> None:
        what = "dst" if call.kind == "send" else "src"
        if call.root == self._rank or not -1 <= call.root < self._size:
            self._refuse(call, what, f"another rank below {self._size}", str(call.root))
        if call.kind == "send" and call.root < 0:
            self._refuse(call, what, f"a rank below {self._size}", str(call.root))

    _SHAPES: ClassVar[dict[str, Callable[[Checker, Call], None]]] = {
        "all_gather": _gathered,
        "all_gather_single": _gathered_flat,
        "gather": _gather,
        "scatter": _scatter,
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter_single": _reduce_scatter_single,
        "all_to_all": _all_to_all,
        "all_to_all_single": _all_to_all_single,
        "send": _peer,
        "recv": _peer,
    }

    def _refuse(
        self,
        call: Call,
        argument: str,
        expected: str,
        found: str,
        error: type[CollectiveArgumentError] = CollectiveArgumentError,
    ) -> NoReturn:
        raise error(self._rank, call.kind, argument, expected, found)
