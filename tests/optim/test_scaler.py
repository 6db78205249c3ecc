"""GradScaler: all ranks skip a step, or none does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline.groups import Group
from paceline.optim import GradScaler, clip_grad_norm_
from paceline.optim import ZeroRedundancyOptimizer as Zero
from paceline.testing import run_ranks
from tests.ddp.toys import count_calls, data
from tests.optim.zero.ranks import model, weights


def scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def paired(group: Group) -> tuple[Any, Any]:
    ddp = DDP(model(), process_group=group)
    return ddp, Zero(ddp.parameters(), torch.optim.AdamW, ddp=ddp, lr=0.1)


def loss(net: Any, step: int, rank: int) -> Tensor:
    return net(data(4, 5, seed=10 * step + rank)).square().sum()


def test_scaled_steps_on_stretches_are_those_of_one_process() -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], float]:
        ddp, zero = paired(group)
        scale = scaler()
        for step in range(4):
            zero.zero_grad()
            scale.scale(loss(ddp, step, group.rank())).backward()
            scale.unscale_(zero)
            clip_grad_norm_(zero, 1.0)
            scale.step(zero)
            scale.update()
        return weights(ddp), scale.get_scale()

    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        (sum(loss(net, step, rank) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    for found, scale in run_ranks(2, one_rank):
        assert_close(found, weights(net))
        assert scale == 4096.0  # it grew twice


def test_an_inf_in_one_stretch_makes_every_rank_skip_the_step() -> None:
    def one_rank(group: Group) -> tuple[bool, float, list[str]]:
        ddp, zero = paired(group)
        scale = scaler()
        before = weights(ddp)
        scale.scale(loss(ddp, 0, group.rank())).backward()
        if group.rank() == 1:
            zero.gradients().parts[0][0] = math.inf
        calls = count_calls(group)
        scale.step(zero)
        scale.update()
        same = all(torch.equal(a, b) for a, b in zip(before, weights(ddp), strict=True))
        return same, scale.get_scale(), calls

    for same, scale, calls in run_ranks(2, one_rank):
        assert same
        assert scale == 512.0
        assert calls == ["all_reduce"]


def test_whole_gradients_are_unscaled_as_torch_does_without_a_collective() -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], list[str]]:
        net = model()
        zero = Zero(net.parameters(), torch.optim.SGD, group, lr=0.1)
        scale = scaler()
        scale.scale(loss(net, 0, 0)).backward()
        calls = count_calls(group)
        scale.unscale_(zero)
        seen = list(calls)
        scale.step(zero)
        return weights(net), seen

    net = model()
    loss(net, 0, 0).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for found, calls in run_ranks(2, one_rank):
        assert_close(found, weights(net))
        assert calls == []


def test_an_ordinary_optimizer_is_served_as_by_torch() -> None:
    net, scale = model(), scaler()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scale.scale(loss(net, 0, 0)).backward()
    net[0].weight.grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
    before = weights(net)
    scale.step(optimizer)
    scale.update()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))
    assert scale.get_scale() == 512.0


def test_gradients_in_sixteen_bits_are_refused() -> None:
    def one_rank(group: Group) -> None:
        net = nn.Linear(2, 2, dtype=torch.float16)
        ddp = DDP(net, process_group=group)
        zero = Zero(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
        ddp(torch.ones(1, 2, dtype=torch.float16)).sum().backward()
        scale = scaler()
        scale.scale(torch.ones(1))
        with pytest.raises(ValueError, match="FP16"):
            scale.unscale_(zero)

    run_ranks(2, one_rank)
