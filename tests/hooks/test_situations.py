"""Every hook in every situation: weights, uneven inputs, accumulation, mixed precision.

A lossless hook gives what DDP gives without one; a lossy one comes near; ranks never differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import DistributedDataParallel as DDP
from paceline.ddp import _MixedPrecision
from paceline.groups import Group
from paceline.testing import run_ranks
from tests.ddp.toys import TINY, Grads, assert_same, grads
from tests.hooks.table import TABLE, Entry, Net, assert_near, batch, loss

RANKS = 3
STEPS = 4  # with state, hooks begin to do what they are for in the third

Situation = Callable[[DDP, int], None]  # trains for STEPS steps, leaving the last gradients


def plain(ddp: DDP, rank: int) -> None:
    for _ in range(STEPS):
        ddp.zero_grad()
        loss(ddp, batch(rank)).backward()


def weighted(ddp: DDP, rank: int) -> None:
    for _ in range(STEPS):
        ddp.zero_grad()
        rows = 3 + 2 * rank
        with ddp.samples(rows):
            loss(ddp, batch(rank, rows=rows)).backward()


def uneven(ddp: DDP, rank: int) -> None:
    with ddp.join():
        for _ in range(STEPS - rank):
            ddp.zero_grad()
            loss(ddp, batch(rank)).backward()


def uneven_by_active(ddp: DDP, rank: int) -> None:
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(STEPS - rank):
            ddp.zero_grad()
            loss(ddp, batch(rank)).backward()


def accumulated(ddp: DDP, rank: int) -> None:
    for micro in range(2 * STEPS):
        if micro % 2 == 0:
            ddp.zero_grad()
        with ddp.accumulate(2):
            loss(ddp, batch(rank, micro % 2)).backward()


def weighted_and_accumulated(ddp: DDP, rank: int) -> None:
    for micro in range(2 * STEPS):
        if micro % 2 == 0:
            ddp.zero_grad()
        rows = 2 + rank + micro % 2
        with ddp.samples(rows), ddp.accumulate(2):
            loss(ddp, batch(rank, micro % 2, rows=rows)).backward()


SITUATIONS: dict[str, Situation] = {
    "plain": plain,
    "weighted": weighted,
    "uneven": uneven,
    "uneven, by active ranks": uneven_by_active,
    "accumulated": accumulated,
    "weighted and accumulated": weighted_and_accumulated,
}


def train(entry: Entry | None, situation: Situation, **options: Any) -> list[Grads]:
    def one_rank(group: Group) -> Grads:
        ddp = DDP(Net(), process_group=group, bucket_cap_mb=TINY, **options)
        if entry is not None:
            ddp.register_comm_hook(entry.state(group), entry.hook)
        situation(ddp, group.rank())
        return grads(ddp)

    return run_ranks(RANKS, one_rank)


EXPECTED: dict[str, Grads] = {}


def expected(name: str) -> Grads:
    """What DDP gives without a hook, on the rank that trained to the end."""
    if name not in EXPECTED:
        EXPECTED[name] = train(None, SITUATIONS[name])[0]
    return EXPECTED[name]


def active_ranks(name: str) -> int:
    """Ranks whose last gradients are those of the last pass: others have run out before."""
    return 1 if name.startswith("uneven") else RANKS


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("hook", TABLE)
def test_a_hook_averages(hook: str, situation: str) -> None:
    entry = TABLE[hook]
    found = train(entry, SITUATIONS[situation])[: active_ranks(situation)]
    for ours in found:
        assert_near(ours, expected(situation), entry.close)
        assert_same(ours, found[0], rtol=0, atol=0)


@pytest.mark.parametrize("hook", TABLE)
def test_a_hook_goes_with_mixed_precision(hook: str) -> None:
    entry = TABLE[hook]
    options = {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.bfloat16)}
    wanted = train(None, plain, **options)[0]
    found = train(entry, plain, **options)
    for ours in found:
        assert_near(ours, wanted, max(entry.close, 3e-2))
        assert_same(ours, found[0], rtol=0, atol=0)


@pytest.mark.parametrize("hook", TABLE)
def test_a_hook_keeps_the_ranks_alike_over_many_steps(hook: str) -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], float, float]:
        ddp = DDP(Net(), process_group=group, bucket_cap_mb=TINY)
        entry = TABLE[hook]
        ddp.register_comm_hook(entry.state(group), entry.hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            value = loss(ddp, batch(group.rank()))
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return [p.detach().clone() for p in ddp.parameters()], losses[0], losses[-1]

    ranks = run_ranks(2, one_rank)
    for params, first, last in ranks:
        assert last < 0.6 * first
        for mine, theirs in zip(params, ranks[0][0], strict=True):
            assert torch.equal(mine, theirs)
