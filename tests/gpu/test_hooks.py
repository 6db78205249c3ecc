"""Communication hooks and codecs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline import DistributedDataParallel as DDP
from paceline.hooks import CodecHook
from tests.ddp.toys import TINY, Grads, grads
from tests.hooks.table import TABLE, Net, assert_near, batch, loss
from tests.hooks.test_codec_hook import CLOSE, MAKERS

from .scene import Scene, on_ranks

PASSES = 4


def gradients(scene: Scene, ddp: Any) -> Grads:
    """What the last of some passes leaves; the hooks of some approximate from the third on."""
    for _ in range(PASSES):
        ddp.zero_grad()
        x = batch(scene.rank, dtype=torch.float32).to(scene.device)
        loss(ddp, x).backward()
    return grads(ddp)


def expected(scene: Scene) -> Grads:
    return scene.mean_grads(
        Net(torch.float32),
        lambda m, rank: loss(m, batch(rank, dtype=torch.float32).to(scene.device)),
    )


def wrapped(scene: Scene) -> DDP:
    net = scene.place(Net(torch.float32))
    return DDP(net, process_group=scene.group, bucket_cap_mb=TINY)


@on_ranks
@pytest.mark.parametrize("name", TABLE)
def test_a_hook_averages_as_one_process_within_its_error(scene: Scene, name: str) -> None:
    ddp = wrapped(scene)
    ddp.register_comm_hook(TABLE[name].state(scene.group), TABLE[name].hook)
    found = gradients(scene, ddp)
    assert_near(found, expected(scene), max(TABLE[name].close, 2e-5))
    scene.assert_same_bits(found)


@on_ranks
@pytest.mark.parametrize("name", MAKERS)
def test_a_codec_averages_within_its_error_and_to_the_same_bits(scene: Scene, name: str) -> None:
    ddp = wrapped(scene)
    CodecHook(MAKERS[name](), small=16).register(ddp)
    found = gradients(scene, ddp)
    scene.assert_same_bits(found)
    assert all(value.isfinite().all() for value in found.values())
    if name in CLOSE:
        assert_near(found, expected(scene), 2 * CLOSE[name] + 2e-5)


@on_ranks
@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"])
def test_torchs_own_hooks_average_over_torchs_group(scene: Scene, name: str) -> None:
    ddp = DDP(scene.place(Net(torch.float32)), bucket_cap_mb=TINY)
    ddp.register_comm_hook(None, getattr(default_hooks, name))
    close = {"allreduce_hook": 2e-5, "fp16_compress_hook": 2e-3, "bf16_compress_hook": 2e-2}
    assert_near(gradients(scene, ddp), expected(scene), close[name])
