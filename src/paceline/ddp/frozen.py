"""Frozen parameters that a reducer has let go of, and what happens if one of them thaws too late.

A model that was frozen in part is averaged without that part. Thawed before a forward, the part is
taken back. Thawed inside a forward whose backward runs inside it too, it is noticed only when its
gradient comes, and then the pass cannot be what all ranks agreed on: that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakMethod

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._reducer import listen
from ..errors import ThawedParameterError


class LetGo:
    """Parameters that were trained, and are frozen."""

    def __init__(self, params: Mapping[str, nn.Parameter], rank: int) -> None:
        self._rank = rank
        self._handles: list[RemovableHandle] = []
        self._params = params

    def watch(self, averages: WeakMethod[Callable[[], bool]]) -> None:
        """Refuse a gradient of one that has thawed, in a pass that ``averages``."""
        for name, param in self._params.items():
            self._handles.append(listen(param, _refusal(self._rank, name, averages)))

    def forget(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _refusal(
    rank: int, name: str, averages: WeakMethod[Callable[[], bool]]
) -> Callable[[Tensor], None]:
    def arrived(param: Tensor) -> None:
        asked = averages()
        if param.requires_grad and asked is not None and asked():
            raise ThawedParameterError(rank, name)

    return arrived
