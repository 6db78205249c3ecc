"""Shard and share_out: what a shard is called, and who computes it."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import Shard, share_out
from paceline.errors import ShardNumberError, ShareError

COUNTS = st.integers(1, 30)
STEPS = st.integers(0, 10)
MEMBERS = st.sets(st.integers(0, 50), min_size=1, max_size=9)


# -- keys ---------------------------------------------------------------------------------------


def test_seed_epoch_step_and_index_in_any_order_give_different_keys() -> None:
    numbers = itertools.product((0, 1, 2, 255, 256, 2**32, 2**64 - 1), repeat=4)
    keys = [
        Shard(seed, step, index, 2**64 - 1, epoch).key()
        for seed, step, index, epoch in numbers
        if index < 2**64 - 1
    ]
    assert len(set(keys)) == len(keys) == 7**3 * 6


def test_another_purpose_gives_another_key() -> None:
    shard = Shard(0, 1, 2, 8)
    assert len({shard.key(), shard.key("samples"), shard.key("sample")}) == 3


def test_count_and_samples_have_no_part_in_a_key() -> None:
    assert Shard(3, 4, 5, 6, samples=7).key() == Shard(3, 4, 5, 60).key()


def test_a_key_is_the_same_in_every_version_of_the_package() -> None:
    """A run that goes on after an upgrade has the random numbers that it would have had."""
    assert Shard(1, 2, 3, 4, epoch=5).key().hex() == (
        "91e0abb7bac5950ebbbe5d01524078025f62385f1541166c680be7b39b9884be"
    )


# -- what may be a shard ------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["seed", "step", "index", "count", "epoch", "samples"])
@pytest.mark.parametrize("value", [-1, 2**64, 1.0, True, None, "1"])
def test_what_is_no_number_of_a_shard_is_refused_by_name(field: str, value: Any) -> None:
    numbers = {"seed": 0, "step": 0, "index": 0, "count": 2, field: value}
    with pytest.raises(ShardNumberError) as caught:
        Shard(**numbers)
    assert caught.value.field == field
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("index", "count"), [(0, 0), (2, 2), (3, 2)])
def test_an_index_that_is_not_below_the_count_is_refused(index: int, count: int) -> None:
    with pytest.raises(ShardNumberError, match=f"is not below count={count}"):
        Shard(0, 0, index, count)


def test_a_shard_does_not_change_and_can_be_sent_to_another_process() -> None:
    shard = Shard(0, 1, 2, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.index = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(shard)) == shard
    assert len({shard, Shard(0, 1, 2, 3)}) == 1


# -- who computes which -------------------------------------------------------------------------


@given(COUNTS, MEMBERS, STEPS)
def test_every_shard_has_one_owner_and_owners_differ_by_one_at_most(
    count: int, members: set[int], step: int
) -> None:
    parts = [share_out(count, sorted(members), rank, step=step) for rank in sorted(members)]
    assert list(itertools.chain(*parts)) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(COUNTS, st.integers(1, 9), st.data())
def test_a_number_of_ranks_means_all_of_them_and_their_order_does_not_matter(
    count: int, size: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(range(size)))
    for rank in range(size):
        assert share_out(count, size, rank) == share_out(count, shuffled, rank)


def test_over_as_many_steps_as_ranks_all_have_the_same_number_of_shards() -> None:
    counts = [sum(len(share_out(8, 3, rank, step=step)) for step in range(3)) for rank in range(3)]
    assert counts == [8, 8, 8]
    assert share_out(8, 3, 2) == (6, 7)


@pytest.mark.parametrize(
    ("members", "rank"), [(3, 3), (3, -1), (0, 0), ([], 0), ([1, 2], 0), ([1, 1], 1)]
)
def test_a_rank_that_is_not_among_the_members_is_refused(members: Any, rank: int) -> None:
    with pytest.raises(ShareError) as caught:
        share_out(8, members, rank)
    assert caught.value.rank == rank
