"""Keeps module buffers (running means and the like) alike across ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from ..groups import Group
from .models import broadcast


class _BufferCommHookLocation(Enum):
    """When a buffer hook runs."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


@dataclass(frozen=True)
class _BufferCommHook:
    """What stands in for the broadcast."""

    buffer_comm_hook: Callable[..., Any]
    buffer_comm_hook_state: Any
    buffer_comm_hook_location: Any

    @property
    def after_forward(self) -> bool:
        """Whether it runs after the forward pass; torch's own enum means the same."""
        return bool(self.buffer_comm_hook_location.name == "POST_FORWARD")


class Buffers:
    """The buffers of ``module``, except the ignored ones.

    The modules are found once; what they hold is read each time, so a buffer that is replaced by
    another tensor, or appears later, is followed.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._ignored = frozenset(ignored)
        self._homes = [(path, owner._buffers) for path, owner in module.named_modules()]
        self.hook: _BufferCommHook | None = None
        self.futures: list[Future[Any]] = []

    @property
    def hooked_after(self) -> bool:
        """Whether a hook makes them alike, after the forward pass."""
        return self.hook is not None and self.hook.after_forward

    def __bool__(self) -> bool:
        return any(value is not None for _, home in self._homes for value in home.values())

    def named(self) -> dict[str, Tensor]:
        """The buffers as they are now, each once."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for path, home in self._homes:
            for key, value in home.items():
                name = f"{path}.{key}" if path else key
                if value is not None and name not in self._ignored and id(value) not in seen:
                    seen.add(id(value))
                    found[name] = value
        return found

    def sync(self, group: Group, root: int) -> None:
        """Give every rank the root's, or do what the hook does instead.

        Versions are kept: two forward passes before one backward are no reason to complain about
        buffers that were modified in place.
        """
        if self.hook is None and group.size() == 1:
            return
        named = self.named()
        with (
            torch.no_grad(),
            torch.autograd._unsafe_preserve_version_counter(tuple(named.values())),
        ):
            if self.hook is None:
                broadcast(group, list(named.values()), root)
                return
            futures = self.hook.buffer_comm_hook(self.hook.buffer_comm_hook_state, named)
        if futures is not None:
            self.futures.extend(futures if isinstance(futures, list) else [futures])

    def settle(self) -> None:
        """Wait for what a hook left to the end of the backward pass."""
        futures, self.futures = self.futures, []
        for future in futures:
            future.wait()
