"""Keeps module buffers (running means and the like) alike across ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from .._torch import foreach
from .._torch.autograd import keeping_versions
from .._torch.nn import buffers_dict
from ..groups import Group
from .models import broadcast

_PACKED = 1024 * 1024  # bytes; more than that is not copied together


class _BufferCommHookLocation(Enum):
    """When a buffer hook runs."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


@dataclass(frozen=True)
class _BufferCommHook:
    """A hook that replaces the broadcast of buffers."""

    buffer_comm_hook: Callable[..., Any]
    buffer_comm_hook_state: Any
    buffer_comm_hook_location: Any

    @property
    def after_forward(self) -> bool:
        """Whether it runs after the forward pass; torch's own enum means the same."""
        return bool(self.buffer_comm_hook_location.name == "POST_FORWARD")


class _Pack:
    """Memory in which small tensors of any types travel as one message, kept from pass to pass."""

    def __init__(self, tensors: list[Tensor], group: Group) -> None:
        self._group = group
        self._kinds = [(t.dtype, t.shape, t.device) for t in tensors]
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // 16) * 16  # so that each can be read as its type
        device = tensors[0].device
        if device.type == "cpu" and group.capabilities.in_place_memory:
            self._memory = group.allocate(size, torch.uint8)
        else:
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._places = [
            self._memory[at : at + t.nbytes].view(t.dtype).view(t.shape)
            for at, t in zip(starts, tensors, strict=True)
        ]

    def fits(self, tensors: list[Tensor], group: Group) -> bool:
        """Whether it was made for tensors like these."""
        return group is self._group and self._kinds == [
            (t.dtype, t.shape, t.device) for t in tensors
        ]

    def broadcast(self, tensors: list[Tensor], root: int) -> None:
        """Give every rank the root's values."""
        mine = self._group.rank() == root
        if mine:
            foreach.copy_(self._places, tensors)
        self._group.broadcast(self._memory, root)
        if not mine:
            foreach.copy_(tensors, self._places)


class Buffers:
    """The buffers of ``module``, except the ignored ones.

    The modules are found once; what they hold is read each time, so a buffer that is replaced by
    another tensor, or appears later, is followed.
    """

    def __init__(
        self, module: nn.Module, ignored: Collection[str], *, in_forward: bool = True
    ) -> None:
        self.in_forward = in_forward  # forwards make them alike
        self.stale = True  # they have changed since they were last alike
        self.root = 0  # whose counted last
        self._ignored = frozenset(ignored)
        self._homes = [(path, buffers_dict(owner)) for path, owner in module.named_modules()]
        self._dicts = [home for _, home in self._homes]
        self._pack: _Pack | None = None
        self.hook: _BufferCommHook | None = None
        self.futures: list[Future[Any]] = []

    @property
    def hooked_after(self) -> bool:
        """Whether a hook makes them alike, after the forward pass."""
        return self.hook is not None and self.hook.after_forward

    def __bool__(self) -> bool:
        if not any(self._dicts):  # asked in every forward, and most modules have none
            return False
        return any(value is not None for home in self._dicts for value in home.values())

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
            keeping_versions(tuple(named.values())),
        ):
            if self.hook is None:
                self._broadcast(group, list(named.values()), root)
                return
            futures = self.hook.buffer_comm_hook(self.hook.buffer_comm_hook_state, named)
        if futures is not None:
            self.futures.extend(futures if isinstance(futures, list) else [futures])

    def _broadcast(self, group: Group, tensors: list[Tensor], root: int) -> None:
        if not tensors:  # all are ignored
            return
        devices = {t.device for t in tensors}
        if len(devices) > 1 or sum(t.nbytes for t in tensors) > _PACKED:
            broadcast(group, tensors, root)
            return
        if self._pack is None or not self._pack.fits(tensors, group):
            self._pack = _Pack(tensors, group)
        self._pack.broadcast(tensors, root)

    def settle(self) -> None:
        """Wait for what a hook left to the end of the backward pass."""
        futures, self.futures = self.futures, []
        for future in futures:
            future.wait()
