"""Which engine ``auto`` takes."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store

from ..._transport import (
    MAX_RANKS,
    Clock,
    Neighbours,
    descriptors_left,
    on_all,
    prove_hosts,
    shortage,
)
from ...errors import RankUnableError, UnknownBackendError

log = logging.getLogger(__name__)


def choose_backend(
    store: Store, rank: int, size: int, timeout: timedelta, device: torch.device
) -> str:
    """What ``auto`` takes for these ranks; all of them call it and get the same answer.

    ``PACELINE_BACKEND``, which ``paceline run --backend`` sets, settles it for all ranks.
    """
    asked = os.environ.get("PACELINE_BACKEND", "auto")
    if asked not in (known := ["auto", "gloo", "hybrid", "nccl", "shm"]):
        raise UnknownBackendError(asked, known, variable="PACELINE_BACKEND")
    if device.type == "cuda":
        return "gloo" if asked == "gloo" else "nccl"
    if asked in ("gloo", "hybrid", "shm"):
        return asked
    corner = PrefixStore("hosts", store)
    try:
        hosts = prove_hosts(corner, rank, size, timeout, shortage(min(size, MAX_RANKS)))
    except RankUnableError as error:
        hosts = Neighbours(unable={error.culprit: error.reason})
    if hosts.unable:
        culprit, reason = next(iter(hosts.unable.items()))
        fall_back(store, rank, size, timeout, RankUnableError("shm", reason, culprit=culprit))
        return "gloo"
    if max(map(len, hosts.components)) > MAX_RANKS or len(hosts.components) == size > 1:
        return "gloo"
    return "shm" if len(hosts.components) == 1 else "hybrid"


def fall_back(
    store: Store, rank: int, size: int, timeout: timedelta, error: RankUnableError
) -> None:
    """Say why it will be gloo; an error on every rank if one is not able to do that either."""
    require_descriptors(PrefixStore("fall back", store), rank, size, timeout)
    log.warning(
        "rank %d: auto takes gloo, which is slower, since rank %d cannot share memory: %s",
        rank,
        error.culprit,
        error.reason,
    )


def require_descriptors(store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """An error on every rank if one has too few descriptors for gloo.

    There the others would wait for it until the timeout, and hear nothing of the reason.
    """
    needed = size + 8  # connections to all others, and what gloo has for itself

    def check() -> None:
        if (left := descriptors_left()) < needed:
            reason = f"it has {left} file descriptors left (ulimit -n) and gloo needs {needed}"
            raise RankUnableError("gloo", reason, rank, culprit=rank)

    on_all(store, rank, size, Clock(timeout), check, "gloo")
