"""Weights when parameters freeze, thaw, or are cleared apart from the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.groups import Group
from paceline.testing import run_ranks

from .test_weights import backward, fail_in_backward, line


@pytest.mark.parametrize("thaws", [True, False])
@pytest.mark.parametrize("kept", [8.0, 0.0])
def test_weighted_micro_steps_around_freezing_or_thawing_keep_what_was_held(
    thaws: bool, kept: float
) -> None:
    def one_rank(group: Group) -> list[float]:
        model = nn.Sequential(line(), line())
        model[0].weight.requires_grad_(not thaws)
        ddp = DDP(model, process_group=group)
        backward(ddp, kept)  # an average, which is kept
        with ddp.no_sync():
            backward(ddp, 2.0, weight=1.0)
        model[0].weight.requires_grad_(thaws)
        backward(ddp, 4.0 + 2 * group.rank(), weight=1.0)
        return [p.grad.item() for p in model.parameters()]

    # the second: what was kept, and the mean of 2 and 2, 4 and 6
    expected = [(4.0 + 6.0) / 4 if thaws else kept + 2.0, kept + 3.5]
    assert run_ranks(2, one_rank) == [expected] * 2


def freeze_only(model: nn.Sequential, number: int) -> None:
    """Train the other layers from now on."""
    for n, layer in enumerate(model):
        layer.weight.requires_grad_(n != number)


@pytest.mark.parametrize("kept", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_parameter_frozen_between_weighted_micro_steps_keeps_the_mean_of_this_rank(
    dtype: torch.dtype, kept: float | None
) -> None:
    def one_rank(group: Group) -> tuple[list[float], list[float]]:
        rank, model = group.rank(), nn.Sequential(line(), line()).to(dtype)
        ddp = DDP(model, process_group=group)
        if kept is not None:
            backward(ddp, kept)
        with ddp.no_sync():
            backward(ddp, 1.0 + 2 * rank, weight=4.0)
            backward(ddp, 2.0 + 2 * rank, weight=12.0)
        freeze_only(model, 0)
        backward(ddp, 2.0, weight=16.0)
        at_rest = model[0].weight.grad.item()
        model[0].weight.requires_grad_(True)
        backward(ddp, 2.0, weight=16.0)  # averages what is held with what comes
        return [at_rest, model[0].weight.grad.item()], [model[1].weight.grad.item()]

    before = kept or 0.0
    for rank, (first, second) in enumerate(run_ranks(2, one_rank)):
        assert first == pytest.approx([before + 1.75 + 2 * rank, before + 2.75 + 2.0], rel=1e-3)
        assert second == pytest.approx([before + 2.375 + 2.0], rel=1e-3)


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_what_a_thawed_parameter_held_is_kept_beside_the_weighted_mean(
    weighted: bool, cleared: bool
) -> None:
    def one_rank(group: Group) -> list[float]:
        model = nn.Sequential(line(), line(), line())
        ddp = DDP(model, process_group=group)
        backward(ddp, 8.0, weight=1.0)
        freeze_only(model, 0)
        with ddp.no_sync():
            backward(ddp, 2.0, weight=4.0 if weighted else None)
        if cleared:
            ddp.zero_grad()
        freeze_only(model, 1)
        backward(ddp, 4.0 + 2 * group.rank(), weight=4.0)
        return [layer.weight.grad and layer.weight.grad.item() for layer in model]

    count = 4.0 if weighted else 1.0
    mean = 5.0 if cleared else (5.0 * 4 + 2.0 * count) / (4 + count)
    thawed = 5.0 if cleared else 8.0 + 5.0 * 4 / (4 + count)
    expected = [5.0, None, 5.0] if cleared else [thawed, 10.0, 8.0 + mean]
    assert run_ranks(2, one_rank) == [pytest.approx(expected)] * 2


def test_halves_of_a_model_that_take_turns_count_their_own_samples() -> None:
    def one_rank(group: Group) -> list[float]:
        rank, model = group.rank(), nn.Sequential(line(), line())
        ddp = DDP(model, process_group=group)
        backward(ddp, 8.0)
        freeze_only(model, 1)
        with ddp.no_sync():
            backward(ddp, 1.0 + 2 * rank, weight=4.0)
        freeze_only(model, 0)
        backward(ddp, 2.0 + 2 * rank, weight=4.0)
        return [layer.weight.grad.item() for layer in model]

    assert run_ranks(2, one_rank) == [[9.0, 11.0], [11.0, 11.0]]


def layers(count: int) -> nn.Sequential:
    """Of one weight each."""
    return nn.Sequential(*(line() for _ in range(count)))


def held(model: nn.Sequential) -> list[float | None]:
    """What ``.grad`` of each layer holds."""
    grads = [layer.weight.grad for layer in model]
    return [None if grad is None else grad.item() for grad in grads]


def clear(layer: nn.Linear, in_place: bool = False) -> None:
    """As an optimizer for this layer alone does."""
    if in_place:
        layer.weight.grad.zero_()
    else:
        layer.weight.grad = None


def with_a_part_at_rest(group: Group, weight: float | None) -> tuple[nn.Sequential, DDP]:
    """A model whose first layer is frozen and holds 8, while a pass has given the second one 2."""
    model = layers(2)
    ddp = DDP(model, process_group=group)
    backward(ddp, 8.0, weight=1.0)
    clear(model[1])
    freeze_only(model, 0)
    with ddp.no_sync():
        backward(ddp, 2.0, weight=weight)
    return model, ddp


@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_thawed_parameter_held_may_be_cleared_until_its_backward(in_place: bool) -> None:
    def one_rank(group: Group) -> list[float | None]:
        model, ddp = with_a_part_at_rest(group, 4.0)
        model[0].weight.requires_grad_(True)
        ddp.samples(4)
        out = ddp(torch.full((1, 1), 5.0))
        assert held(model)[0] == 8.0  # the user sees it
        clear(model[0], in_place)
        out.sum().backward()
        return held(model)

    assert run_ranks(2, one_rank) == [[5.0 * 4 / 8, (2.0 * 4 + 5.0 * 4) / 8]] * 2


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_what_a_thawed_parameter_held_stays_when_the_others_are_cleared(
    late: bool, weighted: bool, in_place: bool
) -> None:
    def one_rank(group: Group) -> list[float | None]:
        model, ddp = with_a_part_at_rest(group, 4.0 if weighted else None)
        if not late:
            clear(model[1], in_place)
        model[0].weight.requires_grad_(True)
        ddp.samples(4)
        out = ddp(torch.full((1, 1), 5.0))
        if late:
            clear(model[1], in_place)
        out.sum().backward()
        return held(model)

    assert run_ranks(2, one_rank) == [[8.0 + 5.0, 5.0]] * 2


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("passes", [1, 2])
def test_what_a_thawed_parameter_held_is_no_part_of_plain_passes(passes: int, used: bool) -> None:
    def one_rank(group: Group) -> list[float | None]:
        model = layers(2)
        ddp = DDP(model, process_group=group)
        backward(ddp, 8.0, weight=1.0 if used else None)
        clear(model[1])
        freeze_only(model, 0)
        with ddp.no_sync():
            backward(ddp, 2.0)
            model[0].weight.requires_grad_(True)
            for _ in range(passes - 1):
                backward(ddp, 3.0)
        backward(ddp, 5.0, weight=4.0)
        return held(model)

    plain = 3.0 * (passes - 1)
    expected = [8.0 + (plain + 20.0) / (passes + 4), (2.0 + plain + 20.0) / (passes + 4)]
    assert run_ranks(2, one_rank) == [pytest.approx(expected)] * 2


@pytest.mark.parametrize("weight", [4.0, None])
def test_passes_of_parameters_that_all_froze_do_not_count(weight: float | None) -> None:
    def one_rank(group: Group) -> list[float | None]:
        model = layers(2)
        ddp = DDP(model, process_group=group)
        backward(ddp, 8.0, weight=1.0)
        freeze_only(model, 1)
        with ddp.no_sync():
            backward(ddp, 1.0, weight=weight)
        freeze_only(model, 0)
        backward(ddp, 5.0, weight=4.0)
        return held(model)

    assert run_ranks(2, one_rank) == [[9.0, 13.0]] * 2


@pytest.mark.parametrize("freezes", [True, False])
def test_samples_count_on_a_rank_whose_graph_did_not_reach_what_is_trained_on(
    freezes: bool,
) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = layers(2)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.parts[0](x) + self.parts[1](x) if both else self.parts[0](x)

    def one_rank(group: Group) -> float:
        model = Either()
        ddp = DDP(model, process_group=group, find_unused_parameters=True)
        with ddp.no_sync(), ddp.samples(4):
            ddp(torch.full((1, 1), 2.0), group.rank() == 1).sum().backward()
        model.parts[0].weight.requires_grad_(not freezes)
        with ddp.samples(4):
            ddp(torch.full((1, 1), 6.0), True).sum().backward()
        return model.parts[1].weight.grad.item()

    assert run_ranks(2, one_rank) == [(2.0 * 4 + 6.0 * 8) / 16] * 2


@pytest.mark.parametrize(("weighted", "in_place"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("freezes", [True, False])
def test_one_parameter_that_is_cleared_does_not_get_back_what_it_held_before(
    freezes: bool, weighted: bool, in_place: bool
) -> None:
    def one_rank(group: Group) -> list[float | None]:
        model = layers(2)
        ddp = DDP(model, process_group=group)
        backward(ddp, 8.0, weight=1.0)
        clear(model[1])
        with ddp.no_sync():
            backward(ddp, 5.0, weight=4.0 if weighted else None)
        clear(model[0], in_place)
        model[0].weight.requires_grad_(not freezes)
        backward(ddp, 5.0, weight=4.0)
        return held(model)

    cleared: float | None = (5.0 * 4) / (8 if weighted else 5)
    if freezes:
        cleared = 0.0 if in_place else None
    assert run_ranks(2, one_rank) == [[cleared, 5.0]] * 2


class Beside(nn.Module):
    """Two layers, each of which gets its own input as gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[0](x[:, :1]) + self.parts[1](x[:, 1:])


