"""How a compiled graph reaches a wrapper: by a number, in a tensor that the graph is given.

A graph holds no object of ours, so it is the same on all ranks and can be kept on disk.
``paceline.compiled`` has the rest.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .wrapper import DistributedDataParallel

_numbers = itertools.count(1)
_wrappers: WeakValueDictionary[int, DistributedDataParallel] = WeakValueDictionary()


def number(ddp: DistributedDataParallel) -> Tensor:
    """A number under which :func:`wrapper_numbered` finds the wrapper while it lives."""
    mine = next(_numbers)
    _wrappers[mine] = ddp
    return torch.tensor(mine)


def wrapper_numbered(number: Tensor) -> DistributedDataParallel:
    """The wrapper of that number."""
    return _wrappers[int(number)]


def forward_in_graph(ddp: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """The forward that ``torch.compile`` meets; ``paceline.compiled`` has it trace another one."""
    return ddp._forward(*inputs, **kwargs)
