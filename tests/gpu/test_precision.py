"""Autocast, scalers, low-precision models, and batch norms over all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline import DistributedDataParallel as DDP
from paceline import SyncBatchNorm, optim
from tests.ddp.toys import TINY, assert_same, data, fill, grads, stack, weights

from .scene import Scene, assert_close, on_ranks

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def low(scene: Scene, model: Any, rank: int, step: int, dtype: torch.dtype) -> Tensor:
    """The loss under autocast, in float32."""
    x = scene.data(6, 3, seed=10 * step + rank, dtype=torch.float32)
    with torch.autocast(scene.device.type, dtype):
        return model(x).float().square().mean()


@on_ranks
@DTYPES
def test_gradients_under_autocast_are_those_of_one_process(
    scene: Scene, dtype: torch.dtype
) -> None:
    model = stack(3, 8, 2).float()
    ddp = DDP(scene.place(model), process_group=scene.group, bucket_cap_mb=TINY)
    for step in range(3):
        ddp.zero_grad()
        low(scene, ddp, scene.rank, step, dtype).backward()
        expected = scene.mean_grads(model, lambda m, r, s=step: low(scene, m, r, s, dtype))
        assert_same(grads(ddp), expected, rtol=1e-4, atol=1e-5)
        assert all(p.grad.dtype == torch.float32 for p in ddp.parameters())


SCALERS: dict[str, Any] = {"torch's": torch.amp.GradScaler, "ours": optim.GradScaler}


@on_ranks
@pytest.mark.parametrize("whose", SCALERS)
def test_a_scaled_loss_steps_as_one_process_does_and_skips_what_is_not_finite(
    scene: Scene, whose: str
) -> None:
    model = stack(3, 8, 2).float()
    ddp = DDP(scene.place(model), process_group=scene.group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = SCALERS[whose](scene.device.type, init_scale=1024.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        loss = low(scene, ddp, scene.rank, step, torch.bfloat16)
        if step == 1 and scene.rank == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    alone = scene.place(model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in (0, 2, 3):
        plain.zero_grad()
        losses = [low(scene, alone, r, step, torch.bfloat16) for r in range(scene.size)]
        (sum(losses) / scene.size).backward()
        plain.step()
    found = weights(ddp)
    scene.assert_same_bits(found)
    assert_same(found, weights(alone), rtol=1e-4, atol=1e-5)
    assert scaler.get_scale() == 1024.0  # halved once, doubled once


@on_ranks
def test_a_rank_with_an_inf_in_its_shard_makes_all_skip_the_step(scene: Scene) -> None:
    ddp = DDP(scene.place(stack(5, 7, 3).float()), process_group=scene.group)
    zero = optim.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, ddp=ddp, lr=0.1)
    scaler = optim.GradScaler(scene.device.type, init_scale=1024.0)
    before = weights(ddp)
    loss = ddp(scene.data(4, 5, seed=scene.rank, dtype=torch.float32)).square().mean()
    scaler.scale(loss).backward()
    if scene.rank == 1:
        zero.gradients().parts[0][0] = math.inf
    scaler.step(zero)
    scaler.update()
    assert_same(weights(ddp), before, rtol=0, atol=0)
    assert scaler.get_scale() == 512.0


@on_ranks
@pytest.mark.parametrize("reduce", [torch.bfloat16, torch.float32], ids=str)
def test_mixed_precision_averages_low_precision_passes(scene: Scene, reduce: torch.dtype) -> None:
    precision = paceline._MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    model = stack(3, 8, 2).float()
    ddp = DDP(scene.place(model), process_group=scene.group, mixed_precision=precision)

    def in_low(net: Any, rank: int, step: int) -> Tensor:
        x = scene.data(6, 3, seed=10 * step + rank, dtype=torch.float32)
        return net(x).float().square().mean()

    for step in range(3):
        ddp.zero_grad()
        in_low(ddp, scene.rank, step).backward()
        expected: dict[str, Tensor] = {}
        for rank in range(scene.size):
            own = scene.place(model).bfloat16()
            x = scene.data(6, 3, seed=10 * step + rank, dtype=torch.bfloat16)
            own(x).float().square().mean().backward()
            for name, grad in grads(own).items():
                expected[name] = expected.get(name, 0) + grad.float() / scene.size
        close = 1e-5 if reduce == torch.float32 else 2e-2
        assert_same(grads(ddp), expected, rtol=close, atol=close)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in ddp.parameters())


# Batch norms over all ranks.


def normed(sync: bool) -> nn.Sequential:
    layers = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)))
    layers = layers.double()
    return SyncBatchNorm.convert_sync_batchnorm(layers) if sync else layers


@on_ranks
@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_synced_batch_norms_are_one_batch_norm_over_all_samples(scene: Scene, whose: str) -> None:
    if whose == "torch's" and not scene.on_gpu:
        pytest.skip("torch's layer needs a GPU")
    model = scene.place(normed(sync=True))
    if whose == "torch's":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(scene.place(normed(sync=False)))
    ddp = DDP(model, process_group=scene.group if whose == "ours" else None)
    alone = scene.place(normed(sync=False))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ddp, alone)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(scene.data(5, 3, seed=10 * step + scene.rank)).square().mean().backward()
        union = torch.cat([scene.data(5, 3, seed=10 * step + r) for r in range(scene.size)])
        alone(union).square().mean().backward()
        assert_same(grads(ddp), grads(alone), rtol=1e-8, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(weights(ddp), weights(alone), rtol=1e-8, atol=1e-10)
    assert_close(model[1].running_mean, alone[1].running_mean, rtol=1e-8, atol=1e-10)
    assert_close(model[1].running_var, alone[1].running_var, rtol=1e-8, atol=1e-10)


@on_ranks
def test_a_model_of_several_precisions_trains_towards_its_goal(scene: Scene) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    fill(model)
    ddp = DDP(scene.place(model), process_group=scene.group)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=scene.on_gpu)
    scaler = torch.amp.GradScaler(scene.device.type)
    x = data(64, 8, seed=scene.rank).float().to(scene.device)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast(scene.device.type, torch.float16 if scene.on_gpu else torch.bfloat16):
            loss = (ddp(x).float() - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    scene.assert_same_bits(weights(ddp))
