"""Lightning Fabric in a job that goes on when ranks are killed: not a bit of the weights changes.

    python examples/fabric_elastic.py                            both runs, two equal digests
    paceline run --elastic --nproc 3 examples/fabric_elastic.py  a run without faults

Fabric has this process's device and precision; the job has the other processes, which may change
after any step. Needs Lightning: pip install 'paceline[lightning]'.
"""

from __future__ import annotations

import torch
from elastic import STEPS, die_if_told, start, tell
from lightning.fabric import Fabric
from same_bits import BATCH, SHARDS, Lines, make_model
from torch.nn.functional import cross_entropy

from paceline.cli.demo.text import load_text
from paceline.integrations.lightning import ElasticStrategy


def main(kills: dict[int, int]) -> None:
    torch.set_num_threads(1)
    strategy = ElasticStrategy(shards=SHARDS)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    loader = strategy.loader(Lines(load_text(1 << 18)[: STEPS * BATCH * 32 + 1]), batch=BATCH)
    with strategy.job(model, optimizer, loader) as job:
        for step in job:
            for shard, (inputs, targets) in step:
                with strategy.shard(model, shard):
                    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                    fabric.backward(loss)
                die_if_told(strategy.group, kills, step)
            optimizer.step()
            optimizer.zero_grad()
        tell(strategy.group, job, model.module)
    strategy.group.shutdown()


if __name__ == "__main__":
    start(main)
