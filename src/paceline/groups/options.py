"""GroupOptions: what a group was opened with, and hands on to those that come out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch

from .._torch.c10d import timeout_of

_NCCL = ("config", "is_high_priority_stream")  # of torch's options for it, those that are its own


@dataclass(frozen=True)
class GroupOptions:
    """The arguments of :func:`paceline.new_group` that define the kind of group.

    ``Group.split`` and ``Group.merge`` use them for new groups, unless others are given.
    ``backend`` is the name that was requested, which may be ``auto``; ``Group.backend`` is the one
    that was chosen.
    """

    backend: str
    timeout: timedelta
    device: torch.device
    backend_options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.timeout, timedelta):
            kind = type(self.timeout).__name__
            raise TypeError(f"timeout: expected a datetime.timedelta, got {kind}")
        if self.timeout <= timedelta(0):
            raise ValueError(f"timeout: expected more than zero, got {self.timeout}")
        object.__setattr__(self, "device", torch.device(self.device))
        frozen = MappingProxyType(dict(self.backend_options))
        object.__setattr__(self, "backend_options", frozen)

    @property
    def _timeout(self) -> timedelta:
        """The timeout, by the name it has in torch's options."""
        return self.timeout

    def changed(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        device: torch.device | str | None = None,
        backend_options: Mapping[str, object] | None = None,
    ) -> GroupOptions:
        """Return a copy with other values; options of the backend are kept if the backend is."""
        kept = self.backend_options if backend in (None, self.backend) else {}
        return replace(
            self,
            backend=backend or self.backend,
            timeout=timeout or self.timeout,
            device=torch.device(device or self.device),
            backend_options={**kept, **(backend_options or {})},
        )

    def described(self) -> str:
        """Return one line with what must be the same on all ranks of a group."""
        given = ", ".join(f"{k}={v!r}" for k, v in sorted(self.backend_options.items()))
        return f"{self.backend} on {self.device.type}" + (f" with {given}" if given else "")

    def taken_from(self, given: Any) -> GroupOptions:
        """Return the options that ``opts`` of ``split_group``, ours or torch's, stand for."""
        if given is None or isinstance(given, GroupOptions):
            return given or self
        own = {name: getattr(given, name) for name in _NCCL if hasattr(given, name)}
        return self.changed(timeout=timeout_of(given), backend_options=own)
