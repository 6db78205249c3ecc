"""Optimizers that know of other ranks: ZeRO, steps in backward, local SGD, DiLoCo."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from paceline import DistributedDataParallel as DDP
from paceline import hooks, optim
from tests.ddp.toys import TINY, assert_same, data, stack, weights
from tests.hooks.test_codec_hook import MAKERS
from tests.optim.local import small, weights_of

from .scene import Scene, assert_close, on_ranks

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
STEPS = 4


def loss(scene: Scene, model: Any, rank: int, step: int) -> Tensor:
    return model(scene.data(4, 5, seed=10 * step + rank)).square().mean()


def model() -> nn.Sequential:
    return stack(5, 7, 3)  # nothing divides its 66 elements by four ranks


def expected(scene: Scene, make: Any, **options: Any) -> dict[str, Tensor]:
    return scene.trained_alone(model(), make, partial(loss, scene), STEPS, **options)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.05, "foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
}


@on_ranks
@pytest.mark.parametrize("paired", [True, False], ids=["paired", "alone"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sharded_optimizer_steps_as_one_process_does(
    scene: Scene, name: str, paired: bool
) -> None:
    kind, settings = OPTIMIZERS[name]
    if paired and name == "Adafactor":
        pytest.skip("needs whole parameters, which is refused")
    ddp = DDP(scene.place(model()), process_group=scene.group, bucket_cap_mb=TINY)
    with_ddp = {"ddp": ddp} if paired else {"process_group": scene.group}
    zero = optim.ZeroRedundancyOptimizer(ddp.parameters(), kind, **with_ddp, **settings)
    for step in range(STEPS):
        zero.zero_grad()
        loss(scene, ddp, scene.rank, step).backward()
        zero.step()
    found = weights(ddp)
    scene.assert_same_bits(found)
    assert_same(found, expected(scene, lambda p: kind(p, **settings)), **CLOSE)


@on_ranks
def test_sharded_gradients_are_clipped_by_the_norm_of_all(scene: Scene) -> None:
    ddp = DDP(scene.place(model()), process_group=scene.group)
    zero = optim.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=1.0)
    for step in range(STEPS):
        zero.zero_grad()
        loss(scene, ddp, scene.rank, step).backward()
        norm = optim.clip_grad_norm_(zero, 0.05)
        assert float(norm) > 0.05, "there was something to clip"
        zero.step()
    alone = expected(scene, lambda p: torch.optim.SGD(p, lr=1.0), max_norm=0.05)
    assert_same(weights(ddp), alone, rtol=1e-5, atol=1e-7)  # torch adds 1e-6 to the norm


@on_ranks
def test_a_consolidated_state_is_that_of_an_ordinary_optimizer(scene: Scene) -> None:
    ddp = DDP(scene.place(model()), process_group=scene.group)
    zero = optim.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, ddp=ddp, lr=0.05)
    for step in range(STEPS):
        zero.zero_grad()
        loss(scene, ddp, scene.rank, step).backward()
        zero.step()
    zero.consolidate_state_dict(to=0)
    if scene.rank:
        return
    alone = scene.place(model())
    ordinary = torch.optim.AdamW(alone.parameters(), lr=0.05)
    for step in range(STEPS):
        ordinary.zero_grad()
        (sum(loss(scene, alone, r, step) for r in range(scene.size)) / scene.size).backward()
        ordinary.step()
    for number, own in ordinary.state_dict()["state"].items():
        for name, value in own.items():
            found = zero.state_dict()["state"][number][name]
            assert_close(found.cpu(), value.cpu(), **CLOSE)


@on_ranks
@pytest.mark.parametrize("max_norm", [None, 0.05], ids=["", "clipped"])
def test_an_optimizer_in_backward_steps_as_one_process_does(
    scene: Scene, max_norm: float | None
) -> None:
    ddp = DDP(scene.place(model()), process_group=scene.group, bucket_cap_mb=TINY)
    optimizer = optim.InBackward(ddp, torch.optim.SGD, lr=0.5, momentum=0.9, max_norm=max_norm)
    for step in range(STEPS):
        loss(scene, ddp, scene.rank, step).backward()
        assert all(p.grad is None for p in ddp.parameters())
    assert optimizer.steps == STEPS
    found = weights(ddp)
    scene.assert_same_bits(found)
    alone = expected(scene, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), max_norm=max_norm)
    assert_same(found, alone, rtol=1e-5, atol=1e-7)


@on_ranks
def test_torchs_optimizers_in_backward_are_taken_over(scene: Scene) -> None:
    own = scene.place(model())
    _apply_optimizer_in_backward(torch.optim.SGD, own.parameters(), {"lr": 0.1})
    ddp = DDP(own, process_group=scene.group)
    for step in range(STEPS):
        loss(scene, ddp, scene.rank, step).backward()
    assert_same(weights(ddp), expected(scene, lambda p: torch.optim.SGD(p, lr=0.1)), **CLOSE)


@on_ranks
def test_a_local_round_of_one_step_is_data_parallel(scene: Scene) -> None:
    own = scene.place(model())
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    optimizer = optim.LocalSGD(own, inner, sync_every=1, process_group=scene.group)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(scene, own, scene.rank, step).backward()
        optimizer.step()
    found = weights(own)
    scene.assert_same_bits(found)
    assert_same(found, expected(scene, lambda p: torch.optim.SGD(p, lr=0.1)), **CLOSE)


def trained_apart(scene: Scene, steps: int, every: int, counts: Any) -> dict[str, Tensor]:
    """What ranks come to that train alone and take their weighted mean after ``every`` steps."""
    start = scene.place(model())
    for begin in range(0, steps, every):
        total: dict[str, Tensor] = {}
        for rank in range(scene.size):
            own = scene.place(start)
            inner = torch.optim.SGD(own.parameters(), lr=0.1)
            for step in range(begin, begin + every):
                inner.zero_grad()
                loss(scene, own, rank, step).backward()
                inner.step()
            share = counts(rank) / sum(counts(r) for r in range(scene.size))
            for name, value in weights(own).items():
                total[name] = total.get(name, 0) + share * value
        start.load_state_dict(total)
    return weights(start)


@on_ranks
def test_ranks_that_train_apart_take_the_mean_by_samples(scene: Scene) -> None:
    own = scene.place(model())
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    optimizer = optim.LocalSGD(own, inner, sync_every=2, process_group=scene.group)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(scene, own, scene.rank, step).backward()
        optimizer.step(samples=1 + scene.rank)
    optimizer.sync()
    found = weights(own)
    scene.assert_same_bits(found)
    assert_same(found, trained_apart(scene, STEPS, 2, lambda rank: 1 + rank), **CLOSE)


@on_ranks
def test_diloco_with_a_plain_outer_step_is_the_mean(scene: Scene) -> None:
    own = scene.place(model())
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    optimizer = optim.DiLoCo(
        own,
        inner,
        sync_every=2,
        outer=lambda params: torch.optim.SGD(params, lr=1.0),
        process_group=scene.group,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(scene, own, scene.rank, step).backward()
        optimizer.step()
    optimizer.sync()
    found = weights(own)
    scene.assert_same_bits(found)
    assert_same(found, trained_apart(scene, STEPS, 2, lambda rank: 1), rtol=1e-5, atol=1e-6)


@on_ranks
@pytest.mark.parametrize("name", [None, *MAKERS])
def test_fragments_in_flight_leave_all_ranks_with_the_same_model(
    scene: Scene, name: str | None
) -> None:
    own = scene.place(model().float())
    inner = torch.optim.AdamW(own.parameters(), lr=0.01)
    codec = None if name is None else MAKERS[name]()
    optimizer = optim.DiLoCo(
        own,
        inner,
        sync_every=4,
        fragments=2,
        overlap=1,
        codec=codec,
        process_group=scene.group,
    )
    before = weights(own)
    for step in range(8):
        optimizer.zero_grad()
        x = data(4, 5, seed=10 * step + scene.rank).float().to(scene.device)
        own(x).square().mean().backward()
        optimizer.step(samples=1 + scene.rank)
    optimizer.sync()
    found = weights(own)
    scene.assert_same_bits(found)
    assert all(value.isfinite().all() for value in found.values())
    assert any(not torch.equal(found[n], before[n]) for n in found), "it has learned something"


@on_ranks
def test_buffers_of_ranks_that_train_apart_are_averaged(scene: Scene) -> None:
    own = scene.place(small())
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    optimizer = optim.LocalSGD(own, inner, sync_every=2, process_group=scene.group)
    for step in range(2):
        optimizer.zero_grad()
        own(scene.data(4, 4, seed=10 * step + scene.rank)).square().mean().backward()
        if step == 1:
            means = scene.gathered(own.norm.running_mean.tolist())
        optimizer.step()
    optimizer.sync()
    found = weights_of(own)
    scene.assert_same_bits({name: value.double() for name, value in found.items()})
    expected = torch.tensor(means, dtype=torch.float64).mean(0)
    assert_close(own.norm.running_mean.cpu(), expected, **CLOSE)


@on_ranks
def test_torchs_periodic_averager_takes_the_mean_over_our_group(scene: Scene) -> None:
    own = scene.place(model())
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    averager = optim.PeriodicModelAverager(period=2, warmup_steps=0, process_group=scene.group)
    optimizer = optim.PostLocalSGDOptimizer(optim=inner, averager=averager)
    for step in range(3):  # averages come behind steps 0 and 2
        optimizer.zero_grad()
        loss(scene, own, scene.rank, step).backward()
        optimizer.step()
    found = weights(own)
    scene.assert_same_bits(found)
    means = {name: sum(other[name] for other in _apart_then_mean(scene)) for name in found}
    assert_same(found, {n: v / scene.size for n, v in means.items()}, **CLOSE)


def _apart_then_mean(scene: Scene) -> list[dict[str, Tensor]]:
    """The ranks' weights before the last average: one step, a mean, and two steps alone."""
    first = []
    for rank in range(scene.size):
        own = scene.place(model())
        _step(scene, own, rank, 0)
        first.append(weights(own))
    mean = {name: sum(w[name] for w in first) / scene.size for name in first[0]}
    last = []
    for rank in range(scene.size):
        own = scene.place(model())
        own.load_state_dict(mean)
        for step in (1, 2):
            _step(scene, own, rank, step)
        last.append(weights(own))
    return last


def _step(scene: Scene, own: nn.Module, rank: int, step: int) -> None:
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    inner.zero_grad()
    loss(scene, own, rank, step).backward()
    inner.step()


@on_ranks
def test_an_optimizer_overlapped_by_a_hook_steps_as_one_process_does(scene: Scene) -> None:
    own = scene.place(model())
    ddp = DDP(own, process_group=scene.group)
    ddp.register_comm_hook(scene.group, hooks.allreduce_hook)
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        plain.zero_grad()
        loss(scene, ddp, scene.rank, step).backward()
        plain.step()
    assert_same(weights(ddp), expected(scene, lambda p: torch.optim.SGD(p, lr=0.1)), **CLOSE)
