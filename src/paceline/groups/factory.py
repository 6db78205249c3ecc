"""new_group, the table of backends, and the current group of a thread."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.rendezvous import rendezvous

from .._torch.c10d import current_group, default_group, set_current_group
from .._transport import MAX_RANKS, agree_on, unavailable
from ..errors import (
    BackendTakenError,
    EngineUnavailableError,
    RankUnableError,
    RendezvousError,
    UnexpectedOptionError,
    UnknownBackendError,
    UnsupportedError,
)
from .choice import choose_backend, facts_of, fall_back
from .engine import Engine
from .engines.by_device import DeviceEngine
from .engines.fake import FakeEngine
from .engines.hybrid.engine import HybridEngine
from .engines.shm import ShmEngine
from .engines.threads.engine import ThreadsEngine
from .engines.torch_engine import TorchEngine, open_gloo, open_nccl
from .group import Group
from .options import GroupOptions
from .strict import Checks, check_setting

DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own default
ENTRY_POINTS = "paceline.backends"


class ProcessGroupFactory(Protocol):
    """Opens this rank's end of a group; every rank calls it, each with its own rank.

    ``kwargs`` are the options given to :func:`new_group`; a factory refuses those it does not know.
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
    """Offer ``func`` to :func:`new_group` under ``name``."""
    if name in _backends:
        raise BackendTakenError(name)
    _backends[name] = func


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

    Blocks until every one of them has called it, at most ``timeout``, which is also how long its
    collectives may take. The ranks meet through ``store`` (then ``rank`` and ``world_size`` are
    needed too) or through ``init_method``: ``env://`` reads RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT as torchrun sets them; ``tcp://host:port`` and ``file:///path`` take ``rank`` and
    ``world_size``. ``checks``, the same on all ranks, is explained at :meth:`Group.set_checks`.
    ``options`` go to the backend, which refuses those it does not know.

    The result is a :class:`Group`; a third party's backend may return another ProcessGroup, which
    :meth:`Group.wrap` turns into one.
    """
    factory = _factory(backend)
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
    store.set_timeout(timeout)
    key = f"paceline/{'all' if ranks is None else ','.join(map(str, members))}"
    turn = store.add(f"{key}/turn/{rank}", 1)  # so that a store serves any number of groups
    corner = PrefixStore(f"{key}/{turn}", store)
    check_setting(checks, corner, members.index(rank), len(members))
    group = factory(corner, members.index(rank), len(members), timeout, device, **options)
    if isinstance(group, Group):
        group.set_checks(checks)
    elif checks == "strict":
        remedy = "Wrap the group with Group.wrap, and call its set_checks."
        raise UnsupportedError(backend, 'checks="strict"', remedy, rank)
    if ranks is not None and isinstance(group, Group):
        group.number_members(members)
    return group  # type: ignore[return-value]


def _factory(backend: str) -> ProcessGroupFactory:
    if backend not in _backends:
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=backend):
            register_backend(backend, entry.load())
            break
        else:
            offered = {e.name for e in importlib.metadata.entry_points(group=ENTRY_POINTS)}
            raise UnknownBackendError(backend, known=sorted({*_backends, *offered}))
    return _backends[backend]


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


# -- our backends -----------------------------------------------------------------------------

Opener = Callable[..., Engine]  # (store, rank, size, timeout, device, **options)

# by backend; with the options it knows, and the most ranks it takes
_openers: dict[str, tuple[Opener, Sequence[str] | None, int | None]] = {}


def open_engine(store: Store, rank: int, size: int, options: GroupOptions) -> Engine:
    """The engine that ``options`` ask for; every rank calls it. Only backends of ours have one."""
    if options.backend not in _openers:
        raise UnknownBackendError(options.backend, known=sorted(_openers))
    opener, known, most = _openers[options.backend]
    given = options.backend_options
    if known is not None and (unknown := sorted(set(given) - set(known))):
        raise UnexpectedOptionError(options.backend, unknown, known)
    if most is not None and size > most:
        raise EngineUnavailableError(options.backend, f"{size} ranks, and it takes {most}", rank)
    if options.backend != "fake":  # it has no peers
        own = {} if options.backend == "nccl" else dict(given)
        agree_on(store, rank, size, options.timeout, facts_of(options.backend, options.device, own))
    return opener(store, rank, size, options.timeout, options.device, **given)


def _offer(
    name: str, known: Sequence[str] | None = (), most: int | None = None
) -> Callable[[Opener], Opener]:
    """Register an engine's opener as a backend that makes Groups of it and reads ``known``.

    More than ``most`` ranks are refused before any of them waits for the others.
    """

    def decorate(opener: Opener) -> Opener:
        def factory(
            store: Store,
            rank: int,
            world_size: int,
            timeout: timedelta,
            device: torch.device,
            **kwargs: object,
        ) -> Group:
            options = GroupOptions(name, timeout, device, kwargs)
            engine = open_engine(store, rank, world_size, options)
            return Group(engine, rank, world_size, options=options, store=store, reopen=open_engine)

        _openers[name] = opener, known, most
        register_backend(name, factory)
        return opener

    return decorate


def _only_cpu(backend: str, device: torch.device) -> None:
    if device.type != "cpu":
        raise EngineUnavailableError(backend, f"it moves CPU tensors, and the device is {device}")


@_offer("gloo", known=None)
def _open_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device, **options: object
) -> Engine:
    return TorchEngine(open_gloo(store, rank, size, timeout, device, **options), "gloo", device)


@_offer("nccl", known=None)
def _open_nccl(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device, **options: object
) -> Engine:
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise EngineUnavailableError("nccl", _nccl_reason(), rank)
    return TorchEngine(open_nccl(store, rank, size, timeout, device, **options), "nccl", device)


@_offer("shm", known=("window",), most=MAX_RANKS)
def _open_shm(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    device: torch.device,
    window: int = 0,
) -> Engine:
    _only_cpu("shm", device)
    return ShmEngine.open(store, rank, size, timeout, window=window)


@_offer("hybrid", known=("between", "striped"))
def _open_hybrid(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    device: torch.device,
    between: str = "gloo",
    striped: bool | None = None,
) -> Engine:
    return HybridEngine.open(store, rank, size, timeout, device, between=between, striped=striped)


@_offer("fake")
def _open_fake(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device
) -> Engine:
    return FakeEngine(rank, size)


@_offer("threads")
def _open_threads(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device
) -> Engine:
    return ThreadsEngine.open(store, rank, size, timeout)


@_offer("auto", known=None)
def _open_auto(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device, **options: object
) -> Engine:
    chosen = choose_backend(store, rank, size, timeout, device)
    opener: Opener = {
        "nccl": _open_nccl,
        "gloo": _open_gloo,
        "shm": _open_shm,
        "hybrid": _open_hybrid,
    }[chosen]
    try:
        return opener(PrefixStore(chosen, store), rank, size, timeout, device, **options)
    except RankUnableError as error:  # the same on all ranks
        if os.environ.get("PACELINE_BACKEND", "auto") != "auto" or chosen == "gloo":
            raise
        fall_back(store, rank, size, timeout, error)
        return _open_gloo(PrefixStore("gloo", store), rank, size, timeout, device)
    except TypeError as error:
        if isinstance(error, UnexpectedOptionError) or not options:
            raise
        raise UnexpectedOptionError(chosen, sorted(options)) from error


@_offer("paceline")
def _open_paceline(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device
) -> Engine:
    """Every device of this machine, the CPU's engine chosen as by ``auto``."""
    cpu = _open_auto(PrefixStore("cpu", store), rank, size, timeout, torch.device("cpu"))
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return cpu

    def open_cuda(device: torch.device) -> Engine:
        return _open_nccl(PrefixStore("cuda", store), rank, size, timeout, device)

    return DeviceEngine(cpu, {"cuda": open_cuda})


