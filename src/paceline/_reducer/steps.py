"""Steps of optimizers: whoever has to look at gradients before one uses them is asked first.

torch calls one function of ours before every step of every optimizer, and only while somebody wants
to look.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

Owner = TypeVar("Owner")
Look = Callable[[Any, Optimizer], None]

_looks: weakref.WeakKeyDictionary[Any, Look] = weakref.WeakKeyDictionary()  # by owner
_handle: list[RemovableHandle] = []  # torch's


def look_before_steps(owner: Owner, look: Callable[[Owner, Optimizer], None]) -> None:
    """Call ``look(owner, optimizer)`` before every step, as long as ``owner`` lives."""
    _looks[owner] = look
    _come()


def stop_looking(owner: object) -> None:
    """Ask ``owner`` no more."""
    _looks.pop(owner, None)
    _leave_if_empty()


def steps(optimizer: Optimizer) -> set[int]:
    """What an optimizer steps: the ids of its parameters."""
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _ask_all(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for known in _looks.keyrefs():  # a list made at once: another thread may add an owner
        owner = known()
        look = None if owner is None else _looks.get(owner)
        if look is not None:
            look(owner, optimizer)
    _leave_if_empty()


def _come() -> None:
    if not _handle:
        _handle.append(register_optimizer_step_pre_hook(_ask_all))


def _leave_if_empty() -> None:
    if not _looks and _handle:
        _handle.pop().remove()
        if _looks:  # one that came meanwhile, in another thread
            _come()
