# mypy: disable-error-code="attr-defined, no-any-return"
# (torch gives these names other signatures in every version)
"""NCCL's engines: which of them a name means is torch's choice, made by version and environment.

To 2.13 there is one. Since 2.14 there is a second, ``nccl2``, that torch has built anew. ``nccl``
means that one in 2.14 with ``TORCH_DIST_USE_NCCL2=1`` and in 2.15 unless that is 0; ``nccl-legacy``
is always the old one. torch keeps a function for each name, which its ``init_process_group`` calls;
nothing public does.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Backend, ProcessGroup, Store
from torch.distributed import distributed_c10d as _python

from .c10d import timeout_of

NAMES = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")
"""What torch calls them, and what they say they are."""


def is_known(name: str) -> bool:
    """Whether this torch has an engine of that name; nothing is entered in its tables yet."""
    offered = {entry.name for entry in entry_points(group="torch.distributed.backends")}
    return name == "nccl" or name in offered


def open_engine(
    name: str,
    group: ProcessGroup,
    device: torch.device,
    store: Store,
    rank: int,
    size: int,
    options: Any,
) -> Any:
    """The engine that torch takes for ``name``, which ``group`` will use on ``device``."""
    opener = _opener(name)
    if opener is None:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    group.bound_device_id = device  # where nccl2 looks for the one that it is connected on
    asked = _python._DistributedBackendOptions()
    asked.store, asked.group_rank, asked.group_size = store, rank, size
    asked.timeout, asked.group_id = timeout_of(options), options.group_name
    asked.global_ranks_in_group = []
    if hasattr(asked, "process_group"):
        asked.process_group = group
    return opener(asked, options)


def _opener(name: str) -> Callable[[Any, Any], Any] | None:
    """torch's own function for ``name``; None where it has none, as to 2.13 for ``nccl``."""
    if hasattr(Backend, "_ensure_backend_registered"):
        Backend._ensure_backend_registered(name)
    plugin = Backend._plugins.get(name.upper())
    return plugin.creator_fn if plugin is not None and plugin.extended_api else None
