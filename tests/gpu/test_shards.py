"""Shards of a global batch: the same bits on any number of ranks, on a device too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.data import ShardedLoader
from tests.ddp.toys import data, fill, weights

from .scene import Scene, on_ranks

SHARDS, BATCH, STEPS = 8, 24, 3
FEATURES = data(BATCH * STEPS, 6).float()


def model() -> nn.Sequential:
    return fill(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)).float()
    )


def train(scene: Scene, group: Any, members: int, rank: int) -> dict[str, Tensor]:
    """Weights after an epoch of shards, of which ``members`` ranks compute their share."""
    ddp = DDP(scene.place(model()), process_group=group, shards=SHARDS)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    loader = ShardedLoader(
        TensorDataset(FEATURES), shards=SHARDS, batch=BATCH, members=members, rank=rank
    )
    for step in loader:
        for shard, (x,) in ddp.shards_of(step):
            with ddp.shard(shard):
                ddp(x.to(scene.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(ddp)


@on_ranks
def test_a_run_with_shards_has_the_bits_of_one_process(scene: Scene) -> None:
    found = train(scene, scene.group, scene.size, scene.rank)
    scene.assert_same_bits(found)
    with paceline.new_group(
        scene.machine.backend,
        device=scene.device,
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    ) as alone:
        expected = train(scene, alone, 1, 0)
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{name}: {(found[name] - value).abs().max()}"
