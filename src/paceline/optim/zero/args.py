"""What a ZeroRedundancyOptimizer is given, checked as torch's checks it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ...errors import OptimizerArgumentError, OptimizerTypeError
from ...groups import group_or_default

# torch has functional forms of these, which is what it wants for steps inside a backward pass.
_OVERLAPS = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "RMSprop", "Rprop", "SGD")


def read_params(params: Any) -> tuple[list[Any], list[Tensor]]:
    """The parameters or groups as a list, and all parameters of them."""
    if isinstance(params, Tensor):
        raise OptimizerTypeError(
            f"`params` argument should be an iterable of Tensors, but got {torch.typename(params)}."
        )
    try:
        listed = list(params)
    except TypeError as error:
        raise OptimizerTypeError(
            "`params` argument should be an iterable of Tensors or dicts, but got "
            f"{torch.typename(params)}."
        ) from error
    if not listed:
        raise OptimizerArgumentError("ZeroRedundancyOptimizer got an empty parameter list.")
    if all(isinstance(item, Tensor) for item in listed):
        return listed, list(listed)
    if not all(isinstance(item, dict) for item in listed):
        raise OptimizerTypeError("`params` argument should be an iterable of Tensors or dicts.")
    for group in listed:
        if "params" not in group:
            raise OptimizerArgumentError(
                "Each parameter group passed-in via `params` must have a 'params' key mapping to "
                "the parameters in the group."
            )
        given = group["params"]  # it may be a generator, which is read once
        group["params"] = [given] if isinstance(given, Tensor) else list(given)
    return listed, [param for group in listed for param in group["params"]]


def check_types(params: Sequence[Tensor], *, may_differ: bool) -> None:
    """Parameters are dense, and of one type unless that is allowed."""
    kinds = list(dict.fromkeys(torch.typename(param) for param in params))
    problem = "ZeroRedundancyOptimizer only supports using the same dense type for all parameters"
    if any(param.is_sparse for param in params):
        raise OptimizerArgumentError(f"{problem} but got {' and '.join(kinds)}.")
    if len(kinds) > 1 and not may_differ:
        raise OptimizerArgumentError(
            f"{problem} but got both {' and '.join(kinds)}.",
            'To use several types, pass cut="flat" or cut="whole".',
        )


def choose_class(kind: Any, *, overlaps: bool) -> Any:
    """The class of the inner optimizer; torch's functional ones stand for the ordinary ones."""
    functional = _functional_forms()
    plain = {form: ordinary for ordinary, form in functional.items()}
    if not overlaps:
        if kind in plain:
            raise OptimizerArgumentError(
                f"Passing in a functional optimizer {kind} when `overlap_with_ddp=False`."
            )
        return kind
    if kind in plain:
        return plain[kind]
    if kind in functional or kind in {getattr(torch.optim, name) for name in _OVERLAPS}:
        return kind
    raise OptimizerArgumentError(
        "Using `ddp_with_overlap=True` requires using a functional optimizer, but there is no "
        f"supported functional optimizer equivalent for {kind}."
    )


def _functional_forms() -> dict[type[Optimizer], Any]:
    """torch's functional optimizers; who has one has imported them, which takes a second."""
    utils = sys.modules.get("torch.distributed.optim.utils")
    return dict(getattr(utils, "functional_optim_map", {}))


def choose_group(process_group: ProcessGroup | None, ddp: Any) -> ProcessGroup:
    """The given group, the wrapper's, the current one, torch's default."""
    if process_group is None and ddp is not None:
        process_group = ddp.process_group
    return group_or_default(process_group)