@pytest.mark.parametrize("dead_on", [(0,), (0, 1)])
@pytest.mark.parametrize("averaged_by", ["backward", "sync_grads"])
def test_a_gradient_of_zero_that_is_clipped_is_not_taken_for_one_that_was_cleared(
    averaged_by: str, dead_on: tuple[int, ...]
) -> None:
    def one_rank(group: Group) -> list[float | None]:
        def step(first: float, second: float, weight: float) -> None:
            ddp.samples(weight)
            ddp(torch.tensor([[first, second]])).sum().backward()

        model = Beside()
        ddp = DDP(model, process_group=group)
        step(8.0, 8.0, 1)
        with ddp.no_sync():
            step(0.0 if group.rank() in dead_on else 3.0, 3.0, 4)
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        if averaged_by == "backward":
            step(0.0, 3.0, 4)
        else:
            ddp.sync_grads()
        return held(model.parts)

    count = 16 if averaged_by == "backward" else 8
    expected = [8.0 + 3.0 * 4 * (2 - len(dead_on)) / count, 11.0]
    assert run_ranks(2, one_rank) == [pytest.approx(expected)] * 2


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("weight", [4.0, None])
@pytest.mark.parametrize("late", [True, False])
def test_what_a_frozen_parameter_still_holds_keeps_no_passes_that_were_cleared(
    late: bool, weight: float | None, in_place: bool
) -> None:
    def one_rank(group: Group) -> float:
        model = layers(2)
        ddp = DDP(model, process_group=group)
        backward(ddp, 8.0, weight=1.0)
        ddp.zero_grad()
        with ddp.no_sync():
            backward(ddp, 1.0 + 2 * group.rank(), weight=weight)
        if not late:
            clear(model[1], in_place)
        freeze_only(model, 0)
        ddp.samples(4)
        out = ddp(torch.full((1, 1), 5.0))
        if late:
            clear(model[1], in_place)
        out.sum().backward()
        return model[1].weight.grad.item()

    assert run_ranks(2, one_rank) == [5.0] * 2


