"""What ``import torch`` runs where paceline is installed, by torch's entry points for backends.

It makes the backend ``paceline`` known to ``torch.distributed``, so that a script need not import
paceline to ask for it. It lies beside the package and not in it: every process that imports torch
runs it, and to import anything from the package is to import all of it. That happens here only
where ``PACELINE_DROP_IN`` is set: in processes that a rank of ``paceline run --drop-in`` starts, as
``torch.multiprocessing.spawn`` does, or under another launcher. A rank of ``paceline run`` on one
machine also learns here where its store is (``_paceline_store.py``).
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

_AGENTS = "TORCHELASTIC_USE_AGENT_STORE"


def load() -> None:
    """Register the backend; whatever goes wrong, ``import torch`` goes on."""
    try:
        if place := os.environ.get("PACELINE_STORE", ""):
            _meet_in(place, os.environ.get("PACELINE_MASTER", ""))
        if "paceline" in sys.modules:  # which is importing torch, and registers the backend itself
            return
        _register()
        if mode := os.environ.get("PACELINE_DROP_IN", ""):
            import paceline

            paceline.install(names=mode != "engine", engine=mode != "names")
    except Exception as error:
        kind = type(error).__name__
        warnings.warn(
            f"paceline could not prepare torch in process {os.getpid()} ({kind}: {error}); this "
            "process goes on without it, and if others of the run did not, they may wait for it. "
            "Without the variable PACELINE_DROP_IN it is not tried.",
            stacklevel=2,
        )


def _meet_in(place: str, address: str) -> None:
    """Let a rank of ``paceline run`` on one machine find its store, which has no port.

    ``env://`` and ``tcp://`` find it at ``address``. At any other address, such as the one that a
    script chooses for ranks it starts itself, rank 0 opens a store, as without a launcher.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    torchs = rendezvous._create_c10d_store

    def create(
        hostname: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: timedelta,
        *more: Any,
        **too: Any,
    ) -> Any:
        if f"{hostname}:{port}" != address:
            with _no_agent():
                return torchs(hostname, port, rank, world_size, timeout, *more, **too)
        from _paceline_store import store_at

        return store_at(place, timeout)

    rendezvous._create_c10d_store = create


@contextmanager
def _no_agent() -> Iterator[None]:
    """Let torch's rank 0 open a store; else torch takes every port for that of the launcher's."""
    before = os.environ.get(_AGENTS)
    os.environ[_AGENTS] = "False"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_AGENTS]
        else:
            os.environ[_AGENTS] = before


def _register() -> None:
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "PACELINE"):
        dist.Backend.register_backend("paceline", _open, devices=["cpu", "cuda"])


def _open(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """What ``init_process_group("paceline")`` calls; only now is paceline imported."""
    from paceline.groups.factory import open_for_torch

    return open_for_torch(store, rank, size, timeout)
