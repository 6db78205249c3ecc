"""``init_process_group("gloo")`` on the quickest engine here, for scripts left as they are.

``paceline.install(engine=True)`` puts :func:`quickest` around torch's own function.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist

_CPU = ("gloo", "cpu:gloo")  # what scripts say when they mean CPU tensors
_AGENTS = "TORCHELASTIC_USE_AGENT_STORE"
_LAUNCHERS = "PACELINE_MASTER"  # where the launcher's store is, as host:port


def quickest(original: Callable[..., None], is_on: Callable[[], bool]) -> Callable[..., None]:
    """``init_process_group`` that opens ``paceline`` where gloo is asked for, while ``is_on()``."""

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if not is_on():
            return original(backend, *args, **kwargs)
        wanted = os.environ.get("PACELINE_BACKEND", "auto")
        opened = instead_of(backend, wanted, torch.accelerator.is_available())
        method = kwargs.get("init_method", args[0] if args else None)
        with _store_of_its_own(method):
            original(opened, *args, **kwargs)
        if dist.get_rank() == 0:
            _tell(backend, opened, wanted)
        return None

    return init_process_group


def instead_of(backend: str | None, wanted: str, accelerated: bool) -> str | None:
    """What to open for a script that asks for ``backend``.

    Gloo becomes paceline. Where there is an accelerator gloo may be meant for its tensors, and
    None for NCCL: then both stay, unless ``--backend`` says what is wanted.

    >>> instead_of("gloo", "auto", False), instead_of(None, "auto", False)
    ('paceline', 'paceline')
    >>> (
    ...     instead_of("gloo", "auto", True),
    ...     instead_of("gloo", "shm", True),
    ...     instead_of("nccl", "shm", True),
    ... )
    ('gloo', 'paceline', 'nccl')
    """
    if accelerated and wanted == "auto":
        return backend
    if backend is None:
        return backend if accelerated else "paceline"
    return "paceline" if str(backend).lower() in _CPU else backend


@contextmanager
def _store_of_its_own(method: str | None) -> Iterator[None]:
    """Let rank 0 open the store where the ranks do not meet in the launcher's.

    A script that starts its ranks itself often chooses a port for them. Under an elastic agent
    torch takes it for that of the agent's store, which is elsewhere, and all ranks wait in vain.
    """
    before = os.environ.get(_AGENTS)
    launchers = os.environ.get(_LAUNCHERS, "")
    if before is None or not launchers or _meeting_place(method) in ("", launchers):
        yield
        return
    os.environ[_AGENTS] = "False"
    try:
        yield
    finally:
        os.environ[_AGENTS] = before


def _meeting_place(method: str | None) -> str:
    """Where ranks meet by ``init_method``, as host:port; empty where that is no host."""
    if method is None or method.startswith("env://"):
        return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    parts = urlparse(method)
    return f"{parts.hostname}:{parts.port}" if parts.scheme == "tcp" else ""


def _tell(asked: str | None, opened: str | None, wanted: str) -> None:
    """Say in one line which engine the script has got."""
    said = f"init_process_group({'' if asked is None else repr(str(asked))})".replace("'", '"')
    if opened == "paceline" and asked != "paceline":
        engine = getattr(dist.group.WORLD, "backend", opened)
        hint = "--keep-backend leaves it to torch" if wanted == "auto" else f"--backend {wanted}"
        line = f"{said} opened paceline's engine {engine} ({hint})"
    elif wanted != "auto" and asked != "paceline":
        line = (
            f"{said} is not changed by --backend {wanted}, which applies to gloo and paceline only"
        )
    elif opened is not None and str(opened).lower() in _CPU:
        line = f"{said} stays torch's, as there is an accelerator; --backend shm shares memory"
    else:
        return
    print(f"paceline: {line}", file=sys.stderr, flush=True)
