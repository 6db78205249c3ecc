"""Dealing parameters out among ranks: which rows they make.

**flat**: every rank gets an equal stretch of all elements, wherever parameters begin and end. It
needs an optimizer that treats each element by itself. **whole**: every parameter goes to one rank,
the largest first, to whoever has least.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..._exchange import is_plain
from ...errors import OptimizerArgumentError
from ...groups import Group
from .rows import Laid, Row, Staged
from .stretches import Slice, even_bounds, greedy_owners, level_bounds, slices_between

Cut = Literal["auto", "flat", "whole"]

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether it steps every element by itself, as far as we know: torch's own step on it does."""
    if not (isinstance(kind, type) and issubclass(kind, ELEMENTWISE)):
        return False
    known = {inspect.unwrap(base.step) for base in ELEMENTWISE}
    return inspect.unwrap(kind.step) in known


def choose_cut(
    cut: str, kind: type[Optimizer], params: Sequence[Tensor], defaults: Mapping[str, Any]
) -> Literal["flat", "whole"]:
    """How to deal out, where it is left to us; what cannot be cut is refused."""
    if cut not in ("auto", "flat", "whole"):
        raise OptimizerArgumentError(f"cut is {cut!r}.", 'Choose "auto", "flat" or "whole".')
    if cut == "whole":
        return "whole"
    odd = [index for index, param in enumerate(params) if not is_plain(param)]
    if cut == "flat" and odd:
        raise OptimizerArgumentError(
            f'cut="flat", but parameters {odd[:5]} are not contiguous in memory.',
            'Make them contiguous, or leave it at cut="auto".',
        )
    fits = is_elementwise(kind) and not odd and not defaults.get("differentiable")
    return "flat" if cut == "flat" or fits else "whole"


def deal(
    params: Mapping[int, Tensor],
    group: Group,
    how: Literal["flat", "whole"],
    *,
    laid: bool,
    loads: Sequence[int] | None = None,
) -> list[Row]:
    """Rows for ``params``; ``laid``: they move into flat buffers.

    ``loads`` is what the ranks have already; None if these are the first.
    """
    rows, known = [], loads is not None
    have = list(loads) if loads is not None else [0] * group.size()
    for kind in _by_kind(params):
        if how == "whole":
            row = _whole_row(kind, group, have, laid)
        else:
            row = _flat_row(kind, group, have if known else None, laid)
        for rank, slices in enumerate(row.owned):
            have[rank] += sum(part.length for part in slices)
        rows.append(row)
    return rows


def _by_kind(params: Mapping[int, Tensor]) -> list[dict[int, Tensor]]:
    """Only parameters of one dtype and device can travel together; frozen ones need not."""
    kinds: dict[Hashable, dict[int, Tensor]] = {}
    for index, param in params.items():
        kind = (param.dtype, param.device, param.requires_grad)
        kinds.setdefault(kind, {})[index] = param
    return list(kinds.values())


def _flat_row(
    params: Mapping[int, Tensor], group: Group, loads: Sequence[int] | None, laid: bool
) -> Row:
    total = sum(param.numel() for param in params.values())
    bounds = even_bounds(total, group.size()) if loads is None else level_bounds(total, loads)
    if laid:
        return Laid(bounds, params, group)
    return Staged(owned_by(bounds, params), params, group)


def owned_by(bounds: Sequence[int], params: Mapping[int, Tensor]) -> list[tuple[Slice, ...]]:
    """What each rank owns of parameters that are cut by ``bounds``."""
    indices, sizes = list(params), [param.numel() for param in params.values()]
    return [slices_between(indices, sizes, a, b) for a, b in itertools.pairwise(bounds)]


def _whole_row(params: Mapping[int, Tensor], group: Group, loads: Sequence[int], laid: bool) -> Row:
    sizes = {index: param.numel() for index, param in params.items()}
    owners = dict(zip(params, greedy_owners(list(sizes.values()), loads), strict=True))
    mine = [[n for n in params if owners[n] == rank] for rank in range(group.size())]
    if laid and all(is_plain(param) for param in params.values()):
        bounds = [0]
        for indices in mine:
            bounds.append(bounds[-1] + sum(sizes[n] for n in indices))
        ordered = {n: params[n] for indices in mine for n in indices}
        return Laid(tuple(bounds), ordered, group)
    owned = [[Slice(n, 0, sizes[n]) for n in indices] for indices in mine]
    return Staged(owned, params, group)
