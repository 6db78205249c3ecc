"""Tensor-parallel modules on a 2-D mesh: gradients are averaged over the data dimension only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.testing import Meeting, spawn_ranks
from tests.ddp.toys import TINY, assert_same, data, fill

Tensors = dict[str, Tensor]


class Feed(nn.Module):
    """Two layers that are split over tensor-parallel ranks, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 2, dtype=torch.float64)
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(x))))


def batch(step: int, data_rank: int) -> Tensor:
    return data(3, 4, seed=10 * step + data_rank)


def whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return tensor.detach().clone() if full is None else full().detach().clone()


def train(mesh: Any, options: dict[str, Any]) -> tuple[Tensors, Tensors, dict[str, bool]]:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Feed(), mesh["tp"], plan)
    ddp = DDP(model, device_mesh=mesh["dp"], **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(4):
        optimizer.zero_grad()
        ddp(batch(step, mesh.get_local_rank("dp"))).square().sum().backward()
        optimizer.step()
    named = dict(model.named_parameters())
    grads = {name: whole(p.grad) for name, p in named.items()}
    kinds = {name: isinstance(p.grad, DTensor) for name, p in named.items()}
    return grads, {name: whole(p) for name, p in named.items()}, kinds


def _train_on_a_mesh(meeting: Meeting) -> list[tuple[Tensors, Tensors, dict[str, bool]]]:
    from torch.distributed.device_mesh import init_device_mesh  # here, for it is a slow import

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(RuntimeError, match="Only 1D device mesh"):
        DDP(Feed(), device_mesh=mesh)
    small = {"bucket_cap_mb": TINY, "gradient_as_bucket_view": False}
    found = [train(mesh, options) for options in ({}, small)]
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_sharded_parameters_are_averaged_over_the_data_dimension() -> None:
    model = Feed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        (sum(model(batch(step, rank)).square().sum() for rank in range(2)) / 2).backward()
        optimizer.step()
    expected = {name: p.grad for name, p in model.named_parameters()}
    values = {name: p.detach() for name, p in model.named_parameters()}
    for results in spawn_ranks(4, _train_on_a_mesh):
        for grads, weights, kinds in results:
            assert_same(grads, expected)
            assert_same(weights, values)
            assert kinds == {name: not name.startswith("head") for name in kinds}
