"""The same bits on any number of ranks: the demo's GPT, trained on 1, 2 and 3 of them.

    python examples/same_bits.py                    three runs, three equal digests
    paceline run --nproc 2 examples/same_bits.py    one of them

Each step is 6 shards of 4 sequences. With dropout, AdamW and clipping, what comes out is a matter
of the shards alone: the ranks only share them out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from paceline import DistributedDataParallel, Group, new_group
from paceline.cli.demo.gpt import CharGPT
from paceline.cli.demo.text import load_text
from paceline.data import ShardedLoader
from paceline.optim import clip_grad_norm_

SHARDS = 6  # of a step, on any number of ranks
BATCH = 24  # sequences of a step, on all ranks together
CONTEXT = 32


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of text, and for each character the one that follows."""

    def __init__(self, text: Tensor) -> None:
        self.text = text.long()

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        row = self.text[number * CONTEXT : (number + 1) * CONTEXT + 1]
        return row[:-1], row[1:]


def make_model() -> nn.Module:
    """The same on every rank: a GPT that also drops some of what it sees."""
    torch.manual_seed(0)
    model = CharGPT(context=CONTEXT, width=32, depth=2)
    model.blocks.append(nn.Dropout(0.1))
    return model


def train(group: Group, steps: int) -> nn.Module:
    """The model after some steps."""
    loader = ShardedLoader(Lines(load_text(1 << 18)), shards=SHARDS, batch=BATCH, group=group)
    ddp = DistributedDataParallel(make_model(), process_group=group, shards=SHARDS)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    for _, step in zip(range(steps), loader, strict=False):
        for shard, (inputs, targets) in ddp.shards_of(step):
            with ddp.shard(shard):
                cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten()).backward()
        clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return ddp.module


def digest(model: nn.Module) -> str:
    """Of every bit of the weights."""
    bits = hashlib.sha256()
    for tensor in model.state_dict().values():
        bits.update(tensor.contiguous().numpy().tobytes())
    return bits.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description="The same bits on any number of ranks.")
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # a product of matrices may be cut by threads: as many on every rank
    with new_group() as group:
        model = train(group, steps)
        if group.rank() == 0:
            ranks = f"{group.size()} rank{'s' if group.size() > 1 else ''}"
            print(f"{ranks}: digest {digest(model)}, after {steps} steps", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        for ranks in ("1", "2", "3"):
            launcher = [sys.executable, "-m", "paceline", "run", "--nproc", ranks]
            subprocess.run([*launcher, *sys.argv], check=True)
