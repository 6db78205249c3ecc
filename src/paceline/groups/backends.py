"""The table of backends: what a name given to new_group opens, ours and those of others.

A backend is a function that opens this rank's end of a group. Most only bring an engine
(``engine.py``): :class:`EngineBackend` makes paceline's groups over it, so that one file with an
engine and one line, ``register_backend("mine", EngineBackend(open_mine))``, are a backend.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import ProcessGroup, Store

from .._transport import agree_on
from ..errors import (
    BackendTakenError,
    EngineUnavailableError,
    UnexpectedOptionError,
    UnknownBackendError,
)
from .engine import Engine
from .group import Group
from .options import GroupOptions

ENTRY_POINTS = "paceline.backends"


class ProcessGroupFactory(Protocol):
    """A function that opens a group on this rank; every rank calls it with its own rank.

    ``kwargs`` are the options given to :func:`new_group`; raise an error for those you do not know.
    """

    def __call__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        device: torch.device,
        **kwargs: object,
    ) -> ProcessGroup: ...


_backends: dict[str, ProcessGroupFactory] = {}


def register_backend(name: str, func: ProcessGroupFactory) -> None:
    """Add a backend: :func:`new_group` calls ``func`` for ``name``.

    To make a backend from an engine, use :class:`~paceline.groups.EngineBackend`.
    """
    if name in _backends:
        raise BackendTakenError(name)
    _backends[name] = replace(func, name=name) if isinstance(func, EngineBackend) else func


def factory_of(backend: str) -> ProcessGroupFactory:
    """What was registered under a name, or is offered by a package that is installed."""
    if backend not in _backends:
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=backend):
            register_backend(backend, entry.load())
            break
        else:
            offered = {e.name for e in importlib.metadata.entry_points(group=ENTRY_POINTS)}
            raise UnknownBackendError(backend, known=sorted({*_backends, *offered}))
    return _backends[backend]


@dataclass(frozen=True)
class Availability:
    """Whether a backend can be used on this machine, and if not, why."""

    available: bool
    reason: str = ""


Opener = Callable[..., Engine]  # (store, rank, size, timeout, device, **options)


def _anywhere() -> Availability:
    """Every machine can use it."""
    return Availability(True)


@dataclass(frozen=True)
class EngineBackend:
    """A backend whose groups are :class:`Group` objects on the engine that ``open`` returns.

    Pass one to :func:`paceline.register_backend`. ``open(store, rank, size, timeout, device,
    **options)`` is called on every rank, with a store that only these ranks use, and returns an
    :class:`~paceline.groups.Engine`. Such groups can be split, merged and reconfigured.
    """

    open: Opener
    options: Sequence[str] | None = ()
    """Names of the options that ``open`` reads; others are refused. None: it checks them itself."""
    max_ranks: int | None = None
    """More ranks are refused before any of them waits for the others."""
    availability: Callable[[], Availability] = _anywhere
    """Says whether the engine can be used on this machine, for :func:`capabilities`."""
    peers: bool = True
    """False: ranks never meet, so they do not compare versions and options before they open."""
    same_options: bool = True
    """Whether all ranks must give the same options."""
    name: str = ""
    """Under which it is registered; ``register_backend`` fills it in."""

    def __call__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        device: torch.device,
        **kwargs: object,
    ) -> Group:
        """Open this rank's end of a group."""
        options = GroupOptions(self.name, timeout, device, kwargs)
        engine = self.engine(store, rank, world_size, options)
        return Group(engine, rank, world_size, options=options, store=store, reopen=open_engine)

    def refuse(self, rank: int, size: int, given: Mapping[str, object]) -> None:
        """Raise for unknown options or too many ranks, before waiting for other ranks."""
        if self.options is not None and (unknown := sorted(set(given) - set(self.options))):
            raise UnexpectedOptionError(self.name, unknown, self.options)
        if self.max_ranks is not None and size > self.max_ranks:
            reason = f"{size} ranks, and it takes {self.max_ranks}"
            raise EngineUnavailableError(self.name, reason, rank)

    def engine(self, store: Store, rank: int, size: int, options: GroupOptions) -> Engine:
        """Open this rank's engine, after all ranks have agreed on what to open."""
        given = options.backend_options
        self.refuse(rank, size, given)
        if self.peers:
            alike = given if self.same_options else {}
            agree_on(store, rank, size, options.timeout, _facts(self.name, options.device, alike))
        return self.open(store, rank, size, options.timeout, options.device, **given)


def _facts(backend: str, device: torch.device, options: Mapping[str, object]) -> dict[str, str]:
    """What ranks that open one group must have in common; of options, the plain ones."""
    facts = {"the version of paceline": importlib.metadata.version("paceline"), "backend": backend}
    if backend in ("auto", "paceline"):
        facts["PACELINE_BACKEND"] = os.environ.get("PACELINE_BACKEND", "auto")
        facts["device"] = device.type
    plain = (int, float, str, type(None))
    return facts | {f"{k}=": repr(v) for k, v in options.items() if isinstance(v, plain)}


def open_engine(store: Store, rank: int, size: int, options: GroupOptions) -> Engine:
    """The engine that ``options`` ask for; every rank calls it. Not every backend has one."""
    backend = _backends.get(options.backend)
    if not isinstance(backend, EngineBackend):
        known = [name for name, other in _backends.items() if isinstance(other, EngineBackend)]
        raise UnknownBackendError(options.backend, known=sorted(known))
    return backend.engine(store, rank, size, options)


def capabilities() -> dict[str, Availability]:
    """Return, for every backend, whether it can be used on this machine and, if not, why."""
    found = {}
    for name, backend in sorted(_backends.items()):
        tells = backend.availability if isinstance(backend, EngineBackend) else _anywhere
        found[name] = tells()
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        found.setdefault(entry.name, Availability(True, f"offered by {entry.value}"))
    return found
