"""Averagers: when parameters are averaged, over whom, and that they stay where they are."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging import averagers as theirs
from torch.distributed.algorithms.model_averaging import (
    hierarchical_model_averager as theirs_hierarchical,
)

from paceline import Group, process_group
from paceline.errors import AveragingArgumentError
from paceline.optim import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)
from paceline.testing import Meeting, run_ranks, spawn_ranks


def param(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter with a gradient, so that averagers take it."""
    found = nn.Parameter(torch.full(shape or (2, 3), value, dtype=dtype))
    found.grad = torch.ones_like(found)
    return found


# -- which and where ------------------------------------------------------------------------------


def test_parameters_without_a_gradient_are_left_out() -> None:
    a, b, c = param(1), param(2), param(3)
    b.grad = None
    assert get_params_to_average([a, b, c]) == [a, c]
    assert get_params_to_average([{"params": [a, b]}, {"params": [c]}]) == [a, c]
    with pytest.raises(NotImplementedError, match=r"Parameter input of type .* is not supported"):
        get_params_to_average([torch.ones(2)])


def test_the_mean_reaches_every_rank_in_the_memory_of_its_parameters() -> None:
    def one_rank(group: Group) -> tuple[bool, list[Tensor]]:
        params = [
            param(group.rank(), dtype=torch.float32),
            param(group.rank() + 1, dtype=torch.bfloat16),
            param(group.rank() * 3, dtype=torch.float64),
            param(group.rank(), 0),
        ]
        before = [p.data_ptr() for p in params]
        average_parameters(iter(params), group)
        return before == [p.data_ptr() for p in params], [p.detach() for p in params]

    for stayed, found in run_ranks(3, one_rank):
        assert stayed
        expected = [1.0, 2.0, 3.0]
        for tensor, value in zip(found, expected, strict=False):
            assert torch.equal(tensor, torch.full_like(tensor, value))
        assert [t.dtype for t in found[:3]] == [torch.float32, torch.bfloat16, torch.float64]


def test_parameters_that_are_not_contiguous_or_are_complex_are_averaged() -> None:
    def one_rank(group: Group) -> list[Tensor]:
        turned = nn.Parameter(torch.arange(6.0).view(2, 3).t() * (group.rank() + 1))
        pairs = nn.Parameter(torch.full((2,), complex(group.rank(), 1)))
        average_parameters([turned, pairs], group)
        return [turned.detach(), pairs.detach()]

    for turned, pairs in run_ranks(2, one_rank):
        assert torch.equal(turned, torch.arange(6.0).view(2, 3).t() * 1.5)
        assert torch.equal(pairs, torch.full((2,), complex(0.5, 1)))


def test_no_parameters_need_no_collective() -> None:
    def one_rank(group: Group) -> int:
        calls: list[str] = []
        group.register_hooks(lambda call: calls.append(call.kind))
        average_parameters_or_parameter_groups([], group)
        return len(calls)

    assert run_ranks(2, one_rank) == [0, 0]


def test_none_means_the_current_group() -> None:
    def one_rank(group: Group) -> tuple[float, bool]:
        with process_group(group):
            held = param(group.rank())
            average_parameters([held], None)
            return held[0, 0].item(), PeriodicModelAverager(2).process_group is group

    assert run_ranks(3, one_rank) == [(1.0, True)] * 3


def test_without_any_group_the_default_is_asked_for() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        PeriodicModelAverager(2)


# -- when -----------------------------------------------------------------------------------------


def averaged_at(averager: ModelAverager, rank: int, steps: int) -> list[int]:
    """The steps after which a parameter was not what this rank set it to."""
    changed = []
    for step in range(steps):
        held = param(float(rank))
        averager.average_parameters([held])
        if not torch.equal(held, torch.full_like(held, float(rank))):
            changed.append(step)
    assert averager.step == steps
    return changed


@pytest.mark.parametrize("warmup", [0, 5, 12])
def test_a_period_begins_after_the_warmup(warmup: int) -> None:
    def one_rank(group: Group) -> list[int]:
        return averaged_at(PeriodicModelAverager(4, warmup, group), group.rank(), 20)

    assert run_ranks(2, one_rank) == [list(range(warmup, 20, 4))] * 2


