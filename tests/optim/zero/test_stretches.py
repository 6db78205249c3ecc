"""Which rank owns which stretch."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.optim.zero.stretches import (
    Slice,
    cut_slices,
    even_bounds,
    greedy_owners,
    length_of,
    level_bounds,
    runs_of,
    slices_between,
)

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)
RANKS = st.integers(1, 7)


@given(SIZES, RANKS)
def test_every_element_has_exactly_one_owner(sizes: list[int], ranks: int) -> None:
    bounds = even_bounds(sum(sizes), ranks)
    owned = [slices_between(range(len(sizes)), sizes, a, b) for a, b in itertools.pairwise(bounds)]
    elements = [(s.param, e) for part in owned for s in part for e in range(s.start, s.stop)]
    assert elements == [(p, e) for p, size in enumerate(sizes) for e in range(size)]


@given(st.integers(0, 1000), RANKS)
def test_even_stretches_are_equal_but_for_the_end(total: int, ranks: int) -> None:
    bounds = even_bounds(total, ranks)
    shares = [b - a for a, b in itertools.pairwise(bounds)]
    assert sum(shares) == total
    assert max(shares) == -(-total // ranks)
    assert shares == sorted(shares, reverse=True)


@given(st.integers(0, 300), st.lists(st.integers(0, 100), min_size=1, max_size=7))
def test_what_is_added_goes_to_those_who_have_least(total: int, loads: list[int]) -> None:
    bounds = level_bounds(total, loads)
    shares = [b - a for a, b in itertools.pairwise(bounds)]
    assert sum(shares) == total
    after = [load + share for load, share in zip(loads, shares, strict=True)]
    grown = [load for load, share in zip(after, shares, strict=True) if share]
    if grown:
        # Nobody could be given one element less and somebody else one more to their advantage.
        assert max(grown) <= min(after) + 1


def test_a_group_that_comes_later_evens_out_what_was_left() -> None:
    assert level_bounds(3, [24, 24, 24, 21]) == (0, 0, 0, 0, 3)
    assert level_bounds(4, [0, 0]) == (0, 2, 4)


@pytest.mark.parametrize(
    ("sizes", "loads", "owners"),
    [
        ([9, 7, 5, 3], [0, 0], (0, 1, 1, 0)),
        ([1, 1, 1], [5, 0, 5], (1, 1, 1)),
        ([4, 4], [0, 0, 0], (0, 1)),
    ],
)
def test_large_parameters_go_first_to_whoever_has_least(
    sizes: list[int], loads: list[int], owners: tuple[int, ...]
) -> None:
    assert greedy_owners(sizes, loads) == owners


@given(SIZES, st.integers(1, 30), st.data())
def test_runs_hold_all_slices_of_a_kind_and_none_is_too_long(
    sizes: list[int], longest: int, data: st.DataObject
) -> None:
    slices = slices_between(range(len(sizes)), sizes, 0, sum(sizes))
    kinds = data.draw(
        st.lists(st.sampled_from([None, 0, 1]), min_size=len(sizes), max_size=len(sizes))
    )
    runs = runs_of(slices, lambda part: kinds[part.param], longest)
    assert all(0 < length_of(run) <= longest for run in runs)
    assert all(len({kinds[part.param] for part in run}) == 1 for run in runs)
    elements = [(s.param, e) for run in runs for s in run for e in range(s.start, s.stop)]
    assert elements == [
        (p, e) for p, size in enumerate(sizes) if kinds[p] is not None for e in range(size)
    ]


def test_neighbours_of_one_kind_share_a_run_and_others_part_them() -> None:
    slices = [Slice(0, 2, 5), Slice(1, 0, 4), Slice(2, 0, 3), Slice(3, 0, 1)]
    kinds = {0: "a", 1: "a", 2: "b", 3: "a"}
    runs = runs_of(slices, lambda part: kinds[part.param], 100)
    assert runs == [(slices[0], slices[1]), (slices[2],), (slices[3],)]


def test_cutting_slices_keeps_their_places_in_the_parameters() -> None:
    slices = [Slice(4, 10, 15), Slice(5, 0, 3)]
    assert cut_slices(slices, 2, 6) == (Slice(4, 12, 15), Slice(5, 0, 1))
    assert cut_slices(slices, 8, 9) == ()
