"""Layouts, orthonormal columns and seeds: pure functions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from paceline._exchange.low_rank import (
    Seeds,
    as_matrix,
    orthonormal,
    plan_low_rank,
    random_columns,
    worth_it,
)
from tests.ddp.toys import data

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=4).map(tuple), max_size=8)


@given(SHAPES, st.integers(1, 5), st.sampled_from([0.5, 1, 2, 4]))
@settings(deadline=None, max_examples=60)
def test_every_gradient_travels_once_either_whole_or_in_a_batch_of_its_shape(
    shapes: list[tuple[int, ...]], rank: int, rate: float
) -> None:
    layout = plan_low_rank(shapes, rank, rate)
    slots = [*layout.whole, *(slot for batch in layout.batches for slot in batch.slots)]
    assert sorted(slots) == list(range(len(shapes)))
    assert layout.numel == sum(map(math.prod, shapes))
    for batch in layout.batches:
        assert all(as_matrix(shapes[slot]) == (batch.rows, batch.columns) for slot in batch.slots)
        assert batch.rank <= min(rank, batch.rows, batch.columns)
    if rate >= 1:
        assert layout.numel_sent <= layout.numel


def test_a_matrix_is_worth_it_when_it_gets_smaller_by_more_than_the_rate() -> None:
    assert worth_it(10, 10, 2, 2.4)
    assert not worth_it(10, 10, 2, 2.5)
    assert not worth_it(10, 1, 1, 1)


def test_a_gradient_without_dimensions_travels_whole() -> None:
    assert plan_low_rank([(), (3,), (20, 5, 4)], 1, 2).whole == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_orthonormal_columns_span_the_same_space(dtype: torch.dtype) -> None:
    matrices = data(3, 8, 2).to(dtype)
    found = orthonormal(matrices)
    close = {"rtol": 0, "atol": 10 * torch.finfo(dtype).eps}
    assert found.dtype == dtype
    wide, given_ = found.double(), matrices.double()
    assert_close(wide.mT @ wide, torch.eye(2, dtype=torch.float64).expand(3, 2, 2), **close)
    assert_close(wide @ (wide.mT @ given_), given_, rtol=0, atol=30 * torch.finfo(dtype).eps)


def test_columns_of_zeros_become_columns_too() -> None:
    found = orthonormal(torch.zeros(2, 5, 3))
    assert_close(found.mT @ found, torch.eye(3).expand(2, 3, 3))


def test_epsilon_shortens_columns_that_hardly_exist() -> None:
    matrix = torch.tensor([[[1.0, 0.0], [0.0, 1e-8], [0.0, 0.0]]])
    norms = orthonormal(matrix, 1e-8).norm(dim=1)
    assert_close(norms, torch.tensor([[1.0, 0.5]]))


def test_what_is_not_a_number_stays_none() -> None:
    for value in (torch.nan, torch.inf):
        matrix = data(1, 6, 2)
        matrix[0, 3, 1] = value
        assert not orthonormal(matrix).isfinite().all()


@given(st.integers(0, 2**40), st.integers(0, 10**6), st.integers(0, 10**6))
def test_seeds_depend_on_every_part_of_their_occasion(seed: int, step: int, number: int) -> None:
    here = Seeds(seed).at(step, number)
    assert here == Seeds(seed).at(step, number)
    others = (Seeds(seed + 1).at(step, number), Seeds(seed).at(step + 1, number))
    assert here not in (*others, Seeds(seed).at(step, number + 1))
    assert 0 <= here < 2**63


def test_random_columns_are_the_same_for_the_same_seed() -> None:
    before = torch.get_rng_state()
    assert torch.equal(random_columns(4, 2, 7), random_columns(4, 2, 7))
    assert not torch.equal(random_columns(4, 2, 7), random_columns(4, 2, 8))
    assert torch.equal(torch.get_rng_state(), before)