def test_a_count_is_taken_after_passes_that_froze_or_were_cleared_without_one() -> None:
    def one_rank(group: Group) -> float:
        model = layers(2)
        ddp = DDP(model, process_group=group)
        backward(ddp, 8.0)
        with ddp.no_sync():
            backward(ddp, 1.0)  # on top of an average, which nobody kept
        freeze_only(model, 0)
        out = ddp(torch.full((1, 1), 5.0))
        clear(model[1])
        ddp.samples(4)
        out.sum().backward()
        return model[1].weight.grad.item()

    assert run_ranks(2, one_rank) == [5.0] * 2


@pytest.mark.parametrize("between", [0, 1])
@pytest.mark.parametrize("kept", [None, 8.0])
def test_a_parameter_that_thaws_before_the_average_has_its_samples_in_it(
    kept: float | None, between: int
) -> None:
    def one_rank(group: Group) -> list[float | None]:
        model = layers(2)
        ddp = DDP(model, process_group=group)
        if kept is not None:
            backward(ddp, kept)
        with ddp.no_sync():
            backward(ddp, 2.0, weight=4.0)
            freeze_only(model, 0)
            for _ in range(between):
                backward(ddp, 2.0, weight=4.0)
            ddp(torch.ones(1, 1))
        model[0].weight.requires_grad_(True)
        backward(ddp, 4.0, weight=4.0)
        return held(model)

    count, before = 8 + 4 * between, kept or 0.0
    expected = [before + (8 + 16) / count, before + (8 + 8 * between + 16) / count]
    assert run_ranks(2, one_rank) == [pytest.approx(expected)] * 2


