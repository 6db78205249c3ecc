"""Which tensors share a buffer, and how a model is cut: pure functions."""

from __future__ import annotations

import pytest
import torch

from paceline._exchange import cut_evenly, group_for_buffers


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [([1, 1, 1, 1], 2), ([100, 1, 1], 3), ([1, 1, 100], 3), ([5], 1), ([3, 0, 4, 9, 2, 2], 4)],
)
def test_a_model_is_cut_into_runs_that_cover_it_and_none_is_empty(
    sizes: list[int], parts: int
) -> None:
    runs = cut_evenly(sizes, parts)
    assert len(runs) == parts
    assert all(len(run) for run in runs)
    assert [i for run in runs for i in run] == list(range(len(sizes)))


def test_runs_are_of_about_the_same_size() -> None:
    assert cut_evenly([1] * 12, 3) == [range(0, 4), range(4, 8), range(8, 12)]
    assert cut_evenly([10, 1, 1, 1, 1, 6], 2) == [range(0, 1), range(1, 6)]


def test_buffers_hold_one_type_and_stay_near_the_cap() -> None:
    a, b = torch.ones(100), torch.ones(100)
    half, wide = torch.ones(100, dtype=torch.bfloat16), torch.ones(100, dtype=torch.float64)
    assert group_for_buffers([a, wide, half, b], 10_000) == [[a, half, b], [wide]]
    assert group_for_buffers([a, b, half], 401) == [[a, b], [half]]
    assert group_for_buffers([a, b], 1) == [[a], [b]]
