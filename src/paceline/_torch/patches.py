"""Changes to torch's own objects: made when they are first needed, and taken back on demand.

Nothing else in the package assigns to an attribute of torch's. What is only entered in tables of
torch's under names of ours (operators, types of graph inputs, a backend) is no such change: it
concerns nobody else, and stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ABSENT: Any = object()


@dataclass(frozen=True)
class _Change:
    owner: Any
    name: str
    old: Any
    new: Any

    def take_back(self) -> None:
        if vars(self.owner).get(self.name) is not self.new:
            return  # somebody has changed it since: theirs may call ours, and ours what was before
        if self.old is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.old)


_changes: list[_Change] = []
_then: list[Callable[[], None]] = []


def put(owner: Any, name: str, new: Any) -> None:
    """Set an attribute of a module, a class or a function of torch's, until :func:`take_back`."""
    _changes.append(_Change(owner, name, vars(owner).get(name, _ABSENT), new))
    setattr(owner, name, new)


def after_take_back(callback: Callable[[], None]) -> None:
    """Call ``callback`` once, when the changes are taken back: to forget that they were made."""
    _then.append(callback)


def take_back() -> None:
    """Undo all changes; they are made again when they are next needed."""
    while _changes:
        _changes.pop().take_back()
    while _then:
        _then.pop()()
