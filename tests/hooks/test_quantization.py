"""Gradients in 8 bits: rows packed and unpacked, and what becomes of numbers that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.groups import Group
from paceline.hooks.quantization import pack, unpack
from paceline.testing import run_ranks
from tests.ddp.toys import count_calls, data, stack

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False).map(
    lambda number: number if abs(number) > 1e-30 else 0.0
)
ROWS = st.lists(st.lists(NUMBERS, min_size=4, max_size=4), min_size=1, max_size=3)


@given(ROWS)
@settings(deadline=None, max_examples=200)
def test_a_number_comes_back_to_half_a_step(values: list[list[float]]) -> None:
    rows = torch.tensor(values, dtype=torch.float32)
    found = unpack(pack(rows), *rows.shape).double()
    low, high = rows.double().amin(1).clamp(max=0), rows.double().amax(1).clamp(min=0)
    step = ((high - low) / 255).unsqueeze(1)
    assert ((found - rows).abs() <= 0.501 * step).all()


@given(st.integers(-149, -100))
def test_numbers_that_hardly_exist_stay_numbers(power: int) -> None:
    rows = torch.tensor([[2.0**power, 0.0, -(2.0**power)]], dtype=torch.float64).float()
    found = unpack(pack(rows), 1, 3)
    assert ((found - rows).abs() <= 2.0**power).all()


def test_zero_comes_back_as_zero() -> None:
    rows = torch.tensor([[0.0, 0.3, -0.7], [0.0, 5.0, 2.0], [0.0, -1e-9, -2e-9], [0.0, 0.0, 0.0]])
    assert (unpack(pack(rows), 4, 3)[:, 0] == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_what_is_not_a_number_has_none(value: float) -> None:
    rows = torch.ones(2, 4)
    rows[1, 2] = value
    found = unpack(pack(rows), 2, 4)
    assert torch.equal(found[0], rows[0])
    assert found[1].isnan().all()


def test_a_number_takes_a_byte() -> None:
    assert pack(torch.ones(3, 100)).numel() == 3 * (100 + 8)


@pytest.mark.parametrize("hook", [hooks.quantization_pertensor_hook, hooks.noop_hook])
def test_a_gradient_that_is_not_a_number_is_seen_by_those_who_average(hook: Any) -> None:
    def one_rank(group: Group) -> bool:
        ddp = DDP(stack(3, 2), process_group=group)
        ddp.register_comm_hook(group, hook)
        ddp(data(1, 3) * (torch.nan if group.rank() == 1 else 1)).sum().backward()
        return bool(ddp.module[0].weight.grad.isfinite().any())

    averages = hook is hooks.quantization_pertensor_hook
    assert run_ranks(2, one_rank) == ([False, False] if averages else [True, False])


def test_rows_of_their_own_are_more_precise_where_sizes_differ() -> None:
    gradient = torch.cat([data(512) * 1e3, data(512)])

    def one_rank(group: Group) -> list[Tensor]:
        found = []
        for hook in (hooks.quantization_pertensor_hook, hooks.quantization_perchannel_hook):
            weight = torch.nn.Module()
            weight.p = torch.nn.Parameter(torch.zeros_like(gradient))
            weight.forward = lambda x, weight=weight: weight.p @ x
            ddp = DDP(weight, process_group=group)
            ddp.register_comm_hook(group, hook)
            ddp(gradient).backward()
            found.append((weight.p.grad - gradient)[512:].norm() / gradient[512:].norm())
        return found

    for one_step, steps in run_ranks(2, one_rank):
        assert steps < 0.01 < 0.5 < one_step


@pytest.mark.parametrize("size", [64, 7])
def test_the_length_of_rows_may_be_chosen_and_need_not_divide_anything(size: int) -> None:
    def hook(group: Any, bucket: Any) -> Any:
        return hooks.quantization_perchannel_hook(group, bucket, bucket_size=size)

    hook.__annotations__ = {}

    def one_rank(group: Group) -> tuple[float, list[str]]:
        ddp = DDP(stack(32, 32), process_group=group)
        ddp.register_comm_hook(group, hook)
        x = data(4, 32)
        calls = count_calls(group)
        ddp(x).sum().backward()
        wanted = x.sum(0).expand(32, 32)
        return float((ddp.module[0].weight.grad - wanted).norm() / wanted.norm()), calls

    for wrong, calls in run_ranks(2, one_rank):
        assert wrong < 0.01
        assert calls.count("all_gather_single") == 1
