"""Buckets that have memory only while they are needed, and averages waited for by hand."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import DistributedDataParallel as DDP
from paceline.errors import UnfinalizedError
from tests.ddp.toys import TINY, Branches, assert_same, grads, stack, weights

from .scene import Scene, on_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def loss(scene: Scene, model: Any, rank: int, step: int) -> Tensor:
    return model(scene.data(4, 3, seed=10 * step + rank)).square().mean()


def expected(scene: Scene, step: int) -> Any:
    return scene.mean_grads(stack(3, 4, 2), lambda m, rank: loss(scene, m, rank, step))


KEYWORDS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": False},
    {"bucket_cap_mb": TINY},
    {"static_graph": True},
    {"lazy_bucket_allocation": True},
]


def manual(scene: Scene, **keywords: Any) -> DDP:
    ddp = DDP(scene.place(stack(3, 4, 2)), process_group=scene.group, **keywords)
    ddp.require_manual_backward_finalization = True
    return ddp


@on_ranks
@pytest.mark.parametrize("number", range(len(KEYWORDS)))
def test_grad_is_none_until_finalize_backward_and_then_the_mean(scene: Scene, number: int) -> None:
    ddp = manual(scene, **KEYWORDS[number])
    for step in range(4):
        ddp.zero_grad()
        loss(scene, ddp, scene.rank, step).backward()
        assert all(p.grad is None for p in ddp.parameters())
        scene.data(64, 64) @ scene.data(64, 64)  # something else meanwhile
        ddp.finalize_backward()
        assert_same(grads(ddp), expected(scene, step), **EXACT)


@on_ranks
def test_a_forward_before_the_averages_were_waited_for_is_refused(scene: Scene) -> None:
    ddp = manual(scene)
    for step in range(2):
        loss(scene, ddp, scene.rank, step).backward()
        with pytest.raises(UnfinalizedError):
            loss(scene, ddp, scene.rank, step)
        ddp.finalize_backward()
        ddp.zero_grad()


@on_ranks
def test_weighted_passes_are_waited_for_by_hand_too(scene: Scene) -> None:
    ddp = manual(scene)
    for step in range(3):
        parts = [scene.data(2 + rank, 3, seed=10 * step + rank) for rank in range(scene.size)]
        ddp.zero_grad()
        with ddp.samples(2 + scene.rank):
            ddp(parts[scene.rank]).square().mean().backward()
        ddp.finalize_backward()
        alone = scene.place(stack(3, 4, 2))
        alone(torch.cat(parts)).square().mean().backward()
        assert_same(grads(ddp), grads(alone), rtol=1e-11, atol=1e-13)


@on_ranks
@pytest.mark.parametrize("views", [True, False], ids=["views", "no views"])
def test_lazy_buckets_train_a_changing_graph_as_one_process(scene: Scene, views: bool) -> None:
    def branch(model: Any, rank: int, step: int) -> Tensor:
        x = scene.data(4, 3, seed=10 * step + rank)
        return model(x, ((rank + step) % 3,)).square().mean()

    ddp = DDP(
        scene.place(Branches()),
        process_group=scene.group,
        lazy_bucket_allocation=True,
        gradient_as_bucket_view=views,
        bucket_cap_mb=TINY,
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        branch(ddp, scene.rank, step).backward()
        optimizer.step()
    found = weights(ddp)
    scene.assert_same_bits(found)
    alone = scene.trained_alone(Branches(), lambda p: torch.optim.SGD(p, lr=0.1), branch, 6)
    assert_same(found, alone, **EXACT)


@on_ranks(cuda=True)
def test_a_lazy_bucket_gives_its_memory_back_when_gradients_are_dropped(scene: Scene) -> None:
    def held(lazy: bool) -> int:
        ddp = DDP(
            torch.nn.Linear(1024, 1024, device=scene.device),
            process_group=scene.group,
            lazy_bucket_allocation=lazy,
        )
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(1, 1024, device=scene.device)).sum().backward()
        ddp.zero_grad()
        scene.wait()
        return torch.cuda.memory_allocated(scene.device)

    held(lazy=True)  # cuBLAS takes memory of its own, once
    gc.collect()
    before = torch.cuda.memory_allocated(scene.device)
    kept = held(lazy=False)
    gc.collect()
    lazy = held(lazy=True)
    assert kept - before >= 8e6, "weights and a bucket"
    assert lazy - before < 6e6, "weights alone"
