"""Reductions over shards of any size give what one process with all rows gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from paceline import metrics
from paceline.errors import RendezvousError, ShardArgumentError, ShardMismatchError
from paceline.groups import Call, Group, process_group
from paceline.testing import Meeting, run_ranks, spawn_ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def shards(rows: Sequence[int], dtype: torch.dtype, *trailing: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(rows))
    made = [torch.randn(n, *trailing, generator=generator) * 100 for n in rows]
    return [(t.abs() if dtype is torch.uint8 else t).to(dtype) for t in made]


def on_ranks(fn: Callable[..., Any], *parts: Sequence[Any]) -> list[Any]:
    """What ``fn`` gives each rank, that has the parts at its place; all must get the same bits."""
    results = run_ranks(
        len(parts[0]), lambda group: fn(*(part[group.rank()] for part in parts), group=group)
    )
    for result in results:
        assert_close(result, results[0], rtol=0, atol=0, equal_nan=True)
    return results


# -- what comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [[5], [3, 0, 7], [0, 0], [1, 4]], ids=str)
def test_every_reduction_is_that_of_all_rows_together(rows: list[int], dtype: torch.dtype) -> None:
    parts = shards(rows, dtype, 2, 3)
    whole = torch.cat(parts)
    if dtype.is_complex:
        wide = torch.complex128
    else:
        wide = torch.float64 if dtype.is_floating_point else torch.int64
    floating = torch.float64 if wide is torch.int64 else wide
    assert_close(on_ranks(metrics.sum, parts)[0], whole.to(wide).sum(0))
    assert_close(on_ranks(metrics.mean, parts)[0], whole.to(floating).mean(0), equal_nan=True)
    assert torch.equal(on_ranks(metrics.gather, parts)[0], whole)

    weights = [torch.arange(n) + 0.5 for n in rows]
    scale = torch.cat(weights).double().view(-1, 1, 1)
    expected = (whole.to(floating) * scale).sum(0) / scale.sum()
    assert_close(on_ranks(metrics.weighted_mean, parts, weights)[0], expected, equal_nan=True)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=6), min_size=1, max_size=4))
def test_the_mean_is_that_of_the_samples_and_not_of_the_means(parts: list[list[float]]) -> None:
    everything = [value for part in parts for value in part]
    expected = math.fsum(everything) / len(everything) if everything else math.nan
    found = on_ranks(metrics.mean, [torch.tensor(part) for part in parts])[0]
    assert found.dtype is torch.float64
    assert_close(found.item(), expected, rtol=1e-12, atol=1e-9, equal_nan=True)


def test_numbers_are_shards_of_one_row() -> None:
    assert on_ranks(metrics.sum, [1, 2, 4])[0].item() == 7
    assert on_ranks(metrics.sum, [1, 2, 4])[0].dtype is torch.int64
    assert on_ranks(metrics.mean, [0.1, 0.2, 0.6])[0].item() == pytest.approx(0.3, rel=1e-15)
    assert on_ranks(metrics.gather, [True, False])[0].tolist() == [1, 0]
    losses, samples = [2.0, 5.0, math.nan], [30, 10, 0]  # the last had an empty batch
    assert on_ranks(metrics.weighted_mean, losses, samples)[0].item() == 2.75
    tensors = [torch.tensor(loss) for loss in losses]
    assert on_ranks(metrics.weighted_mean, tensors, samples)[0].item() == 2.75
    assert on_ranks(metrics.weighted_mean, losses, [0, 0, 0])[0].isnan()


def test_large_integers_are_added_exactly() -> None:
    parts = [torch.tensor([2**60, 1]), torch.tensor([2**60 + 1])]
    assert on_ranks(metrics.sum, parts)[0].item() == 2**61 + 2


def test_half_width_floats_are_not_added_up_in_half_width() -> None:
    parts = [torch.ones(5000, dtype=torch.float16), torch.ones(7000, dtype=torch.float16)]
    assert on_ranks(metrics.sum, parts)[0].item() == 12000
    counts = [torch.ones(2**25), torch.ones(1)]
    assert on_ranks(metrics.sum, counts)[0].item() == 2**25 + 1  # float32 would lose the one


def test_strided_and_differentiable_shards_are_taken_as_they_are() -> None:
    parts = [torch.arange(12.0).view(3, 4).t(), torch.arange(6.0).view(2, 3).requires_grad_()]
    result = on_ranks(metrics.gather, parts)[0]
    assert torch.equal(result, torch.cat(parts))
    assert not result.requires_grad
    conjugates = [torch.tensor([1 + 2j]).conj(), torch.tensor([3 + 4j])]
    assert on_ranks(metrics.gather, conjugates)[0].tolist() == [1 - 2j, 3 + 4j]


def test_rows_without_elements_are_gathered_without_a_call() -> None:
    parts = [torch.empty(2, 0), torch.empty(3, 0)]
    assert on_ranks(metrics.gather, parts)[0].shape == (5, 0)
    assert on_ranks(metrics.sum, parts)[0].shape == (0,)


# -- what does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["sum", "mean", "gather"])
@pytest.mark.parametrize(
    ("other", "told"),
    [
        (torch.zeros(2, 4), "rows of shape [4]"),
        (torch.zeros(2, 3).double(), "torch.float64, rows of shape [3]"),
        (torch.zeros(2), "rows of shape []"),
    ],
)
def test_shards_that_do_not_fit_are_an_error_on_every_rank(
    operation: str, other: Tensor, told: str
) -> None:
    def one_rank(group: Group) -> ShardMismatchError:
        shard = other if group.rank() == 1 else torch.zeros(5, 3)
        with pytest.raises(ShardMismatchError) as caught:
            getattr(metrics, operation)(shard, group=group)
        assert metrics.sum(1, group=group) == 3, "the group goes on"
        return caught.value

    for rank, error in enumerate(run_ranks(3, one_rank)):
        assert (error.rank, error.rank_a, error.rank_b) == (rank, 0, 1)
        assert error.shard_a == f"{operation}(torch.float32, rows of shape [3])"
        assert told in error.shard_b


def test_different_functions_on_different_ranks_are_told_apart() -> None:
    def one_rank(group: Group) -> str:
        with pytest.raises(ShardMismatchError) as caught:
            (metrics.mean if group.rank() else metrics.sum)(torch.zeros(2), group=group)
        return str(caught.value)

    for text in run_ranks(2, one_rank):
        assert "rank 0 called sum(" in text
        assert "rank 1 called mean(" in text


@pytest.mark.parametrize(
    ("values", "weights", "told"),
    [
        (torch.zeros(3), torch.ones(2), "weights of shape [2] for values of shape [3]"),
        (torch.zeros(3), 1.0, "weights of shape [] for values of shape [3]"),
        ("a string", 1.0, "an object of type str"),
        (torch.zeros(1), None, "an object of type NoneType"),
        (torch.zeros(1).to_sparse(), 1.0, "a tensor of layout torch.sparse_coo"),
    ],
)
def test_what_is_no_shard_on_one_rank_is_an_error_on_all(
    values: Any, weights: Any, told: str
) -> None:
    def one_rank(group: Group) -> tuple[int, str]:
        given = (values, weights) if group.rank() == 1 else (torch.zeros(4), torch.ones(4))
        with pytest.raises(ShardArgumentError) as caught:
            metrics.weighted_mean(*given, group=group)
        assert metrics.sum(1, group=group) == 2, "the group goes on"
        return caught.value.culprit, caught.value.problem

    assert run_ranks(2, one_rank) == [(1, told)] * 2


# -- groups -------------------------------------------------------------------------------------


def test_the_current_group_is_used_and_without_any_group_that_is_said() -> None:
    def one_rank(group: Group) -> float:
        with process_group(group):
            return metrics.sum(group.rank()).item()

    assert run_ranks(3, one_rank) == [3, 3, 3]
    with pytest.raises(RendezvousError, match="no process group to reduce over"):
        metrics.sum(1)


def test_no_more_than_three_collectives_are_needed() -> None:
    def one_rank(group: Group) -> int:
        calls: list[Call] = []
        group.register_hooks(before=calls.append)
        metrics.mean(torch.ones(group.rank()), group=group)
        return len(calls)

    assert run_ranks(2, one_rank) == [3, 3]


def reduce_in_processes(meeting: Meeting, backend: str) -> list[Tensor]:
    rank = meeting.rank
    if backend == "stock":
        dist.init_process_group("gloo", store=meeting.store(), rank=rank, world_size=meeting.size)
        group = None  # torch's default
    else:
        group = meeting.new_group(backend)
    values = torch.arange(3 * rank, dtype=torch.float32).view(-1, 3) + rank
    results = [
        metrics.sum(values, group),
        metrics.mean(values, group),
        metrics.weighted_mean(values, torch.full((rank,), float(rank)), group),
        metrics.gather(values.to(torch.bfloat16), group),
        metrics.gather(values > 2, group),
    ]
    with pytest.raises(ShardMismatchError):
        metrics.gather(torch.zeros(2, 1 + rank), group)
    if group is None:
        dist.destroy_process_group()
    else:
        group.shutdown()
    return results


@pytest.mark.parametrize("backend", ["shm", "gloo", "stock"])
def test_processes_reduce_over_any_group(backend: str) -> None:
    parts = [torch.arange(3.0 * r).view(-1, 3) + r for r in range(3)]
    whole, scale = torch.cat(parts), torch.tensor([[1.0], [2.0], [2.0]])
    expected = [
        whole.double().sum(0),
        whole.double().mean(0),
        ((whole * scale).sum(0) / 5).double(),
        whole.bfloat16(),
        whole > 2,
    ]
    for results in spawn_ranks(3, reduce_in_processes, backend):
        assert_close(results, expected)
