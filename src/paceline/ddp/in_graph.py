"""How a compiled graph reaches a wrapper: by a number, in a tensor that the graph is given.

A graph holds no object of ours, so it is the same on all ranks and can be kept on disk.
``paceline.compiled`` has the rest.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .wrapper import DistributedDataParallel

_numbers = itertools.count(1)
_wrappers: WeakValueDictionary[int, DistributedDataParallel] = WeakValueDictionary()


@dataclass(eq=False)
class Traced:
    """What compiled graphs, and those who run them, have of one wrapper.

    A traced backward pass ends at ``anchor``. A graph seems to write ``beat``, so that the compiler
    keeps what seems to do so.
    """

    number: Tensor  # :func:`wrapper_numbered` finds the wrapper by it, while that lives
    begin_forward: Callable[..., tuple[Any, Any]]  # before the module's own: returns its inputs
    end_forward: Callable[[Any], Any]  # behind it; where it failed, replica.forward_failed instead
    eager_forward: Callable[..., Any]  # all of it; Dynamo compiles only the module's own
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    beat: Tensor = field(default_factory=lambda: torch.zeros(()))
    in_step: bool = False  # a compiled step sees to the averages

    @contextlib.contextmanager
    def inside_step(self) -> Iterator[None]:
        """Within it a forward of the wrapper is that of its module."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False


def number(ddp: DistributedDataParallel) -> Tensor:
    """A number under which :func:`wrapper_numbered` finds the wrapper while it lives."""
    mine = next(_numbers)
    _wrappers[mine] = ddp
    return torch.tensor(mine)


def wrapper_numbered(number: Tensor) -> DistributedDataParallel:
    """Return the wrapper with this number."""
    return _wrappers[int(number)]


def forward_in_graph(ddp: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """The forward that ``torch.compile`` sees; ``paceline.compiled`` makes it trace another one."""
    return ddp.traced.eager_forward(*inputs, **kwargs)
