# mypy: disable-error-code="arg-type, assignment, attr-defined, no-any-return"
# (torch's annotations of these names are those of its own callers)
"""Process groups: torch's tables of them, and what a group or a work says only in private.

torch finds a group that its C++ or a graph names in tables that ``init_process_group`` and
``new_group`` fill. There is no public way to enter a group that was made otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch._C import _distributed_c10d as _c
from torch.distributed import ProcessGroup, Store, Work
from torch.distributed import distributed_c10d as _python

from . import patches

# -- groups that are known by name ------------------------------------------------------------

default_group = _python._get_default_group
"""torch's default group, or an error that tells the user to make one. In public,
``torch.distributed.group.WORLD`` is None in that case."""

has_left = _python._rank_not_in_group
"""Whether this rank is no member of what ``new_group`` returned. Nothing public tells a group from
its stand-in for those who are left out."""

current_group = _c._current_process_group
"""The group of this thread, as torch 2.11 to 2.13 have it in ``torch.distributed._dist2``, which
2.14 took away; the C++ below it stayed."""

set_current_group = _c._set_process_group
"""Make a group that of this thread. See :data:`current_group`."""

named_group = _c._resolve_process_group
"""The group that is registered under a name; functional collectives in graphs carry names only."""


def has_default() -> bool:
    """Whether there is a default group."""
    return _python._world.default_pg is not None


def is_entered(group: ProcessGroup) -> bool:
    """Whether torch's tables know ``group``."""
    return group in _python._world.pg_map


def is_taken(name: str) -> bool:
    """Whether a group is registered under ``name``."""
    return name in _python._world.pg_names.values()


def enter(
    group: ProcessGroup,
    name: str,
    *,
    backend: str,
    store: Store | None,
    members: Sequence[int],
    devices: Sequence[str],
    default: bool,
) -> None:
    """Put ``group`` into torch's tables; ``members`` are its ranks as the whole job counts them."""
    world = _python._world
    group._set_group_name(name)
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {member: rank for rank, member in enumerate(members)}
    world.pg_backend_config[group] = ",".join(f"{device}:{backend}" for device in devices)
    world.tags_to_pg.setdefault("", []).append(group)
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    world.pg_to_tag[group] = f"ptd:{name}"
    _c._register_process_group(name, group)
    if default:
        _python._update_default_pg(group)


def leave(group: ProcessGroup) -> None:
    """Take ``group`` out of torch's tables; nothing happens when it is not in them."""
    world = _python._world
    name = world.pg_names.pop(group, None)
    if name is None:
        return
    if world.default_pg is group:
        _python._update_default_pg(None)
    world.pg_map.pop(group, None)
    world.pg_group_ranks.pop(group, None)
    world.pg_backend_config.pop(group, None)
    tag = world.pg_to_tag.pop(group, "")
    for key in ("", tag):
        if group in world.tags_to_pg.get(key, []):
            world.tags_to_pg[key].remove(group)
    _c._unregister_process_group(name)


def leave_recording_to(backend: str) -> None:
    """Keep torch's flight recorder off groups of ``backend``, an entry under a name of ours.

    2.15 attaches it to every group, and cannot where C++ finds no engine of torch's in the group.
    """
    getattr(_python, "_FR_SELF_RECORDING_BACKENDS", set()).add(backend)


class _TableEntry:
    """What torch ends before the groups; its table of such is meant for engines of another kind."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.finalize = call


def before_all_end(call: Callable[[], None]) -> None:
    """Call ``call`` once, when ``destroy_process_group()`` begins to end all groups."""
    _python._world.comms.append(_TableEntry(call))


def members_of(group: ProcessGroup) -> list[int] | None:
    """Ranks of ``group`` as the whole job counts them, None when torch does not know it.

    ``get_process_group_ranks`` raises for such a group, with an error that differs by version.
    """
    ranks = _python._world.pg_group_ranks.get(group)
    return None if ranks is None else list(ranks)


# -- functions of torch.distributed that ask for an engine by its name --------------------------


def send_barriers_to(kind: type[ProcessGroup]) -> None:
    """Let ``torch.distributed.monitored_barrier`` take groups of ``kind``, until it is taken back.

    torch's function refuses all that is not its own gloo, whatever the group could do.
    """
    torchs = _python.monitored_barrier

    @functools.wraps(torchs)
    def monitored_barrier(
        group: ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        found = group if group is not None else torch.distributed.group.WORLD
        if isinstance(found, kind):
            found.monitored_barrier(timeout, wait_all_ranks)
        else:
            torchs(group, timeout, wait_all_ranks)

    for module in list(sys.modules.values()):  # whoever has imported the name has it replaced
        if getattr(module, "__dict__", {}).get("monitored_barrier") is torchs:
            patches.put(module, "monitored_barrier", monitored_barrier)


# -- the engines in a group -------------------------------------------------------------------

devices_of = attrgetter("_device_types")
"""The devices that a group has an engine for. Public code can only try a collective."""


def engine_of(group: ProcessGroup, device: torch.device) -> Any:
    """The engine that ``group`` has for ``device``; raises when there is none."""
    return group._get_backend(device)


def timeout_of(options: Any, otherwise: timedelta | None = None) -> Any:
    """How long an engine with these options waits. Their ``timeout`` is private in Python."""
    if otherwise is None:
        return options._timeout
    return getattr(options, "_timeout", otherwise)


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Let an engine that is opened with these options wait for ``timeout``."""
    options._timeout = timeout


def number_calls(engine: Any) -> None:
    """Let an engine that nobody's ``new_group`` opened number its collectives, as torch's does.

    2.15 numbers them from 0 without being told, and warns whoever tells it.
    """
    if "_set_sequence_number_for_group" in _python._new_process_group_helper.__code__.co_names:
        engine._set_sequence_number_for_group()


def lend(group: ProcessGroup, device: torch.device, kind: Any, engine: Any) -> None:
    """Make ``engine``, a ``ProcessGroup.BackendType`` of ``kind``, that of ``group`` on a device.

    As ``ProcessGroup``'s own method: a group of ours has the same names and other arguments.
    """
    ProcessGroup._register_backend(group, device, kind, engine)


def set_default_kind(group: ProcessGroup, kind: Any) -> None:
    """Say which kind of engine answers for ``group`` where no device is given."""
    ProcessGroup._set_default_backend(group, kind)


# -- calls that torch.distributed makes in private ----------------------------------------------


def all_gather_flat(group: ProcessGroup, output: Any, given: Any, options: Any) -> Work:
    """What ``dist.all_gather_into_tensor`` calls, without its search for the group's name."""
    return group._allgather_base(output, given, options)


def reduce_scatter_flat(group: ProcessGroup, output: Any, given: Any, options: Any) -> Work:
    """What ``dist.reduce_scatter_tensor`` calls, without its search for the group's name."""
    return group._reduce_scatter_base(output, given, options)


source_rank = methodcaller("_source_rank")
"""Who sent what a work received. ``dist.recv`` returns it, and takes no timeout."""

FutureBase = torch._C.Future
"""The class of every future. ``torch.futures.Future`` is a subclass, and the futures that C++ makes
(those of a work, for example) are no instances of it."""


def is_served(group: ProcessGroup, device: torch.device) -> bool:
    """Whether an engine of torch's does what ``group`` does not override."""
    with contextlib.suppress(Exception):  # a group that was written in Python may raise anything
        return engine_of(group, device) is not None
    return False
