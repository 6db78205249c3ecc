"""Accelerate in a job that goes on when ranks are killed: not a bit of the weights changes.

    python examples/accelerate_elastic.py                            both runs, two equal digests
    paceline run --elastic --nproc 3 examples/accelerate_elastic.py  a run without faults

The Accelerator has this process's device and precision; the job has the other processes, which may
change after any step. Needs Accelerate: pip install accelerate.
"""

from __future__ import annotations

import torch
from elastic import STEPS, die_if_told, start, tell
from same_bits import BATCH, SHARDS, Lines, make_model
from torch.nn.functional import cross_entropy

from paceline import DistributedDataParallel, elastic
from paceline.cli.demo.text import load_text
from paceline.data import ShardedLoader
from paceline.integrations.accelerate import elastic_accelerator


def main(kills: dict[int, int]) -> None:
    torch.set_num_threads(1)
    accelerator = elastic_accelerator(cpu=True)
    group = elastic.group(device=accelerator.device)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    ddp = DistributedDataParallel(model, process_group=group, shards=SHARDS)
    lines = Lines(load_text(1 << 18)[: STEPS * BATCH * 32 + 1])
    loader = ShardedLoader(lines, shards=SHARDS, batch=BATCH, group=group)
    with elastic.job(ddp, optimizer.optimizer, loader) as job:
        for step in job:
            for shard, (inputs, targets) in step:
                with ddp.shard(shard):
                    loss = cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten())
                    accelerator.backward(loss)
                die_if_told(group, kills, step)
            optimizer.step()
            optimizer.zero_grad()
        tell(group, job, accelerator.unwrap_model(ddp.module))
    group.shutdown()


if __name__ == "__main__":
    start(main)
