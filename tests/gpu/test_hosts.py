"""Two hosts made of one: ranks that NCCL takes for those of another machine."""

from __future__ import annotations

import os

import pytest
import torch

from paceline import DistributedDataParallel as DDP
from paceline.errors import UnsupportedError
from paceline.testing import Meeting, spawn_ranks
from tests.ddp.toys import assert_same, grads, stack

from .machine import Machine, here
from .scene import Scene, assert_close, on_ranks

RANKS, PER_HOST = 4, 2
ELEMENTS = 10_007  # which nothing divides


def _train_on_two_hosts(meeting: Meeting, machine: Machine) -> bool:
    """Averages over NCCL alone, and by hand as ``hybrid`` does it: within hosts, then between."""
    os.environ["NCCL_HOSTID"] = f"host{meeting.rank // PER_HOST}"
    with Scene.opened(meeting, machine) as scene:
        model = stack(3, 5, 2)
        ddp = DDP(scene.place(model), process_group=scene.group)
        for step in range(3):
            ddp.zero_grad()
            ddp(scene.data(4, 3, seed=10 * step + scene.rank)).square().mean().backward()
            expected = scene.mean_grads(
                model, lambda m, r, s=step: m(scene.data(4, 3, seed=10 * s + r)).square().mean()
            )
            assert_same(grads(ddp), expected, rtol=1e-12, atol=1e-14)
        total = sum(scene.data(ELEMENTS, seed=rank) for rank in range(scene.size))
        alone = scene.data(ELEMENTS, seed=scene.rank)
        scene.group.all_reduce(alone)
        assert_close(alone, total)
        assert_close(_by_hand(scene), total)
        scene.wait()
    return True


def _by_hand(scene: Scene) -> torch.Tensor:
    first = scene.rank // PER_HOST * PER_HOST
    own = scene.data(ELEMENTS, seed=scene.rank)
    host = scene.group.split(list(range(first, first + PER_HOST)))
    leaders = scene.group.split(list(range(0, scene.size, PER_HOST)))
    assert host is not None
    host.reduce(own, 0)
    if leaders is not None:
        leaders.all_reduce(own)
    host.broadcast(own, 0)
    scene.wait()
    for group in (leaders, host):
        if group is not None:
            group.shutdown()
    return own


def test_averages_over_two_hosts_are_those_of_one_process() -> None:
    machine = here()
    found = spawn_ranks(
        RANKS, _train_on_two_hosts, machine, deadline=120, env=machine.environment(RANKS)
    )
    assert found == [True] * RANKS


@on_ranks
def test_hybrid_says_that_nccl_is_for_gpus(scene: Scene) -> None:
    for options in ({}, {"between": "nccl"}):
        with pytest.raises(UnsupportedError, match="Use backend='nccl'"):
            scene.new_group(backend="hybrid", device=torch.device("cuda", 0), **options)
