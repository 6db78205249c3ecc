"""The state of pieces as the state of parameters, and back.

What an optimizer keeps for a tensor is either elementwise (as long as the tensor: a momentum) or
common to all of its elements (a step count). The first is cut and put together with the parameter,
the second is repeated. A state dict holds, for every parameter by its index, what an optimizer on
one process would hold; so it says nothing of how many ranks there were.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._exchange import memory_like, shaped_like
from ...errors import OptimizerStateError
from .pieces import LocalPiece
from .stretches import Slice

State = Mapping[int, Mapping[str, Any]]  # by index of parameter and name

# Common to all elements even of a parameter without dimensions, whose momentum looks the same.
_COMMON = frozenset({"step", "mu_product", "eta", "mu"})


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank has of the state of one parameter."""

    part: Slice
    names: tuple[str, ...]  # in the order in which the optimizer keeps them
    elementwise: dict[str, Tensor]  # the part's own elements, as they lie in memory
    common: dict[str, Any]

    def pack(self) -> list[Any]:
        """As an object that groups carry."""
        part = [self.part.param, self.part.start, self.part.stop]
        elementwise = {name: value.cpu() for name, value in self.elementwise.items()}
        return [part, list(self.names), elementwise, on_cpu(self.common)]

    @classmethod
    def unpack(cls, packed: Any) -> Share:
        """The reverse."""
        part, names, elementwise, common = packed
        return cls(Slice(*part), tuple(names), dict(elementwise), dict(common))


def shares_of(pieces: Iterable[LocalPiece], state: Mapping[Tensor, Any]) -> list[Share]:
    """What this rank has, one share for each stretch of a parameter."""
    found: list[Share] = []
    for piece in pieces:
        if state.get(piece.tensor):
            found.extend(_shares(piece, state[piece.tensor]))
    return found


def _shares(piece: LocalPiece, own: Mapping[str, Any]) -> Iterable[Share]:
    if piece.is_whole:
        yield Share(piece.slices[0], tuple(own), {}, dict(own))
        return
    shape = piece.tensor.shape
    cut = {n: v for n, v in own.items() if isinstance(v, Tensor) and v.shape == shape}
    common = {n: v for n, v in own.items() if n not in cut}
    at = 0
    for part in piece.slices:
        here = {name: value[at : at + part.length] for name, value in cut.items()}
        yield Share(part, tuple(own), here, common)
        at += part.length


def assemble(shares: Iterable[Share], params: Sequence[Tensor]) -> dict[int, dict[str, Any]]:
    """The state of whole parameters, on the CPU, from all ranks' shares."""
    by_param: dict[int, list[Share]] = {}
    for share in shares:
        by_param.setdefault(share.part.param, []).append(share)
    return {index: _joined(by_param[index], params[index]) for index in sorted(by_param)}


def _joined(shares: Sequence[Share], param: Tensor) -> dict[str, Any]:
    first = shares[0]
    if sum(share.part.length for share in shares) != param.numel():
        raise OptimizerStateError(
            f"the state of parameter {first.part.param} is not complete: "
            f"{sum(share.part.length for share in shares)} of {param.numel()} elements have one.",
            "Only some ranks have taken a step; nothing was consolidated.",
        )
    return {
        name: first.common[name] if name in first.common else _whole(shares, name, param)
        for name in first.names
    }


def _whole(shares: Sequence[Share], name: str, param: Tensor) -> Tensor:
    flat = torch.empty(param.numel(), dtype=shares[0].elementwise[name].dtype)
    for share in shares:
        flat[share.part.start : share.part.stop] = share.elementwise[name]
    return shaped_like(flat, param)


# -- back ---------------------------------------------------------------------------------------


def state_for(piece: LocalPiece, state: State, params: Sequence[Tensor]) -> dict[str, Any] | None:
    """What ``piece`` is to keep, in memory of its own; None if it has no state."""
    index = piece.slices[0].param
    own = state.get(index)
    if not own:
        return None
    if piece.is_whole:
        whole: dict[str, Any] = copied(own)
        return whole
    names = elementwise_names(own, params[index])
    kept = {name: copied(value) for name, value in own.items() if name not in names}
    for name in names:
        parts = [
            memory_like(state[part.param][name], params[part.param])[part.start : part.stop]
            for part in piece.slices
        ]
        kept[name] = torch.cat(parts)
    return {name: kept[name] for name in own}


def kind_of(index: int, state: State, params: Sequence[Tensor]) -> Hashable:
    """Equal for parameters whose state can be one: the same names, the same common values."""
    own = state.get(index)
    if not own:
        return ()
    names = elementwise_names(own, params[index])
    return tuple((name, None if name in names else _frozen(value)) for name, value in own.items())


def elementwise_names(own: Mapping[str, Any], param: Tensor) -> set[str]:
    """What is as long as the parameter."""
    tensors = {n for n, v in own.items() if isinstance(v, Tensor) and v.shape == param.shape}
    return tensors if param.dim() else tensors - _COMMON


def _frozen(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), tuple(value.reshape(-1).tolist())
    return repr(value)


# -- copies -------------------------------------------------------------------------------------


def on_cpu(value: Any) -> Any:
    """A copy of ``value``, every tensor in it on the CPU."""
    return _mapped(value, lambda tensor: tensor.detach().cpu())


def copied(value: Any) -> Any:
    """A copy of ``value`` in memory of its own."""
    return _mapped(value, lambda tensor: tensor.detach().clone())


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(inner, change) for inner in value)
    return copy.deepcopy(value)
