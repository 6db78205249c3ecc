"""new_group, and the current group of a thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.rendezvous import rendezvous

from .._torch.c10d import current_group, default_group, leave_recording_to, set_current_group
from ..errors import RendezvousError, UnsupportedError
from .backends import EngineBackend, factory_of
from .engines import offers as offers  # registers what we have
from .group import Group
from .meetings import Meetings
from .strict import Checks, check_setting
from .torch_calls import refuse_nan

DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own default


def new_group(
    backend: str = "auto",
    timeout: timedelta = DEFAULT_TIMEOUT,
    device: str | torch.device = "cpu",
    *,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    ranks: Sequence[int] | None = None,
    init_method: str = "env://",
    checks: Checks = "warn",
    **options: object,
) -> Group:
    """Open a group of all launched ranks, or of ``ranks`` among them.

    The call blocks until all of these ranks have made it, for at most ``timeout``; the group's
    collectives have the same timeout. Ranks find each other through ``store``, which also needs
    ``rank`` and ``world_size``, or through ``init_method``. ``env://`` reads RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT, as torchrun sets them. ``tcp://host:port`` and ``file:///path``
    need ``rank`` and ``world_size``. ``checks`` must be the same on all ranks; see
    :meth:`Group.set_checks`. ``options`` are passed to the backend, which raises an error for an
    option that it does not know.

    Returns a :class:`Group`. A backend of another package may return a ProcessGroup of its own;
    :meth:`Group.wrap` turns that into a Group.
    """
    factory = factory_of(backend)
    if not isinstance(timeout, timedelta):
        kind = type(timeout).__name__
        raise TypeError(f"new_group: timeout: expected a datetime.timedelta, got {kind}")
    device = torch.device(device)
    if store is None:
        store, rank, world_size = _meet(init_method, rank, world_size, timeout)
    elif rank is None or world_size is None:
        raise RendezvousError(
            "new_group was given a store alone", "Give rank= and world_size= too."
        )
    members = _checked_members(rank, world_size, ranks)
    store.set_timeout(timeout)

    def open_in(corner: Store) -> ProcessGroup:
        check_setting(checks, corner, members.index(rank), len(members))
        return factory(corner, members.index(rank), len(members), timeout, device, **options)

    key = "all" if ranks is None else ",".join(map(str, members))
    corner = PrefixStore("paceline", store)
    if isinstance(factory, EngineBackend) and factory.peers:
        factory.refuse(members.index(rank), len(members), options)
        group = _meet_and_open(open_in, corner, key, rank, members, timeout)
    else:  # it need not have any: a turn for each call, so that a store serves any number of groups
        turn = corner.add(f"{key}/turn/{rank}", 1)
        group = open_in(PrefixStore(f"{key}/{turn}", corner))
    if isinstance(group, Group):
        group.set_checks(checks)
    elif checks == "strict":
        remedy = "Wrap the group with Group.wrap, and call its set_checks."
        raise UnsupportedError(backend, 'checks="strict"', remedy, rank)
    if ranks is not None and isinstance(group, Group):
        group.number_members(members)
    return group  # type: ignore[return-value]


def _checked_members(rank: int, world_size: int, ranks: Sequence[int] | None) -> list[int]:
    """The ranks of the group, of which this one is one."""
    if not 0 <= rank < world_size:
        raise RendezvousError(
            f"rank {rank} is not below the world size {world_size}", "Ranks are numbered from 0."
        )
    members = list(ranks) if ranks is not None else list(range(world_size))
    if rank not in members or len(set(members)) != len(members):
        raise RendezvousError(
            f"rank {rank} is not among the different ranks {members}",
            "Call it on the members alone, or make the group with Group.split.",
            rank,
        )
    return members


def _meet_and_open(
    open_in: Callable[[Store], ProcessGroup],
    store: Store,
    key: str,
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
) -> ProcessGroup:
    """Open a group once all members are there, however often each of them has tried before."""
    names = [str(member) for member in members]
    meetings = Meetings(store, key, len(members), timeout, rank=rank, name=str(rank), names=names)
    return meetings.open(meetings.arrive(), open_in, see_off=True)[1]


def _meet(
    init_method: str, rank: int | None, world_size: int | None, timeout: timedelta
) -> tuple[Store, int, int]:
    if init_method == "env://":
        names = ["MASTER_ADDR", "MASTER_PORT"]
        names += ["RANK"] * (rank is None) + ["WORLD_SIZE"] * (world_size is None)
        if missing := [name for name in names if name not in os.environ]:
            raise RendezvousError(
                f"new_group needs {', '.join(missing)} in the environment to find the other ranks",
                "Start the script with `paceline run` or torchrun, set them, or give new_group "
                "store=, rank= and world_size=.",
            )
    given = {} if rank is None else {"rank": rank}
    if world_size is not None:
        given["world_size"] = world_size
    return next(iter(rendezvous(init_method, **given, timeout=timeout)))  # type: ignore[no-any-return]


# -- the current group ------------------------------------------------------------------------


def current_process_group() -> ProcessGroup:
    """Return the group that :func:`process_group` set for this thread, as torch's function does."""
    return current_group()


def group_or_default(process_group: ProcessGroup | None) -> ProcessGroup:
    """Return ``group`` if given, else the current thread's group, else torch's default group."""
    return process_group or current_process_group() or default_group()


def group_to_call(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    """Return ``group`` if it has all methods of torch's groups, else a :class:`Group` around it.

    A process group written in Python often lacks some methods, and its works may have no future.
    """
    return group if type(group) is ProcessGroup else Group.wrap(group, device)


@contextmanager
def process_group(pg: ProcessGroup) -> Generator[None, None, None]:
    """Make ``pg`` the current thread's group inside the ``with`` block. Blocks can be nested."""
    before = current_process_group()
    set_current_group(pg)
    try:
        yield
    finally:
        set_current_group(before)


def open_for_torch(store: Store, rank: int, size: int, timeout: timedelta) -> Group:
    """What ``torch.distributed.init_process_group("paceline")`` calls."""
    leave_recording_to("paceline")
    factory, members = factory_of("paceline"), range(size)

    def open_in(corner: Store) -> ProcessGroup:
        return factory(corner, rank, size, timeout, torch.device("cpu"))

    # A store serves every group that a process makes in turn: what one left must not be read again.
    group = _meet_and_open(open_in, PrefixStore("turns", store), "all", rank, members, timeout)
    assert isinstance(group, Group)
    if os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1":  # as torch reads it, since 2.14
        refuse_nan(group)
    return group
