"""One member of ``paceline demo --chaos``: a training loop that goes on when others are killed.

``python -m paceline.cli.demo.chaos_member ADDRESS STEPS``, as ``paceline run`` starts it.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from ... import DistributedDataParallel, elastic
from ...data import ShardedLoader
from . import gpt
from .chaos_board import SHARDS
from .talk import MemberEnds, MemberStarts, ShardLoss, Teller
from .text import load_text

BATCH, CONTEXT = 16, 64


class TextStretches(Dataset[Tensor]):
    """Stretches of the library's source, each with the character after it."""

    def __init__(self, count: int) -> None:
        text = load_text(1 << 20)
        draw = torch.Generator().manual_seed(0)
        self._starts = torch.randint(len(text) - CONTEXT, (count,), generator=draw)
        self._text = text

    def __len__(self) -> int:
        """How many there are."""
        return len(self._starts)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self._starts[index])
        return self._text[start : start + CONTEXT + 1].long()


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Nats per character."""
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def main(address: str, steps: int) -> None:
    """Train, and tell every loss and the weights at the end."""
    torch.manual_seed(0)
    member = int(os.environ.get("PACELINE_MEMBER", "0"))
    group = elastic.group()
    model = gpt.CharGPT(context=CONTEXT, width=64, heads=2)
    ddp = DistributedDataParallel(model, process_group=group, shards=SHARDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = ShardedLoader(TextStretches(steps * BATCH), shards=SHARDS, batch=BATCH, group=group)
    with Teller(address) as teller:
        teller.tell(MemberStarts(member, os.getpid()))
        with elastic.job(ddp, optimizer, loader) as job:
            for step in job:
                for shard, rows in step:
                    with ddp.shard(shard):
                        loss = loss_of(ddp, rows)
                        loss.backward()
                    teller.tell(ShardLoss(member, step.number, shard.index, loss.item()))
                optimizer.step()
                optimizer.zero_grad()
            finished = job.finished
        teller.tell(MemberEnds(member, digest(model) if finished else ""))


def digest(model: nn.Module) -> str:
    """The weights, to the last bit."""
    found = hashlib.sha256()
    for weight in model.parameters():
        found.update(weight.detach().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
