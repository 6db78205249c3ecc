"""What a traced graph does beside its results: which inputs it writes, where it draws numbers.

The graph is run once with fake tensors, which have no memory, under a mode that sees every operator
it comes to. Memory is told apart by storages, so a write through a view is one too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from .graphs import is_operator, leaves_of

# Batch norm writes them, and its schema does not say so.
_STATISTICS = frozenset({"running_mean", "running_var"})


@dataclass(frozen=True)
class Effects:
    """What a graph does beside its results."""

    written: frozenset[int]  # inputs, by place
    drawn_on: frozenset[torch.device]  # where it draws random numbers


def kept_copy(graph: GraphModule) -> GraphModule:
    """A copy for later: compilers change the graphs that they are given."""
    return GraphModule(graph, copy.deepcopy(graph.graph))


def effects_of(graph: GraphModule, inputs: Sequence[Any]) -> Effects:
    """What ``graph`` does when it is called with ``inputs``; nothing is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    given = [fakes.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs]
    mode = _EffectsMode()
    kind = next((x.device.type for x in inputs if isinstance(x, Tensor)), "cpu")
    casts = torch.is_autocast_enabled(kind)
    # The graph switches both, and may fail before it switches them back.
    before = torch.set_grad_enabled(torch.is_grad_enabled()), torch.autocast(kind, enabled=casts)
    with before[0], before[1], fakes, mode:
        graph(*given)
    written = {n for n, x in enumerate(given) if isinstance(x, Tensor) and mode.wrote(x)}
    return Effects(frozenset(written), frozenset(mode.drawn_on))


class _EffectsMode(TorchDispatchMode):
    """Notes what is written, and where random numbers are drawn."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: set[int] = set()
        self.drawn_on: set[torch.device] = set()

    def wrote(self, tensor: Tensor) -> bool:
        """Whether somebody has written to the memory of ``tensor``."""
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        self._storages.update(t.untyped_storage()._cdata for t in _written_by(func, args, named))
        results = func(*args, **named)
        if is_operator(func) and torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn_on.update(t.device for t in _tensors(results))
        return results


def _written_by(func: Any, args: Sequence[Any], named: dict[str, Any]) -> Iterator[Tensor]:
    if not is_operator(func):  # it may write to all that it is given
        yield from _tensors(args, named)
        return
    for place, argument in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) else named.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes or argument.name in _STATISTICS:
            yield from _tensors(given)


def _tensors(*given: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves_of(given) if isinstance(leaf, Tensor))
