# mypy: disable-error-code="arg-type, assignment"
"""A group in torch's tables of groups: everything here is private to torch, and only here.

Holds for torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import itertools
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d as c10d

from ..errors import RendezvousError

if TYPE_CHECKING:
    from .group import Group

_names = itertools.count()


def register(group: Group, name: str | None, *, default: bool) -> None:
    """Enter ``group`` under ``name``, or under a name that is new in this process."""
    world = c10d._world
    if group in world.pg_map:
        raise RendezvousError("this group is registered already", "Register it once.", group.rank())
    if default and world.default_pg is not None:
        raise RendezvousError(
            "torch.distributed has a default group already",
            "Call torch.distributed.destroy_process_group first, or register without default=True.",
            group.rank(),
        )
    if name is None:
        name = f"paceline_{next(_names)}"
    if name in world.pg_names.values():
        raise RendezvousError(
            f"a group named {name} is registered already", "Choose another name.", group.rank()
        )
    group._set_group_name(name)
    world.pg_map[group] = (group.backend, group.store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {member: rank for rank, member in enumerate(group.members)}
    devices = sorted(group.capabilities.devices)
    world.pg_backend_config[group] = ",".join(f"{device}:{group.backend}" for device in devices)
    world.tags_to_pg.setdefault("", []).append(group)
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    world.pg_to_tag[group] = f"ptd:{name}"
    _register_process_group(name, group)
    if default:
        c10d._update_default_pg(group)


def members_of(group: dist.ProcessGroup) -> list[int] | None:
    """The ranks of a torch group as the whole job counts them, if torch knows the group."""
    ranks = c10d._world.pg_group_ranks.get(group)
    return None if ranks is None else list(ranks)


def facts_of(group: dist.ProcessGroup, device: torch.device) -> tuple[str, timedelta]:
    """The name and the timeout of the engine that ``group`` has for ``device``.

    A group that somebody wrote in Python may have no engine, and no name but that of its class.
    """
    timeout = timedelta(minutes=30)
    with contextlib.suppress(Exception):
        backend = group._get_backend(device)
        return backend.name(), getattr(backend.options, "_timeout", timeout)
    with contextlib.suppress(Exception):
        if (name := group.name()) != "undefined":
            return name, timeout
    return type(group).__name__, timeout


def store_of(group: dist.ProcessGroup | None) -> dist.Store | None:
    """Where the ranks of a group met, if it lives and says so."""
    with contextlib.suppress(Exception):  # one that was written in Python may raise anything
        return None if group is None else group.get_group_store()
    return None


def unregister(group: Group) -> None:
    """Take ``group`` out again; nothing happens when torch has already done so."""
    world = c10d._world
    name = world.pg_names.pop(group, None)
    if name is None:
        return
    if world.default_pg is group:
        c10d._update_default_pg(None)
    world.pg_map.pop(group, None)
    world.pg_group_ranks.pop(group, None)
    world.pg_backend_config.pop(group, None)
    tag = world.pg_to_tag.pop(group, "")
    for key in ("", tag):
        if group in world.tags_to_pg.get(key, []):
            world.tags_to_pg[key].remove(group)
    _unregister_process_group(name)


def offer_to_init_process_group() -> None:
    """Make ``torch.distributed.init_process_group("paceline")`` open one of our groups."""
    from .factory import open_for_torch

    if not hasattr(dist.Backend, "PACELINE"):
        dist.Backend.register_backend("paceline", open_for_torch, devices=["cpu", "cuda"])
