"""Saved and resumed runs end where uninterrupted ones do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from paceline import DistributedDataParallel as DDP
from paceline.hooks import CodecHook, Int8
from paceline.optim import LocalSGD, ZeroRedundancyOptimizer
from tests.ddp.toys import assert_same, stack, weights

from .scene import Scene, on_ranks

STEPS, STOP = 6, 3
# A wrapper's first pass has other buckets, and gloo and NCCL add up in another order there.
CLOSE = {"rtol": 1e-11, "atol": 1e-13}


def loss(scene: Scene, model: Any, step: int) -> Tensor:
    return model(scene.data(4, 5, seed=10 * step + scene.rank)).square().mean()


def train(scene: Scene, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(scene, model, step).backward()
        optimizer.step()


@on_ranks
def test_a_run_saved_as_one_file_ends_where_an_uninterrupted_one_does(scene: Scene) -> None:
    def begin() -> tuple[DDP, torch.optim.Optimizer]:
        ddp = DDP(scene.place(stack(5, 7, 3)), process_group=scene.group)
        return ddp, torch.optim.AdamW(ddp.parameters(), lr=0.05)

    path = scene.folder() / "saved.pt"
    whole, optimizer = begin()
    train(scene, whole, optimizer, range(STOP))
    if scene.rank == 0:
        torch.save([whole.module.state_dict(), optimizer.state_dict()], path)
    scene.group.barrier()
    scene.wait()
    train(scene, whole, optimizer, range(STOP, STEPS))
    again, other = begin()
    state, moments = torch.load(path, map_location=scene.device)
    again.module.load_state_dict(state)
    other.load_state_dict(moments)
    train(scene, again, other, range(STOP, STEPS))
    assert_same(weights(again), weights(whole), **CLOSE)
    scene.assert_same_bits(weights(again))


@on_ranks
def test_a_sharded_run_saved_in_parts_ends_where_an_uninterrupted_one_does(scene: Scene) -> None:
    def begin() -> tuple[DDP, ZeroRedundancyOptimizer]:
        ddp = DDP(scene.place(stack(5, 7, 3)))  # the default group: dcp saves over that
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, ddp=ddp, lr=0.05)
        return ddp, zero

    folder = scene.folder()
    whole, zero = begin()
    train(scene, whole, zero, range(STOP))
    state = {"model": whole.module.state_dict(), "optimizer": zero.sharded_state_dict()}
    dcp.save(state, checkpoint_id=folder)
    train(scene, whole, zero, range(STOP, STEPS))
    again, other = begin()
    loaded = {"model": again.module.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    other.load_sharded(folder, "optimizer")
    train(scene, again, other, range(STOP, STEPS))
    assert_same(weights(again), weights(whole), **CLOSE)
    scene.assert_same_bits(weights(again))


@on_ranks
def test_what_a_codec_has_not_sent_goes_on_from_its_state(scene: Scene) -> None:
    def begin() -> tuple[DDP, CodecHook, torch.optim.Optimizer]:
        ddp = DDP(scene.place(stack(5, 7, 3).float()), process_group=scene.group)
        hook = CodecHook(Int8(), small=0)
        hook.register(ddp)
        return ddp, hook, torch.optim.SGD(ddp.parameters(), lr=0.1)

    def go(ddp: DDP, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            x = scene.data(4, 5, seed=10 * step + scene.rank, dtype=torch.float32)
            ddp(x).square().mean().backward()
            optimizer.step()

    whole, hook, optimizer = begin()
    go(whole, optimizer, range(STOP))
    kept = hook.state_dict()
    state = {name: value.clone() for name, value in whole.module.state_dict().items()}
    go(whole, optimizer, range(STOP, STEPS))
    again, other_hook, other = begin()
    again.module.load_state_dict(state)
    other_hook.load_state_dict(kept)
    go(again, other, range(STOP, STEPS))
    assert_same(weights(again), weights(whole), rtol=1e-6, atol=1e-7)


@on_ranks
def test_a_round_in_progress_goes_on_from_its_state(scene: Scene) -> None:
    def begin() -> tuple[Any, LocalSGD]:
        own = scene.place(stack(5, 7, 3))
        inner = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        return own, LocalSGD(own, inner, sync_every=2, process_group=scene.group)

    whole, optimizer = begin()
    train(scene, whole, optimizer, range(STOP))
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    path = scene.folder() / f"state-{scene.rank}.pt"
    torch.save(optimizer.state_dict(), path)
    kept = torch.load(path, map_location=scene.device)
    train(scene, whole, optimizer, range(STOP, STEPS))
    again, other = begin()
    again.load_state_dict(state)
    other.load_state_dict(kept)
    train(scene, again, other, range(STOP, STEPS))
    optimizer.sync()
    other.sync()
    assert_same(weights(again), weights(whole), **CLOSE)
    scene.assert_same_bits(weights(again))
