"""What a tensor tells of itself only in private."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written to, views included. Nothing public tells that it was."""

indices_of: Callable[[Tensor], Tensor] = methodcaller("_indices")
"""The indices of a sparse tensor as they are; ``indices()`` refuses one that is not coalesced."""

values_of: Callable[[Tensor], Tensor] = methodcaller("_values")
"""The values of a sparse tensor as they are; ``values()`` refuses one that is not coalesced."""

local_part: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")
"""The memory that this rank has of a DTensor; ``to_local()`` is a view that autograd records."""

is_unwritten_copy: Callable[[Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]
"""Whether nothing was written to a tensor, under any name, since :func:`copy_on_write` of it."""

_NONE: Mapping[int, Any] = {}


def copy_on_write(tensor: Tensor) -> Tensor:
    """What ``tensor`` is now; memory is copied when somebody writes to either of them."""
    try:
        return torch._lazy_clone(tensor.detach())
    except RuntimeError:  # memory that is not torch's own
        return tensor.detach().clone()


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor; asking its class would import all of them, which takes a second."""
    return type(tensor) is not Tensor and hasattr(tensor, "_local_tensor")


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements of ``tensor`` surely share memory, as those of an expanded one do.

    From shape and strides alone; the public ``is_non_overlapping_and_dense`` asks for no gaps, too.
    """
    return torch._debug_has_internal_overlap(tensor) == 1


def hooks_of(tensor: Tensor) -> Mapping[int, Any]:
    """The hooks that ``register_hook`` put on a tensor; a graph would not call them."""
    return tensor._backward_hooks or _NONE


def late_hooks_of(tensor: Tensor) -> Mapping[int, Any]:
    """The hooks that ``register_post_accumulate_grad_hook`` put on a parameter."""
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or _NONE


def forget_empty_hooks(tensor: Tensor) -> None:
    """Let go of the place of hooks that are gone.

    When the last handle of ``register_hook`` is removed, torch keeps an empty dictionary and calls
    into Python for it in every backward pass, for microseconds each time.
    """
    if not tensor._backward_hooks:
        tensor._backward_hooks = None