def test_each_level_of_a_hierarchy_averages_over_its_neighbours() -> None:
    def one_rank(group: Group) -> list[float]:
        averager = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), 2, group)
        found = []
        for _ in range(9):
            held = param(float(group.rank()))
            averager.average_parameters(model_params(held))
            found.append(held[0, 0].item())
        assert averager.period_process_group_dict[4] is group
        assert averager.period_process_group_dict[2].size() == 2
        averager.shutdown()
        return found

    for rank, found in enumerate(run_ranks(4, one_rank)):
        own, pair, all_of_them = float(rank), rank // 2 * 2 + 0.5, 1.5
        every = [own, own, pair, own, all_of_them, own, pair, own, all_of_them]
        assert found == every


def model_params(held: nn.Parameter) -> Any:
    return [{"params": [held], "lr": 0.1}]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda g: PeriodicModelAverager(0, process_group=g), "``period`` must be a positive"),
        (lambda g: PeriodicModelAverager(2, -1, g), "``warmup_steps`` must be a non-negative"),
        (lambda g: HierarchicalModelAverager(None, 0, g), "must not be empty"),
        (lambda g: HierarchicalModelAverager({}, 0, g), "must not be empty"),
        (lambda g: HierarchicalModelAverager({0: 1}, 0, g), "must be a positive value"),
        (lambda g: HierarchicalModelAverager({2: 3}, 0, g), "must be equal to the size of arg"),
        (lambda g: HierarchicalModelAverager({2: 1}, -1, g), "must be a non-negative number"),
        (lambda g: HierarchicalModelAverager({4: 1, 2: 1}, 0, g), "must rise"),
        (lambda g: HierarchicalModelAverager({2: 3, 4: 1}, 0, g), "divide the 1 ranks evenly"),
    ],
)
def test_what_cannot_be_is_refused_at_once(make: Any, words: str) -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(AveragingArgumentError, match=words) as caught:
            make(group)
        assert isinstance(caught.value, ValueError)

    run_ranks(1, one_rank)


def test_a_period_of_one_is_warned_of() -> None:
    def one_rank(group: Group) -> None:
        with pytest.warns(UserWarning, match="When period is 1"):
            PeriodicModelAverager(1, process_group=group)
        with pytest.warns(UserWarning, match="When the maximum period"):
            HierarchicalModelAverager({1: 1}, process_group=group)

    run_ranks(1, one_rank)


# -- with torch's own -----------------------------------------------------------------------------


def compare_averagers(meeting: Meeting) -> list[tuple[Tensor, Tensor]]:
    """The same model under torch's averagers and ours, over torch's default group."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    levels = OrderedDict([(2, 2), (6, meeting.size)])
    pairs: list[tuple[Any, Any]] = [
        (theirs.PeriodicModelAverager(3, 2), PeriodicModelAverager(3, 2)),
        (
            theirs_hierarchical.HierarchicalModelAverager(levels, 1),
            HierarchicalModelAverager(levels, 1),
        ),
    ]
    found = []
    for reference, ours in pairs:
        assert isinstance(ours, theirs.ModelAverager)
        a, b = (noisy(meeting.rank) for _ in range(2))
        for _ in range(14):
            for held, averager in ((a, reference), (b, ours)):
                averager.average_parameters([held])
                with torch.no_grad():
                    held.add_(held, alpha=0.1 * meeting.rank)
        assert reference.step == ours.step
        found.append((a.detach(), b.detach()))
    dist.destroy_process_group()
    return found


def noisy(rank: int) -> nn.Parameter:
    held = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(rank)))
    held.grad = torch.ones_like(held)
    return held


def test_torchs_averagers_and_ours_give_the_same_numbers_over_gloo() -> None:
    for found in spawn_ranks(4, compare_averagers):
        for reference, ours in found:
            torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-6)


def average_outside(meeting: Meeting) -> float:
    dist.init_process_group("gloo")
    pair = dist.new_group([0])
    held = param(float(meeting.rank))
    average_parameters([held], pair)  # on rank 1 it is torch's mark for "not in it"
    dist.barrier()  # else one ends while the other connects to it
    dist.destroy_process_group()
    return held[0, 0].item()


def test_a_rank_outside_the_group_keeps_its_parameters() -> None:
    assert spawn_ranks(2, average_outside) == [0.0, 1.0]
