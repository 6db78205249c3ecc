"""job(): what a program calls."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

from torch.optim import Optimizer

from .._members import Members, connect
from ..data import ShardedLoader
from ..ddp import DistributedDataParallel
from ..errors import JobArgumentError
from .forked import heed_threads
from .loop import Job
from .saves import Saves


def job(
    ddp: DistributedDataParallel,
    optimizer: Optimizer | Iterable[Optimizer],
    loader: ShardedLoader,
    *,
    epochs: int = 1,
    save: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    check_every: int = 100,
    nonfinite: Literal["raise", "allow"] = "raise",
    timeout: timedelta = timedelta(minutes=10),
    members: Members | None = None,
) -> Job:
    """Return a training loop that continues when ranks are lost and when new ones join. ::

        group = paceline.elastic.group()
        ddp = paceline.DistributedDataParallel(model, process_group=group, shards=8)
        loader = ShardedLoader(dataset, shards=8, batch=64, group=group)
        with paceline.elastic.job(ddp, optimizer, loader, epochs=3, save="saves") as job:
            for step in job:
                for shard, (x, y) in step:
                    with ddp.shard(shard):
                        loss(ddp(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    At the end, parameters, buffers and optimizer states are bitwise those of a run that lost no
    rank. Under ``paceline run`` it finds the other members; without a launcher this process trains
    alone.

    ``save`` is a folder for the state, which is saved every ``save_every`` steps and at the end,
    and loaded at the next start. Every ``check_every`` steps all ranks compare digests of their
    states; 0 turns that off. With ``nonfinite="raise"`` a NaN or infinity in a gradient raises an
    error on all ranks that names the rank, before anything is averaged; use ``"allow"`` with
    gradient scalers. ``timeout`` is how long a rank waits for the others after one was lost.
    ``members`` is for your own launcher.
    """
    heed_threads()
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if nonfinite not in ("raise", "allow"):
        raise JobArgumentError(f'nonfinite: expected "raise" or "allow", got {nonfinite!r}')
    if epochs < 0 or save_every < 0 or check_every < 0:
        raise JobArgumentError("epochs, save_every and check_every are not below 0")
    return Job(
        ddp,
        optimizers,
        loader,
        epochs=epochs,
        saves=None if save is None else Saves(save),
        save_every=save_every,
        check_every=check_every,
        nonfinite=nonfinite,
        members=connect() if members is None else members,
        timeout=timeout.total_seconds(),
    )
