"""Weights, accumulation, and ranks that run out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline import Join
from paceline._reducer import runner
from paceline.errors import EarlyTerminationError
from paceline.hooks import CodecHook, Fp16
from paceline.optim import ZeroRedundancyOptimizer
from tests.ddp.toys import TINY, assert_same, grads, stack, weights

from .scene import Scene, assert_close, on_ranks

EXACT = {"rtol": 1e-11, "atol": 1e-13}
SIZES = (5, 2, 7, 1)  # samples of each rank in a step


def batches(scene: Scene, counts: Sequence[int], step: int = 0) -> list[Tensor]:
    return [scene.data(n, 3, seed=10 * step + rank) for rank, n in enumerate(counts)]


def loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def grads_alone(scene: Scene, model: nn.Module, parts: Sequence[Tensor]) -> Any:
    model = scene.place(model)
    loss(model, torch.cat(list(parts))).backward()
    return grads(model)


@on_ranks
@pytest.mark.parametrize("views", [True, False], ids=["views", "no views"])
def test_with_samples_the_gradient_is_the_mean_over_all_samples(scene: Scene, views: bool) -> None:
    model = stack(3, 5, 2)
    ddp = DDP(
        scene.place(model),
        process_group=scene.group,
        bucket_cap_mb=TINY,
        gradient_as_bucket_view=views,
    )
    for step in range(4):
        sizes = [SIZES[(rank + step) % 4] for rank in range(scene.size)]
        parts = batches(scene, sizes, step)
        ddp.zero_grad()
        with ddp.samples(len(parts[scene.rank])):
            loss(ddp, parts[scene.rank]).backward()
        assert_same(grads(ddp), grads_alone(scene, model, parts), **EXACT)
        scene.assert_same_bits([p.grad for p in ddp.parameters()])


@on_ranks
def test_a_rank_of_weight_zero_changes_nothing(scene: Scene) -> None:
    model = stack(3, 5, 2)
    ddp = DDP(scene.place(model), process_group=scene.group)
    for step in range(3):
        parts = batches(scene, SIZES[: scene.size], step)
        ddp.zero_grad()
        ddp.samples(0 if scene.rank == 0 else len(parts[scene.rank]))
        loss(ddp, parts[scene.rank]).backward()
        assert_same(grads(ddp), grads_alone(scene, model, parts[1:]), **EXACT)


@on_ranks
def test_weighted_and_plain_passes_may_take_turns(scene: Scene) -> None:
    model = stack(3, 5, 2)
    ddp = DDP(scene.place(model), process_group=scene.group)
    for step in range(6):
        weighted = step % 3 == 1
        parts = batches(scene, SIZES[: scene.size] if weighted else [4] * scene.size, step)
        ddp.zero_grad()
        if weighted:
            ddp.samples(len(parts[scene.rank]))
        loss(ddp, parts[scene.rank]).backward()
        assert_same(grads(ddp), grads_alone(scene, model, parts), **EXACT)


@on_ranks
def test_weighted_passes_that_are_cleared_after_one_that_failed_do_not_come_back(
    scene: Scene,
) -> None:
    def fail(_grad: Tensor) -> None:
        raise ArithmeticError

    model = stack(3, 5, 2)
    ddp = DDP(scene.place(model), process_group=scene.group)
    for step in range(50):  # on a GPU a thread of autograd's may be the one that tells
        parts = batches(scene, SIZES[: scene.size], step)
        mine = parts[scene.rank]
        with ddp.samples(len(mine)):
            with ddp.no_sync():
                loss(ddp, mine + 1).backward()
                failing = mine.clone().requires_grad_()
                failing.register_hook(fail)
                with pytest.raises(ArithmeticError):
                    loss(ddp, failing).backward()
            ddp.zero_grad()
            loss(ddp, mine).backward()
        assert_same(grads(ddp), grads_alone(scene, model, parts), **EXACT)
        ddp.zero_grad()


@on_ranks(cuda=True)
def test_a_failure_is_raised_once_the_thread_that_ran_the_pass_has_let_go_of_it(
    scene: Scene,
) -> None:
    call, holders = runner.call_after_backward, list[threading.Thread]()
    went_on = threading.Event()

    def hold(held: list[object]) -> None:
        went_on.wait(0.5)  # it does not, when it waits for us
        held.clear()

    def call_and_hold(ending: Any) -> None:
        call(ending)
        holders.append(threading.Thread(target=hold, args=([ending],)))
        holders[-1].start()

    def fail(_grad: Tensor) -> None:
        raise ArithmeticError

    model = stack(3, 5, 2)
    ddp = DDP(scene.place(model), process_group=scene.group)
    parts = batches(scene, SIZES[: scene.size])
    mine = parts[scene.rank]
    with ddp.samples(len(mine)):
        with ddp.no_sync():
            loss(ddp, mine + 1).backward()
            failing = mine.clone().requires_grad_()
            failing.register_hook(fail)
            failed = loss(ddp, failing)
            runner.call_after_backward = call_and_hold
            try:
                with pytest.raises(ArithmeticError):
                    failed.backward()
            finally:
                runner.call_after_backward = call
        ddp.zero_grad()
        went_on.set()
        for holder in holders:
            holder.join()
        loss(ddp, mine).backward()
    assert len(holders) == 1
    assert_same(grads(ddp), grads_alone(scene, model, parts), **EXACT)


@on_ranks
@pytest.mark.parametrize("clears", [True, False], ids=["set to None", "zeroed"])
def test_accumulated_weighted_passes_are_one_mean(scene: Scene, clears: bool) -> None:
    model = stack(3, 5, 2)
    ddp = DDP(scene.place(model), process_group=scene.group)
    for step in range(3):
        everything: list[Tensor] = []
        ddp.zero_grad(set_to_none=clears)
        for micro in range(3):
            sizes = [SIZES[(rank + micro) % 4] for rank in range(scene.size)]
            parts = batches(scene, sizes, 10 * step + micro)
            everything += parts
            with ddp.accumulate(3) as last, ddp.samples(len(parts[scene.rank])):
                loss(ddp, parts[scene.rank]).backward()
            assert last == (micro == 2)
        assert_same(grads(ddp), grads_alone(scene, model, everything), **EXACT)


@on_ranks
def test_passes_inside_no_sync_gather_and_the_next_averages_their_sum(scene: Scene) -> None:
    def step_loss(model: Any, rank: int, step: int) -> Tensor:
        return loss(model, scene.data(4, 3, seed=10 * step + rank))

    model = stack(3, 5, 2)
    ddp = DDP(scene.place(model), process_group=scene.group, bucket_cap_mb=TINY)
    for start in (0, 3, 6):
        ddp.zero_grad()
        with ddp.no_sync():
            step_loss(ddp, scene.rank, start).backward()
            step_loss(ddp, scene.rank, start + 1).backward()
        step_loss(ddp, scene.rank, start + 2).backward()
        expected = scene.mean_grads(
            model, lambda m, r, s=start: sum(step_loss(m, r, s + i) for i in range(3))
        )
        assert_same(grads(ddp), expected, **EXACT)


@on_ranks
def test_what_gathered_is_averaged_without_a_backward_pass(scene: Scene) -> None:
    def one(model: Any, rank: int) -> Tensor:
        return loss(model, scene.data(4, 3, seed=rank))

    model = stack(3, 5, 2)
    ddp = DDP(scene.place(model), process_group=scene.group)
    for _ in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            one(ddp, scene.rank).backward()
        ddp.sync_grads()
        assert_same(grads(ddp), scene.mean_grads(model, one), **EXACT)


# Join.


def counts(scene: Scene) -> list[int]:
    """How many batches each rank has."""
    return [2 + 3 * (rank % 2) + rank for rank in range(scene.size)]


def trained_on_the_union(scene: Scene, model: nn.Module, make: Any) -> dict[str, Tensor]:
    """One process that has in each step the batches of the ranks that still have one."""
    model = scene.place(model)
    optimizer = make(model.parameters())
    for step in range(max(counts(scene))):
        parts = [
            scene.data(SIZES[(rank + step) % 4], 3, seed=10 * step + rank)
            for rank, count in enumerate(counts(scene))
            if step < count
        ]
        optimizer.zero_grad()
        loss(model, torch.cat(parts)).backward()
        optimizer.step()
    return weights(model)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@on_ranks
def test_ranks_that_run_out_end_with_the_model_of_one_process_on_all_data(scene: Scene) -> None:
    model = stack(3, 5, 2)
    ddp = DDP(scene.place(model), process_group=scene.group, bucket_cap_mb=TINY)
    optimizer = sgd(ddp.parameters())
    with ddp.join():
        for step in range(counts(scene)[scene.rank]):
            x = scene.data(SIZES[(scene.rank + step) % 4], 3, seed=10 * step + scene.rank)
            optimizer.zero_grad()
            with ddp.samples(len(x)):
                loss(ddp, x).backward()
            optimizer.step()
    found = weights(ddp)
    scene.assert_same_bits(found)
    assert_same(found, trained_on_the_union(scene, model, sgd), **EXACT)


@on_ranks
def test_ranks_with_sharded_optimizers_may_run_out(scene: Scene) -> None:
    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.05)

    model = stack(3, 5, 2)
    ddp = DDP(scene.place(model), process_group=scene.group)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, ddp=ddp, lr=0.05)
    with Join([ddp, optimizer]):
        for step in range(counts(scene)[scene.rank]):
            x = scene.data(SIZES[(scene.rank + step) % 4], 3, seed=10 * step + scene.rank)
            optimizer.zero_grad()
            with ddp.samples(len(x)):
                loss(ddp, x).backward()
            optimizer.step()
    found = weights(ddp)
    scene.assert_same_bits(found)
    assert_same(found, trained_on_the_union(scene, model, adam), rtol=1e-8, atol=1e-10)


@on_ranks
@pytest.mark.parametrize("by_all", [True, False], ids=["all ranks", "those that have inputs"])
def test_without_weights_the_mean_is_over_all_ranks_or_those_with_inputs(
    scene: Scene, by_all: bool
) -> None:
    model = stack(3, 2)
    ddp = DDP(scene.place(model), process_group=scene.group)
    steps = 2 if scene.rank else 4
    with ddp.join(divide_by_initial_world_size=by_all):
        for step in range(steps):
            ddp.zero_grad()
            loss(ddp, scene.data(4, 3, seed=10 * step + scene.rank)).backward()
    alone = scene.place(model)
    loss(alone, scene.data(4, 3, seed=30)).backward()
    if scene.rank == 0:  # the only one with inputs in the last step
        expected = alone.weight.grad if hasattr(alone, "weight") else alone[0].weight.grad
        share = scene.size if by_all else 1
        assert_close(ddp.module[0].weight.grad, expected / share, **EXACT)


@on_ranks
def test_all_ranks_raise_when_one_runs_out_and_that_is_wanted(scene: Scene) -> None:
    with scene.new_group() as group:
        ddp = DDP(scene.place(stack(3, 2)), process_group=group)
        try:
            with ddp.join(throw_on_early_termination=True):
                for step in range(2 if scene.rank == 1 else 5):
                    loss(ddp, scene.data(4, 3, seed=10 * step + scene.rank)).backward()
        except EarlyTerminationError:
            raised = True
        else:
            raised = False
        assert scene.gathered(raised) == [True] * scene.size


@on_ranks
def test_codecs_count_weights_too(scene: Scene) -> None:
    model = stack(3, 5, 2)
    ddp = DDP(scene.place(model), process_group=scene.group)
    CodecHook(Fp16(), small=0).register(ddp)
    for step in range(3):
        parts = batches(scene, SIZES[: scene.size], step)
        ddp.zero_grad()
        with ddp.samples(len(parts[scene.rank])):
            loss(ddp, parts[scene.rank]).backward()
        assert_same(grads(ddp), grads_alone(scene, model, parts), rtol=2e-3, atol=2e-4)