@pytest.mark.parametrize("weight", [4.0, None])
@pytest.mark.parametrize("warm", [0, 1, 3])
def test_gradients_that_hooks_use_up_leave_no_weight_behind(
    warm: int, weight: float | None
) -> None:
    def use_up(param: nn.Parameter) -> None:
        param.grad = None  # as an optimizer that steps in backward

    def one_rank(group: Group) -> list[float | None]:
        model = layers(4)
        ddp = DDP(model, process_group=group, bucket_cap_mb=1e-6)
        for _ in range(warm):
            backward(ddp, 8.0, weight=1.0)
            ddp.zero_grad()
        handles = [p.register_post_accumulate_grad_hook(use_up) for p in model.parameters()]
        with ddp.no_sync():
            backward(ddp, 1.0, weight=weight)
        for handle in handles:
            handle.remove()
        backward(ddp, 5.0, weight=4.0)
        return held(model)

    assert run_ranks(2, one_rank) == [[5.0] * 4] * 2


def test_plain_passes_that_were_cleared_do_not_count_though_no_pass_was_weighted_yet() -> None:
    def one_rank(group: Group) -> list[float | None]:
        model = layers(2)
        ddp = DDP(model, process_group=group)
        with ddp.no_sync():
            backward(ddp, 9.0)
            ddp.zero_grad()
            backward(ddp, 2.0)
        backward(ddp, 5.0, weight=4.0)
        return held(model)

    assert run_ranks(2, one_rank) == [pytest.approx([(2.0 + 20.0) / 5] * 2)] * 2


def test_what_was_held_outlives_gradients_of_zero_and_a_backward_that_failed() -> None:
    def one_rank(group: Group) -> list[float | None]:
        model = layers(1)
        ddp = DDP(model, process_group=group)
        backward(ddp, 8.0, weight=1.0)
        with ddp.no_sync():
            backward(ddp, 0.0)
            with ddp.samples(1):
                fail_in_backward(ddp)
        backward(ddp, 3.0, weight=1.0)
        return held(model)

    assert run_ranks(2, one_rank) == [[8.0 + 3.0 / 2]] * 2
