"""The backends that paceline brings along, each registered as anybody else's would be."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import PrefixStore, Store

from ..._transport import MAX_RANKS, Clock, unavailable
from ...errors import EngineUnavailableError, RankUnableError, UnexpectedOptionError
from ..backends import Availability, EngineBackend, Opener, register_backend
from ..engine import Engine
from . import nccl
from .by_device import DeviceEngine
from .choice import choose_backend, fall_back, require_descriptors
from .fake import FakeEngine
from .gloo.engine import GlooEngine, open_gloo
from .gloo.links import Links
from .hybrid.engine import HybridEngine
from .nccl import NcclEngine, open_nccl
from .shm import ShmEngine
from .threads.engine import ThreadsEngine


def _only_cpu(backend: str, device: torch.device) -> None:
    if device.type != "cpu":
        raise EngineUnavailableError(backend, f"it moves CPU tensors, and the device is {device}")


def _open_gloo(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device, **options: object
) -> Engine:
    if not options:  # which are refused
        require_descriptors(PrefixStore("descriptors", store), rank, size, timeout)
    with Links.watch(PrefixStore("links", store), rank, size, Clock(timeout)) as links:
        inner = open_gloo(store, rank, size, timeout, device, **options)
    return GlooEngine(inner, device, *links)


def _open_nccl(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    device: torch.device,
    *,
    torchs_name: str = "nccl",
    **options: object,
) -> Engine:
    if reason := nccl.missing(torchs_name):
        raise EngineUnavailableError(torchs_name, reason, rank)
    inner = open_nccl(torchs_name, store, rank, size, timeout, device, **options)
    return NcclEngine(inner, device)


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


def _open_fake(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device
) -> Engine:
    return FakeEngine(rank, size)


def _open_threads(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device
) -> Engine:
    return ThreadsEngine.open(store, rank, size, timeout)


_CHOSEN: dict[str, Opener] = {
    "nccl": _open_nccl,
    "gloo": _open_gloo,
    "shm": _open_shm,
    "hybrid": _open_hybrid,
}


def _open_auto(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device, **options: object
) -> Engine:
    chosen = choose_backend(store, rank, size, timeout, device)
    opener = _CHOSEN[chosen]
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


def _open_paceline(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device
) -> Engine:
    """Every device of this machine, the CPU's engine chosen as by ``auto``."""
    cpu = _open_auto(PrefixStore("cpu", store), rank, size, timeout, torch.device("cpu"))
    if nccl.missing():
        return cpu

    def open_cuda(device: torch.device) -> Engine:
        return _open_nccl(PrefixStore("cuda", store), rank, size, timeout, device)

    return DeviceEngine(cpu, {"cuda": open_cuda})


def _shares_memory() -> Availability:
    reason = unavailable()
    return Availability(not reason, reason)


def _nccl(name: str) -> EngineBackend:
    """NCCL by one of the names that torch has for its engines."""

    def available() -> Availability:
        return Availability(not nccl.missing(name), nccl.missing(name))

    opener = partial(_open_nccl, torchs_name=name)
    return EngineBackend(opener, options=None, availability=available, same_options=False)


def _always_has_one() -> Availability:
    reason = unavailable()
    return Availability(True, reason and f"picks gloo on CPU, since shm cannot be used: {reason}")


_OURS = {
    "gloo": EngineBackend(_open_gloo, options=None),
    "nccl": _nccl("nccl"),
    "nccl2": _nccl("nccl2"),
    "nccl-legacy": _nccl("nccl-legacy"),
    "shm": EngineBackend(
        _open_shm, options=("window",), max_ranks=MAX_RANKS, availability=_shares_memory
    ),
    "hybrid": EngineBackend(
        _open_hybrid, options=("between", "striped"), availability=_shares_memory
    ),
    "fake": EngineBackend(_open_fake, peers=False),
    "threads": EngineBackend(_open_threads),
    "auto": EngineBackend(_open_auto, options=None, availability=_always_has_one),
    "paceline": EngineBackend(_open_paceline),
}
for _name, _backend in _OURS.items():
    register_backend(_name, _backend)
