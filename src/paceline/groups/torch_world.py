"""A group in torch's tables of groups, and what torch's own groups tell of themselves."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .._torch import c10d, patches
from .._torch.first_use import before_next_group
from ..errors import RendezvousError

if TYPE_CHECKING:
    from .group import Group

_names = itertools.count()


def register(group: Group, name: str | None, *, default: bool) -> None:
    """Enter ``group`` under ``name``, or under a name that is new in this process."""
    if c10d.is_entered(group):
        raise RendezvousError("this group is registered already", "Register it once.", group.rank())
    if default and c10d.has_default():
        raise RendezvousError(
            "torch.distributed has a default group already",
            "Call torch.distributed.destroy_process_group first, or register without default=True.",
            group.rank(),
        )
    if name is None:
        name = f"paceline_{next(_names)}"
    if c10d.is_taken(name):
        raise RendezvousError(
            f"a group named {name} is registered already", "Choose another name.", group.rank()
        )
    c10d.enter(
        group,
        name,
        backend=group.backend,
        store=group.store,
        members=group.members,
        devices=sorted(group.capabilities.devices),
        default=default,
    )


def facts_of(group: dist.ProcessGroup, device: torch.device) -> tuple[str, timedelta]:
    """The name and the timeout of the engine that ``group`` has for ``device``.

    A group that somebody wrote in Python may have no engine, and no name but that of its class.
    """
    timeout = timedelta(minutes=30)
    with contextlib.suppress(Exception):
        backend = c10d.engine_of(group, device)
        return backend.name(), c10d.timeout_of(backend.options, timeout)
    with contextlib.suppress(Exception):
        if (name := group.name()) != "undefined":
            return name, timeout
    return type(group).__name__, timeout


def store_of(group: dist.ProcessGroup | None) -> dist.Store | None:
    """Return the store through which the ranks of a group found each other, if it has one."""
    with contextlib.suppress(Exception):  # one that was written in Python may raise anything
        return None if group is None else group.get_group_store()
    return None


def before_all_end(group: Group, let_go: Callable[[Group], None]) -> None:
    """Call ``let_go`` of a group that is alive when torch begins to end all groups."""
    known = weakref.ref(group)

    def call() -> None:
        if (alive := known()) is not None:
            let_go(alive)

    c10d.before_all_end(call)


def offer_barriers() -> None:
    """Make ``torch.distributed.monitored_barrier`` take our groups; ``uninstall()`` undoes it."""
    from .group import Group

    c10d.send_barriers_to(Group)
    patches.after_take_back(partial(before_next_group, offer_barriers))


def offer_to_init_process_group() -> None:
    """Make ``torch.distributed.init_process_group("paceline")`` open one of our groups."""
    from .factory import open_for_torch

    if not hasattr(dist.Backend, "PACELINE"):
        dist.Backend.register_backend("paceline", open_for_torch, devices=["cpu", "cuda"])
