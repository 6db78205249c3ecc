"""The numbers behind the last bucket: what ranks write, and what they read when it is reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline._reducer import header
from paceline._reducer.header import Header, Said


def reduced(params: int, *ranks: dict[str, Any], dtype: torch.dtype = torch.float32) -> Header:
    """What all ranks read after each wrote its part."""
    total = torch.zeros(header.length(len(ranks), params), dtype=dtype)
    for rank, said in enumerate(ranks):
        memory = torch.full_like(total, float("nan"))
        part = Said(**{"active": rank, **said})
        header.write(memory, part, 1 / len(ranks), len(ranks))
        total += memory
    return Header.read(total, len(ranks))


def test_ranks_with_nothing_special_to_say_are_read_as_such() -> None:
    told = reduced(2, {}, {})
    assert told.weight == 1.0
    assert (told.trouble, told.late, told.weighted) == (False, False, False)
    assert told.active_ranks() == [0, 1]
    assert told.present(0)
    assert told.used(2) == [2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_come_as_their_mean(dtype: torch.dtype) -> None:
    assert reduced(0, {"weight": 3.0}, {"weight": 0.0}, dtype=dtype).weight == 1.5


@pytest.mark.parametrize("what", ["trouble", "late", "weighted"])
@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_one_rank_is_heard_by_all(what: str, ranks: int) -> None:
    told = reduced(1, {what: True}, *[{}] * (ranks - 1))
    assert [n for n in ("trouble", "late", "weighted") if getattr(told, n)] == [what]


@pytest.mark.parametrize("ranks", [2, 3, 1000])
def test_ranks_that_only_stand_in_are_known_by_name(ranks: int) -> None:
    said = [{"active": None} if rank % 2 else {} for rank in range(ranks)]
    assert reduced(1, *said).active_ranks() == list(range(0, ranks, 2))


def test_when_all_ranks_only_stand_in_nobody_is_active() -> None:
    assert reduced(1, *[{"active": None}] * 3).active_ranks() == []


def test_a_parameter_is_present_unless_it_is_absent_everywhere() -> None:
    told = reduced(3, {"absent": {0, 1}}, {"absent": {0}})
    assert [told.present(n) for n in range(3)] == [False, True, True]
    assert told.used(2) == [0, 1, 2]


def test_an_idle_gradient_is_present_but_was_not_used() -> None:
    told = reduced(3, {"idle": {0, 1}}, {"idle": {0}, "absent": {1}})
    assert [told.present(n) for n in range(3)] == [True, True, True]
    assert told.used(2) == [0, 0, 2]


@pytest.mark.parametrize("ranks", [3, 7, 100, 1000])
def test_uses_are_counted_right_over_many_ranks(ranks: int) -> None:
    said = [{"absent": {0}} if rank % 2 else {"idle": {1}} for rank in range(ranks)]
    assert reduced(2, *said).used(ranks) == [ranks - ranks // 2, ranks // 2]


def test_a_rank_without_any_gradient_says_so_for_every_parameter() -> None:
    told = reduced(4, {"weight": 0.0, "absent": range(4)}, {})
    assert told.weight == 0.5
    assert told.used(2) == [1, 1, 1, 1]


def test_it_rides_only_where_a_count_of_tokens_is_not_rounded() -> None:
    assert header.can_ride(torch.float32)
    assert header.can_ride(torch.float64)
    for dtype in (torch.float16, torch.bfloat16, torch.complex64, torch.int64):
        assert not header.can_ride(dtype)


def test_its_length_is_what_is_written_and_read() -> None:
    for params in (0, 1, 5):
        assert len(reduced(params, {}).shares) == params
