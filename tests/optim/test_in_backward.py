"""InBackward: the step is the end of the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline.errors import OptimizerArgumentError, OptimizerTypeError
from paceline.groups import Group
from paceline.optim import InBackward
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import TINY, data, stack, weights


def loss(model: Any, rank: int, step: int = 0) -> Tensor:
    return model(data(3, 3, seed=10 * step + rank)).square().sum()


def by_hand(ranks: int, steps: int, max_norm: float | None = None, **settings: Any) -> Any:
    """Weights and norms when one process does all ranks' work."""
    model, norms = stack(3, 5, 4), []
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss(model, r, step) for r in range(ranks)) / ranks).backward()  # type: ignore[union-attr]
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return weights(model), norms


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_backward_pass_averages_clips_and_steps(ranks: int, max_norm: float | None) -> None:
    def one_rank(group: Group) -> Any:
        ddp = DDP(stack(3, 5, 4), process_group=group, bucket_cap_mb=TINY)
        optimizer = InBackward(ddp, torch.optim.AdamW, lr=0.1, max_norm=max_norm)
        norms = []
        for step in range(3):
            loss(ddp, group.rank(), step).backward()
            assert all(p.grad is None for p in ddp.parameters())
            if optimizer.norm is not None:
                norms.append(float(optimizer.norm))
        assert optimizer.steps == 3
        return weights(ddp), norms

    expected = by_hand(ranks, 3, max_norm, lr=0.1)
    for found in run_ranks(ranks, one_rank):
        assert_close(found, expected)
        if max_norm is not None:
            assert max(found[1]) > max_norm, "there was something to clip"


def test_a_loop_that_still_steps_and_zeroes_changes_nothing() -> None:
    def one_rank(group: Group) -> Any:
        ddp = DDP(stack(3, 5, 4), process_group=group)
        optimizer = InBackward(ddp, torch.optim.AdamW, lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss(ddp, group.rank(), step).backward()
            optimizer.step()
        return weights(ddp)

    for found in run_ranks(2, one_rank):
        assert_close(found, by_hand(2, 3, lr=0.1)[0])


def test_passes_that_only_gather_do_not_step() -> None:
    def one_rank(group: Group) -> Any:
        ddp = DDP(stack(3, 5, 4), process_group=group)
        optimizer = InBackward(ddp, torch.optim.SGD, lr=0.1)
        before = weights(ddp)
        with ddp.no_sync():
            loss(ddp, group.rank(), 0).backward()
        assert_close(weights(ddp), before)
        assert optimizer.steps == 0
        loss(ddp, group.rank(), 1).backward()
        return weights(ddp)

    single = stack(3, 5, 4)
    (sum(loss(single, r, s) for r in range(2) for s in range(2)) / 2).backward()  # type: ignore[union-attr]
    torch.optim.SGD(single.parameters(), lr=0.1).step()
    for found in run_ranks(2, one_rank):
        assert_close(found, weights(single))


def test_a_scheduler_sets_the_rate_and_does_not_warn() -> None:
    def one_rank(group: Group) -> list[float]:
        ddp = DDP(stack(3, 5, 4), process_group=group)
        optimizer = InBackward(ddp, torch.optim.SGD, lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        rates = []
        for step in range(3):
            loss(ddp, group.rank(), step).backward()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert run_ranks(1, one_rank) == [[0.05, 0.025, 0.0125]]


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    def one_rank(group: Group) -> Any:
        found = []
        for stop in (False, True):
            ddp = DDP(stack(3, 5, 4), process_group=group)
            optimizer = InBackward(ddp, torch.optim.AdamW, lr=0.1)
            for step in range(4):
                if stop and step == 2:
                    model, saved = ddp.module, optimizer.state_dict()
                    optimizer.detach()
                    ddp = DDP(model, process_group=group)
                    optimizer = InBackward(ddp, torch.optim.AdamW, lr=0.7)
                    optimizer.load_state_dict(saved)
                loss(ddp, group.rank(), step).backward()
            found.append(weights(ddp))
        return found

    for straight, resumed in run_ranks(2, one_rank):
        assert_close(resumed, straight, rtol=0, atol=0)


def test_a_detached_optimizer_leaves_the_averages_alone() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(stack(3, 5, 4), process_group=group)
        before = weights(ddp)
        InBackward(ddp, torch.optim.SGD, lr=0.1).detach()
        loss(ddp, group.rank()).backward()
        assert_close(weights(ddp), before)
        assert all(p.grad is not None for p in ddp.parameters())

    run_ranks(2, one_rank)


def test_uneven_weights_and_uneven_inputs_step_on_every_rank_alike() -> None:
    def one_rank(group: Group) -> Any:
        ddp = DDP(stack(3, 5, 4), process_group=group)
        InBackward(ddp, torch.optim.SGD, lr=0.1, max_norm=10.0)
        with ddp.join():
            for step in range(1 + group.rank()):
                with ddp.samples(1 + group.rank()):
                    loss(ddp, group.rank(), step).backward()
        return weights(ddp)

    first, second = run_ranks(2, one_rank)
    assert_close(first, second, rtol=0, atol=0)


def scaled(meeting: Meeting, backend: str) -> Any:
    """Three passes with a scaler, the second one with an infinite gradient on rank 1."""
    with meeting.new_group(backend) as group:
        ddp = DDP(stack(3, 5, 4), process_group=group)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        InBackward(ddp, torch.optim.AdamW, lr=0.1, max_norm=0.5, scaler=scaler)
        scales = []
        for step in (0, "overflow", 1):
            value = loss(ddp, group.rank(), 0 if step == "overflow" else step)  # type: ignore[arg-type]
            if step == "overflow" and group.rank() == 1:
                value = value * float("inf")
            scaler.scale(value).backward()
            scaler.update()
            scales.append(scaler.get_scale())
        return weights(ddp), scales


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_scaler_unscales_and_leaves_infinite_steps_out(backend: str) -> None:
    for found, scales in spawn_ranks(2, scaled, backend):
        assert_close(found, by_hand(2, 2, 0.5, lr=0.1)[0])
        assert scales == [1024.0, 512.0, 512.0]


def test_bad_arguments_are_refused_before_anything_is_done() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(stack(3, 5, 4), process_group=group)
        with pytest.raises(OptimizerTypeError, match="DistributedDataParallel"):
            InBackward(ddp.module, torch.optim.SGD, lr=0.1)  # type: ignore[arg-type]
        with pytest.raises(OptimizerTypeError, match="class of optimizers"):
            InBackward(ddp, "SGD", lr=0.1)  # type: ignore[arg-type]
        with pytest.raises(OptimizerArgumentError, match="max_norm"):
            InBackward(ddp, torch.optim.SGD, lr=0.1, max_norm=0.0)
        assert not ddp.replica.reducer.observers.see_gradients

    run_ranks(1, one_rank)
