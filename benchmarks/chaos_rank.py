"""One member of ``chaos.py``: trains a small model, and writes down what it commits, and when."""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import DistributedDataParallel, elastic
from paceline.data import ShardedLoader

SHARDS, BATCH = 6, 24


def digest(model: nn.Module) -> str:
    bits = hashlib.sha256()
    for tensor in model.state_dict().values():
        bits.update(tensor.contiguous().numpy().tobytes())
    return bits.hexdigest()[:16]


def main(log: str, steps: int, pause: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ.get("PACELINE_MEMBER", "0")))  # the weights come from rank 0's
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    group = elastic.group()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(steps * BATCH, 16, generator=generator))
    loader = ShardedLoader(data, shards=SHARDS, batch=BATCH, group=group)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16))
    ddp = DistributedDataParallel(model, process_group=group, shards=SHARDS)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    with elastic.job(ddp, optimizer, loader) as job:
        for step in job:
            for shard, (inputs,) in step:
                with ddp.shard(shard):
                    (ddp(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            line = f"{time.monotonic()} {step.number} {group.rank()} {os.getpid()} {group.size()}\n"
            os.write(file, line.encode())
            time.sleep(pause)
        if group.rank() == 0 and job.finished:
            print(f"digest {digest(ddp.module)}", flush=True)
    group.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
