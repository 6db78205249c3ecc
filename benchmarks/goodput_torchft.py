"""The ranks of ``goodput.py --ways torchft``, which needs ``torchft-nightly``, and their launcher.

Each rank is a replica of its own, as torchft has them: a replica that is lost is left out of the
step that it was in, and comes back by itself. The times of the lighthouse are those of torchft's
own first example.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

LIGHTHOUSE = {"min_replicas": 1, "quorum_tick_ms": 100, "join_timeout_ms": 10_000}
TIMEOUT = timedelta(seconds=5)  # of a collective, as in that example
HOST = "localhost"


def train(
    model: nn.Module,
    data: Dataset[tuple[Tensor, Tensor]],
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    batch: int,
    note: Callable[[int], None],
) -> None:
    """Train as one replica, and note each step that all have committed."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    plain = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    replica, replicas = int(os.environ["REPLICA"]), int(os.environ["REPLICAS"])
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        hostname=HOST,
        replica_id=f"replica_{replica}",
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    own = batch // replicas
    while True:
        count = manager.current_step()
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(count))  # type: ignore[arg-type]
        mine = order[replica * own : (replica + 1) * own].tolist()
        inputs, targets = (
            torch.stack(part) for part in zip(*map(data.__getitem__, mine), strict=True)
        )
        optimizer.zero_grad()
        loss_of(ddp, inputs, targets).backward()
        optimizer.step()
        if manager.current_step() > count:
            note(manager.current_step())


def supervise(command: Sequence[str], replicas: int) -> None:
    """Start the replicas, and each that ends once more, until this process is told to end."""
    from torchft.coordination import LighthouseServer

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    lighthouse = LighthouseServer(bind="[::]:0", **LIGHTHOUSE)
    env = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "REPLICAS": str(replicas)}

    def start(replica: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=env | {"REPLICA": str(replica)})

    running = [start(replica) for replica in range(replicas)]
    try:
        while True:
            time.sleep(0.05)
            for replica, process in enumerate(running):
                if process.poll() is not None:
                    running[replica] = start(replica)
    finally:
        for process in running:
            process.kill()
            process.wait()
        lighthouse.shutdown()
