"""Two ranks over gloo send each other all they have instead of reducing to and fro."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from paceline.errors import PacelineError
from paceline.groups import Group, ReduceOp
from paceline.testing import Meeting, spawn_ranks

SIZES = [1, 16 * 1024, 16 * 1024 + 1, 300_000]  # gathered, swapped
REDUCED = 18_000_000  # bytes: by gloo


def tensors(rank: int, dtype: torch.dtype) -> list[Tensor]:
    sizes = [*SIZES, REDUCED // dtype.itemsize]
    return [torch.arange(n, dtype=dtype) % 97 + rank + 0.25 for n in sizes]


def reduce_all(meeting: Meeting, dtype: torch.dtype, average: bool) -> list[list[Tensor]]:
    op = ReduceOp.AVG if average else ReduceOp.SUM
    with meeting.new_group("gloo") as group:
        waited = tensors(meeting.rank, dtype)
        for tensor in waited:
            group.all_reduce(tensor, op)
        together = tensors(meeting.rank, dtype)
        works = [group.all_reduce(tensor, op, async_op=True) for tensor in together]
        for work in reversed(works):
            work.wait()
        parts = [t[: t.numel() // 2 * 2] for t in tensors(meeting.rank, dtype)[1:]]
        kept = [t.new_empty(t.numel() // 2) for t in parts]
        for part, whole in zip(kept, parts, strict=True):
            group.reduce_scatter_single(part, whole, op)
        _check_moves(group, meeting.rank, dtype)
        return [[t[-1000:] for t in found] for found in (waited, together, kept)]


def _check_moves(group: Group, rank: int, dtype: torch.dtype) -> None:
    for mine, theirs in zip(tensors(rank, dtype), tensors(1 - rank, dtype), strict=True):
        pair = (mine, theirs) if rank == 0 else (theirs, mine)
        n = mine.numel()
        gathered = mine.new_empty(2 * n)
        gathered[rank * n : (rank + 1) * n] = mine
        group.all_gather_single(gathered, gathered[rank * n : (rank + 1) * n])  # in place
        assert_close(gathered, torch.cat(pair), rtol=0, atol=0)
        even = n // 2 * 2
        if even:
            taken = mine.new_empty(even)
            group.all_to_all_single(taken, mine[:even].contiguous())
            expected = torch.cat([t[:even].chunk(2)[rank] for t in pair])
            assert_close(taken, expected, rtol=0, atol=0)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("dtype", "average"),
    [
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, True),
        pytest.param(torch.bfloat16, False, marks=slow),
        pytest.param(torch.float64, False, marks=slow),
        pytest.param(torch.float64, True, marks=slow),
    ],
)
def test_sums_and_means_are_right_at_every_size(dtype: torch.dtype, average: bool) -> None:
    first, second = tensors(0, dtype), tensors(1, dtype)
    sums = [(a + b) / (2 if average else 1) for a, b in zip(first, second, strict=True)]
    expected = [t[-1000:] for t in sums]
    by_rank = spawn_ranks(2, reduce_all, dtype, average)
    for rank, (waited, together, kept) in enumerate(by_rank):
        assert_close(waited, expected)
        assert_close(together, expected)
        halves = [t[: t.numel() // 2 * 2].chunk(2)[rank] for t in sums[1:]]
        assert_close(kept, [half[-1000:] for half in halves])


def leave_alone(meeting: Meeting) -> bool:
    with meeting.new_group("gloo") as group:
        if meeting.rank == 1:
            meeting.store().get("gone")
            return True
        with pytest.raises((PacelineError, RuntimeError)):
            group.all_reduce(torch.ones(100_000), timeout=timedelta(seconds=0.5))
        meeting.store().set("gone", "yes")
        return True


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_call_says() -> None:
    assert spawn_ranks(2, leave_alone) == [True, True]
