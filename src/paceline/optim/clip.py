"""Clipping by the norm of all gradients, wherever they are: whole, in stretches, or in DTensors.

Each rank adds up what it has; one all-reduce makes it the sum of all ranks. Gradients that every
rank has whole are counted once. Every rank gets the same number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import get_total_norm

from .._exchange import by_kind, local_part
from .._torch import foreach
from ..errors import OptimizerArgumentError, OptimizerStateError
from ..groups import Group, ReduceOp


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of one rank; returned by the method ``gradients`` of a sharded optimizer."""

    whole: Sequence[Tensor]  # every rank has them
    parts: Sequence[Tensor] = ()  # this rank's stretches of what is cut over ``group``
    group: Group | None = None  # None: nothing is in stretches


@torch.no_grad()
def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Clip the gradients to a total norm of at most ``max_norm``, and return the norm before.

    ``parameters`` are parameters, a model or an optimizer. If gradients are divided between ranks,
    as with a ZeroRedundancyOptimizer with ``ddp=``, the norm is that of all parts. With ``group``,
    the gradients are this rank's parts of gradients that are divided over that group. All ranks
    call it.
    """
    gradients = _gradients_of(parameters, group)
    terms = _terms(gradients)
    norm = _total(terms, float(norm_type), foreach)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise OptimizerStateError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is "
            "non-finite, so it cannot be clipped. To disable this error and scale the gradients "
            "by the non-finite norm anyway, set `error_if_nonfinite=False`.",
            "Every rank raises this.",
        )
    _scale([tensor for term in terms for tensor in term.tensors], float(max_norm), norm)
    return norm


def _gradients_of(target: Any, group: ProcessGroup | None) -> Gradients:
    if group is None and callable(getattr(target, "gradients", None)):
        return target.gradients()  # type: ignore[no-any-return]
    scattered = getattr(target, "scattered_gradients", None)  # of a wrapper that is paired with one
    if group is None and scattered is not None:
        parts = [part.grad for part in scattered.stretches if part.grad is not None]
        whole = [param.grad for param in target.parameters() if param.grad is not None]
        return Gradients(whole, parts, scattered.group)
    if isinstance(target, Tensor):
        params: Iterable[Tensor] = [target]
    elif isinstance(target, nn.Module):
        params = target.parameters()
    elif isinstance(target, torch.optim.Optimizer):
        params = [param for one in target.param_groups for param in one["params"]]
    else:
        params = target
    grads = [param.grad for param in params if param.grad is not None]
    if group is None:
        return Gradients(grads)
    device = grads[0].device if grads else "cpu"
    return Gradients((), grads, Group.wrap(group, device))


# -- the norm -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Term:
    """Gradients that are spread over the same groups; over none, if every rank has them whole."""

    groups: tuple[Group, ...]
    tensors: list[Tensor] = field(default_factory=list)  # as they lie here, to be scaled
    counted: list[Tensor] = field(default_factory=list)  # the same, as they count


def _terms(gradients: Gradients) -> list[_Term]:
    terms: dict[tuple[int, ...], _Term] = {}

    def term(groups: Sequence[Group]) -> _Term:
        key = tuple(id(group) for group in groups)
        return terms.setdefault(key, _Term(tuple(groups)))

    if gradients.group is not None:  # also where this rank has nothing to add
        spread_out = term([gradients.group])
        spread_out.tensors.extend(gradients.parts)
        spread_out.counted.extend(gradients.parts)
    spread: dict[int, Group] = {}
    for grad in gradients.whole:
        if hasattr(grad, "to_local"):  # a DTensor
            groups, mine = _spread(grad, spread)
        else:
            groups, mine = [], grad
        found = term(groups)
        found.tensors.append(local_part(grad))
        found.counted.append(mine)
    return list(terms.values())


def _spread(grad: Any, known: dict[int, Group]) -> tuple[list[Group], Tensor]:
    """The groups that a DTensor is cut over, and this rank's part, summed if it was not yet."""
    from torch.distributed.tensor import Replicate

    if any(place.is_partial() for place in grad.placements):
        settled = [Replicate() if place.is_partial() else place for place in grad.placements]
        grad = grad.redistribute(grad.device_mesh, settled)
    groups = []
    for dim, place in enumerate(grad.placements):
        if not place.is_replicate() and grad.device_mesh.size(dim) > 1:
            raw = grad.device_mesh.get_group(dim)
            groups.append(known.setdefault(id(raw), Group.wrap(raw, local_part(grad).device)))
    return groups, local_part(grad)


def _total(terms: Sequence[_Term], order: float, foreach: bool | None) -> Tensor:
    """The norm of all of them; costs one all-reduce for each group that something is cut over."""
    groups = list(dict.fromkeys(group for term in terms for group in term.groups))
    counted = [tensor for term in terms for tensor in term.counted]
    if not groups:
        return get_total_norm(counted, order, foreach=foreach)
    if not order > 0:
        raise OptimizerArgumentError(
            f"norm_type is {order}; gradients are divided.", "Give a number above 0, or inf."
        )
    device = groups[0].device if not counted else counted[0].device
    sums = torch.stack([_power(term.counted, order, foreach, device) for term in terms])
    for group in groups:
        inside = [at for at, term in enumerate(terms) if group in term.groups]
        mine = sums[inside]
        group.all_reduce(mine, ReduceOp.MAX if math.isinf(order) else ReduceOp.SUM)
        sums[inside] = mine
    total = sums.max() if math.isinf(order) else sums.sum().pow(1 / order)
    return total.to(_dtype(counted))


def _power(
    tensors: Sequence[Tensor], order: float, foreach: bool | None, device: torch.device
) -> Tensor:
    """The norm to the power of its order, which is what adds up; in 64 bits, so that it fits."""
    some = [tensor for tensor in tensors if tensor.numel()]
    norm = get_total_norm(some, order, foreach=foreach).to(device, torch.float64)
    return norm if math.isinf(order) else norm.pow(order)


def _dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    found = tensors[0].dtype if tensors else torch.float32
    for tensor in tensors:
        found = torch.promote_types(found, tensor.dtype)
    return found


def _scale(grads: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for some in by_kind(grads):
        foreach.mul_(some, factor.to(some[0].device))
