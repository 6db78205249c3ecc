"""A gradient scaler in a step: the same as in a loop by hand, on ranks that are threads.

The functions that are compiled are plain ones; what the compiler makes of them is seen in
``test_step_processes.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.amp import GradScaler

import paceline
from paceline.compiled import Step, train_step
from paceline.errors import ModuleArgumentError, RanksFailedError
from paceline.groups import Group
from paceline.testing import run_ranks

from .steps import (
    BAD,
    OPTIMIZERS,
    STEPS,
    Pair,
    Scaled,
    assert_alike,
    batch,
    inputs_of,
    loss_of,
    scaler,
    seeded,
)
from .test_step import two


@pytest.fixture(autouse=True)
def _untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "_compile", lambda self, function: function)


@pytest.mark.parametrize("optimizer", ["sgd", "dampened", "adam", "adamw"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_with_a_scaler_is_what_a_loop_by_hand_does(ranks: int, optimizer: str) -> None:
    def one_rank(group: Group) -> Any:
        pair = Scaled(two(group) if ranks == 2 else [group, group], optimizer=optimizer)
        return pair.train(), pair.states, pair.step.reason

    for scales, (found, expected), reason in run_ranks(ranks, one_rank):
        assert reason == ""
        if ranks == 2:
            assert scales[1] == scales[0] / 2  # the first step was skipped on both ranks
        assert_alike(found, expected, 1e-5 if "adam" in optimizer else 1e-6)


def test_gradients_are_clipped_when_they_have_lost_their_scale() -> None:
    def one_rank(group: Group) -> Any:
        pair = Scaled(two(group), optimizer="sgd", max_norm=0.05)
        pair.train(max_norm=0.05)
        norm = pair.step.grad_norm
        pair.step(*inputs_of(pair.rank, BAD[0]))
        assert pair.step.grad_norm is not None
        return pair.states, norm, pair.step.grad_norm

    for (found, expected), norm, bad in run_ranks(2, one_rank):
        assert_alike(found, expected)
        assert 0.05 < norm < 100
        assert not bad.isfinite()


def test_several_calls_make_one_scaled_step() -> None:
    def one_rank(group: Group) -> Any:
        pair = Scaled(two(group), optimizer="momentum", accumulate=2)
        for number in range(STEPS):
            inputs = inputs_of(pair.rank, number)
            pair.step(*inputs)
            with pair.eager.accumulate(2) as last:
                pair.eager_scaled(*inputs, last=last)
            if last:
                pair.eager_optimizer.zero_grad()
        assert pair.own.get_scale() == pair.other.get_scale()
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected)


def test_averages_that_stay_in_grad_have_no_scale() -> None:
    def one_rank(group: Group) -> Any:
        pair = Scaled(two(group), optimizer="sgd", keep_grads=True)
        inputs = batch(pair.rank, 1)
        pair.step(*inputs)
        pair.eager_scaled(*inputs)
        own, other = pair.ddp.module.parameters(), pair.eager.module.parameters()
        return [p.grad for p in own], [p.grad for p in other]

    for found, expected in run_ranks(2, one_rank):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["dampened", "adamw"])
def test_parameters_that_only_another_rank_used_are_stepped_without_their_scale(
    optimizer: str,
) -> None:
    def one_rank(group: Group) -> Any:
        pair = Scaled(two(group), "branches", optimizer)
        for number in range(STEPS):
            inputs = (*inputs_of(pair.rank, number), (number + pair.rank) % 2 == 0)
            pair.step(*inputs)
            pair.eager_optimizer.zero_grad()
            pair.eager_scaled(*inputs)
        kept = [bool(pair.optimizer.state.get(p)) for p in pair.ddp.module.never.parameters()]
        return pair.states, kept

    for (found, expected), kept in run_ranks(2, one_rank):
        assert_alike(found, expected, 1e-5)
        assert kept == [False, False]


def test_optimizers_that_no_graph_can_hold_are_stepped_by_the_scaler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "rmsprop", lambda p: torch.optim.RMSprop(p, 0.01))

    def one_rank(group: Group) -> Any:
        pair = Scaled(two(group), optimizer="rmsprop", max_norm=0.05)
        pair.train(max_norm=0.05)
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected, 1e-5)


def test_steps_that_cannot_be_traced_are_scaled_in_eager_mode() -> None:
    def one_rank(group: Group) -> Any:
        pair = Scaled(two(group), optimizer="adamw")
        pair.step.reason = "it is told so"
        pair.train()
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected, 1e-5)


def test_a_scaler_that_is_not_enabled_changes_nothing() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), optimizer="sgd", scaler=GradScaler("cpu", enabled=False))
        for number in range(3):
            pair.step(*batch(pair.rank, number))
            pair.eager_step(*batch(pair.rank, number))
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected)


@pytest.mark.parametrize("other", [None, 2.0])
def test_ranks_with_different_scales_are_an_error_on_all(other: float | None) -> None:
    def one_rank(group: Group) -> Any:
        scale = 8.0 if group.rank() == 0 else other
        own = None if scale is None else GradScaler("cpu", init_scale=scale)
        pair = Pair([group, group], optimizer="sgd", scaler=own)
        with pytest.raises(ModuleArgumentError) as caught:
            pair.step(*batch(pair.rank, 0))
        return str(caught.value)

    for said in run_ranks(2, one_rank):
        assert f"from {other or 0:g} to 8 (0: no scaler)" in said


def test_float16_parameters_are_refused_with_torchs_sentence() -> None:
    def one_rank(group: Group) -> None:
        ddp = paceline.DistributedDataParallel(seeded("mlp").half(), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        train_step(ddp, optimizer, loss_of, scaler=scaler())

    with pytest.raises(RanksFailedError, match="Attempting to unscale FP16 gradients"):
        run_ranks(2, one_rank)
