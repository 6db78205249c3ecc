"""A rank that fails: the others hear of it, take no wrong step, and nobody waits for ever.

On a GPU ranks do not stop to read what the others said, so a failure may be raised a pass later.
Until then gradients are zeros.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import PeerError
from paceline.optim import InBackward, ZeroRedundancyOptimizer
from paceline.testing import Meeting, spawn_ranks
from tests.ddp.toys import TINY, assert_same, grads, stack, weights

from .machine import Machine, here
from .scene import Scene, on_ranks

BAD = 1  # the rank that fails


class Breaks(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("no luck")


class Fallible(nn.Module):
    """Two layers; it can be told to fail before them, or in the backward pass between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = stack(3, 4), stack(4, 2)

    def forward(self, x: Tensor, fails: str = "") -> Tensor:
        x = self.first(x)
        if fails == "forward":
            raise ArithmeticError("no luck")
        if fails == "memory":
            if x.is_cuda:
                torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
            raise torch.OutOfMemoryError("out of memory: no luck")
        return self.second(Breaks.apply(x) if fails == "backward" else x)


def loss(scene: Scene, model: Any, rank: int, step: int, fails: str = "") -> Tensor:
    return model(scene.data(4, 3, seed=10 * step + rank), fails).square().mean()


def expected(scene: Scene, step: int) -> Any:
    return scene.mean_grads(Fallible(), lambda m, rank: loss(scene, m, rank, step))


def is_empty(ddp: nn.Module) -> bool:
    return all(p.grad is None or not p.grad.any() for p in ddp.parameters())


def passes(scene: Scene, ddp: nn.Module, where: str, at: int, steps: int) -> list[str]:
    """What this rank raised in each pass; what it did not raise in must be right."""
    seen = []
    for step in range(steps):
        ddp.zero_grad()
        failing = scene.rank == BAD and step == at
        try:
            loss(scene, ddp, scene.rank, step, where if failing else "").backward()
        except (ArithmeticError, torch.OutOfMemoryError, PeerError) as error:
            seen.append(f"{type(error).__name__}: {error}")
            continue
        seen.append("")
        if step == at:
            assert is_empty(ddp), "nobody may step with what is no average"
        else:
            assert_same(grads(ddp), expected(scene, step), rtol=1e-11, atol=1e-13)
    return seen


@on_ranks
@pytest.mark.parametrize("cap", [None, TINY], ids=["", "small buckets"])
@pytest.mark.parametrize("at", [0, 1, 3], ids="in pass {}".format)
@pytest.mark.parametrize("where", ["forward", "backward", "memory"])
def test_the_others_hear_of_a_failure_and_all_go_on(
    scene: Scene, where: str, at: int, cap: float | None
) -> None:
    with scene.new_group() as group:
        ddp = DDP(scene.place(Fallible()), process_group=group, bucket_cap_mb=cap)
        seen = passes(scene, ddp, where, at, at + 4)
        assert [bool(text) for text in seen].count(True) == 1, seen
        (text,) = filter(None, seen)
        if scene.rank == BAD:
            assert "no luck" in text or "out of memory" in text
            assert seen[at] == text
        else:
            assert text.startswith("PeerError")
            assert f"rank {BAD}" in text
            assert where != "memory" or "out of memory" in text
            assert text in seen[at : at + 2], "at the latest a pass later"
        assert seen[-1] == "", "and then they go on"


@on_ranks
def test_a_failure_in_the_last_pass_is_heard_when_the_model_is_saved(scene: Scene) -> None:
    with scene.new_group() as group:
        ddp = DDP(scene.place(Fallible()), process_group=group)
        heard = ""
        try:
            heard = passes(scene, ddp, "forward", 2, 3)[2]
            ddp.module.state_dict()
        except PeerError as error:
            heard = str(error)
        assert "no luck" in heard
    scene.assert_same_bits(weights(ddp))


@on_ranks
@pytest.mark.parametrize("how", ["paired", "in backward"])
def test_optimizers_of_ours_hear_before_they_step(scene: Scene, how: str) -> None:
    with scene.new_group() as group:
        ddp = DDP(scene.place(Fallible()), process_group=group)
        if how == "paired":
            optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
        else:
            optimizer = InBackward(ddp, torch.optim.SGD, lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss(scene, ddp, scene.rank, step).backward()
            optimizer.step()
        before = weights(ddp)
        raised = ""
        try:
            loss(scene, ddp, scene.rank, 2, "forward" if scene.rank == BAD else "").backward()
            optimizer.step()
        except (ArithmeticError, PeerError) as error:
            raised = str(error)
        assert "no luck" in raised
        assert_same(weights(ddp), before, rtol=0, atol=0)


@on_ranks
def test_ranks_that_all_fail_go_on_together(scene: Scene) -> None:
    with scene.new_group() as group:
        ddp = DDP(scene.place(Fallible()), process_group=group)
        for step in range(4):
            ddp.zero_grad()
            if step == 1:
                with pytest.raises(ArithmeticError, match="no luck"):
                    loss(scene, ddp, scene.rank, step, "forward")
                continue
            loss(scene, ddp, scene.rank, step).backward()
            assert_same(grads(ddp), expected(scene, step), rtol=1e-11, atol=1e-13)


@on_ranks
def test_after_a_hook_failed_on_all_ranks_they_go_on(scene: Scene) -> None:
    def hook(group, bucket):  # annotations would be checked
        if now[0] == 2 and bucket.index() == 1:
            raise ArithmeticError("no luck")
        work = group.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / group.size())

    now = [0]
    with scene.new_group() as group:
        ddp = DDP(scene.place(Fallible()), process_group=group, bucket_cap_mb=TINY)
        ddp.register_comm_hook(group, hook)
        for step in range(5):
            now[0] = step
            ddp.zero_grad()
            if step == 2:
                with pytest.raises(ArithmeticError, match="no luck"):
                    loss(scene, ddp, scene.rank, step).backward()
                continue
            loss(scene, ddp, scene.rank, step).backward()
            assert_same(grads(ddp), expected(scene, step), rtol=1e-11, atol=1e-13)


# A rank that does not come back. Processes of their own: NCCL may end those that wait.


def _leave(meeting: Meeting, machine: Machine, seconds: float) -> str:
    """Train until rank 1 dies; what the others then raise."""
    with Scene.opened(meeting, machine) as scene:
        group = scene.new_group(timeout=timedelta(seconds=seconds))
        ddp = DDP(scene.place(Fallible()), process_group=group)
        loss(scene, ddp, scene.rank, 0).backward()
        scene.wait()
        if scene.rank == BAD:
            os._exit(7)
        try:
            for step in range(1, 4):
                loss(scene, ddp, scene.rank, step).backward()
                scene.wait()
        except Exception as error:
            group.abort()
            return f"{type(error).__name__}: {error}"
        return "nothing"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU NCCL's watchdog ends the process")
def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    machine = here()
    found = spawn_ranks(
        2, _leave, machine, 60, deadline=180, may_die=[BAD], env=machine.environment(2)
    )
    assert "rank 1" in found[0].lower()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_nobody_outlives_a_rank_that_died_for_long() -> None:
    machine = here()
    found = spawn_ranks(
        2, _leave, machine, 6, deadline=120, may_die=[0, 1], env=machine.environment(2)
    )
    assert found[0] is None or "nothing" not in found[0]
