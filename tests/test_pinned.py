"""Ranks on unequal cores, as ``make test-pinned`` has them, are on unequal cores."""

import os

import pytest

from paceline.testing import Meeting

from .pinned import cores_of, spawn_pinned_ranks


def cores(meeting: Meeting) -> set[int]:
    return os.sched_getaffinity(0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is equal to itself")
def test_odd_ranks_have_one_core_and_even_ranks_have_all() -> None:
    there = sorted(os.sched_getaffinity(0))
    assert spawn_pinned_ranks(3, cores) == [set(there), {there[1]}, set(there)]


def test_ranks_beyond_the_cores_share_them() -> None:
    assert [cores_of(r, [4, 7]) for r in (0, 1, 3, 5)] == [{4, 7}, {7}, {7}, {7}]
    assert cores_of(5, [0, 1, 2]) == {2}
