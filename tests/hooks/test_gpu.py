"""Hooks on a GPU: one rank over NCCL, and two over gloo that share the GPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.hooks import CodecHook
from paceline.optim import DiLoCo
from paceline.testing import Meeting, spawn_ranks
from tests.ddp.toys import TINY, Grads, assert_same, grads
from tests.hooks.table import TABLE, Net, assert_near, batch, loss
from tests.hooks.test_codec_hook import MAKERS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def gradients(group: Any, entry: Any) -> Grads:
    ddp = DDP(Net(torch.float32).cuda(), process_group=group, bucket_cap_mb=TINY)
    if entry is not None:
        ddp.register_comm_hook(entry.state(group), entry.hook)
    for _ in range(4):
        ddp.zero_grad()
        loss(ddp, batch(group.rank(), dtype=torch.float32).cuda()).backward()
    return grads(ddp)


@pytest.mark.parametrize("name", TABLE)
def test_a_hook_averages_over_nccl(name: str) -> None:
    store, settings = dist.HashStore(), {"rank": 0, "world_size": 1}
    with paceline.new_group("nccl", timedelta(seconds=60), "cuda:0", store=store, **settings) as g:
        found, expected = gradients(g, TABLE[name]), gradients(g, None)
    assert_near(found, expected, max(TABLE[name].close, 1e-5))


def encoded(group: Any, make: Any) -> Grads:
    ddp = DDP(Net(torch.float32).cuda(), process_group=group, bucket_cap_mb=TINY)
    CodecHook(make(), small=16).register(ddp)
    for _ in range(4):
        ddp.zero_grad()
        loss(ddp, batch(group.rank(), dtype=torch.float32).cuda()).backward()
    return grads(ddp)


def trained_apart(group: Any, make: Any) -> Grads:
    model = Net(torch.float32).cuda()
    inner = torch.optim.SGD(model.parameters(), 0.01)
    opt = DiLoCo(model, inner, sync_every=2, codec=make(), process_group=group)
    for step in range(4):
        opt.zero_grad()
        loss(model, batch(group.rank(), dtype=torch.float32).cuda()).backward()
        opt.step(samples=1 + group.rank() + step)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _encoded_on_two_ranks(meeting: Meeting) -> dict[str, Grads]:
    dist.init_process_group("gloo")
    group: Any = dist.group.WORLD
    found = {f"hook {name}": encoded(group, make) for name, make in MAKERS.items()}
    found |= {f"diloco {name}": trained_apart(group, make) for name, make in MAKERS.items()}
    dist.destroy_process_group()
    return {name: {k: v.cpu() for k, v in rows.items()} for name, rows in found.items()}


def test_codecs_leave_ranks_that_share_a_gpu_with_the_same_bits() -> None:
    first, second = spawn_ranks(2, _encoded_on_two_ranks)
    for name in first:
        assert_same(first[name], second[name], rtol=0, atol=0)
        assert all(value.isfinite().all() for value in first[name].values())


def _two_ranks(meeting: Meeting) -> dict[str, Grads]:
    dist.init_process_group("gloo")
    group: Any = dist.group.WORLD
    found = {"none": gradients(group, None)}
    for name, entry in TABLE.items():
        found[name] = gradients(group, entry)
    dist.destroy_process_group()
    return {name: {k: v.cpu() for k, v in rows.items()} for name, rows in found.items()}


def test_every_hook_averages_over_gloo() -> None:
    ranks = spawn_ranks(2, _two_ranks)
    for found in ranks:
        for name, entry in TABLE.items():
            assert_near(found[name], found["none"], max(entry.close, 1e-5))
            assert_same(found[name], ranks[0][name], rtol=0, atol=0)
