"""Accelerate in a loop that goes on when ranks are lost (``paceline run --elastic``). ::

    accelerator = elastic_accelerator(mixed_precision="bf16")
    group = paceline.elastic.group(device=accelerator.device)
    model, optimizer = accelerator.prepare(model, optimizer)
    ddp = paceline.DistributedDataParallel(model, process_group=group, shards=8)
    loader = ShardedLoader(dataset, shards=8, batch=64, group=group)
    with paceline.elastic.job(ddp, optimizer.optimizer, loader) as job:
        ...

An Accelerator finds the other processes once, when it is made, and asks torch's default group for
them ever after. In an elastic job they change. So its Accelerator has one process, with its device,
precision and scaler; the group of the job has the others.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from ..errors import IntegrationMissingError

__all__ = ["elastic_accelerator"]

_PLACES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # where it looks for others


def elastic_accelerator(**options: Any) -> Any:
    """An Accelerator of this process alone, on its own device; options are the Accelerator's."""
    try:
        accelerate: Any = importlib.import_module("accelerate")
    except ModuleNotFoundError as error:
        raise IntegrationMissingError(__name__, "accelerate", "integrations") from error
    kept = {name: os.environ.pop(name) for name in _PLACES if name in os.environ}
    try:
        _take_own_device(int(kept.get("LOCAL_RANK", "0")))
        return accelerate.Accelerator(**options)
    finally:
        os.environ.update(kept)


def _take_own_device(place: int) -> None:
    """Make the GPU of this place on the host the current one, which Accelerate takes then."""
    if torch.cuda.is_available():
        torch.cuda.set_device(place % torch.cuda.device_count())