def open_for_torch(store: Store, rank: int, size: int, timeout: timedelta) -> Group:
    """What ``torch.distributed.init_process_group("paceline")`` calls."""
    group = _backends["paceline"](store, rank, size, timeout, torch.device("cpu"))
    assert isinstance(group, Group)
    return group


# -- what is here -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Availability:
    """Whether a backend can be used on this machine, and why not."""

    available: bool
    reason: str = ""


def capabilities() -> dict[str, Availability]:
    """Every backend by name: whether it can be used on this machine and, if not, why."""
    found = {name: Availability(True) for name in sorted(_backends)}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        found.setdefault(entry.name, Availability(True, f"offered by {entry.value}"))
    if reason := unavailable():
        found["shm"] = Availability(False, reason)
        found["hybrid"] = Availability(False, reason)
        found["auto"] = Availability(True, f"picks gloo on CPU, since shm cannot be used: {reason}")
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        found["nccl"] = Availability(False, _nccl_reason())
    return found


@functools.cache
def _nccl_reason() -> str:
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL"
    return "" if torch.cuda.is_available() else "torch sees no GPU"


# -- the current group ------------------------------------------------------------------------


def current_process_group() -> ProcessGroup:
    """The current thread's group, as :func:`process_group` set it; torch's own call agrees."""
    return current_group()


def group_or_default(process_group: ProcessGroup | None) -> ProcessGroup:
    """The given group, else the current thread's, else torch's default."""
    return process_group or current_process_group() or default_group()


def group_to_call(group: ProcessGroup, device: torch.device) -> ProcessGroup:
    """``group`` where every method of torch's can be called on it; else our interface around it.

    A group that somebody wrote in Python has few of them, and its works may lack a future.
    """
    return group if type(group) is ProcessGroup else Group.wrap(group, device)


@contextmanager
def process_group(pg: ProcessGroup) -> Generator[None, None, None]:
    """Make ``pg`` the current thread's group inside the ``with``; nests."""
    before = current_process_group()
    set_current_group(pg)
    try:
        yield
    finally:
        set_current_group(before)
