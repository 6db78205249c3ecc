"""How an epoch is cut into steps and shards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.cutting import EpochCut
from paceline.errors import LoaderArgumentError


@st.composite
def cuts(draw: st.DrawFn, *, drop_last: bool = False) -> EpochCut:
    shards = draw(st.integers(1, 12))
    batch = draw(st.integers(shards, 40))
    length = draw(st.integers(batch if drop_last else shards, 200))
    return EpochCut(length, batch, shards, drop_last)


@given(cuts())
def test_every_position_is_in_one_shard_and_no_shard_is_empty(cut: EpochCut) -> None:
    found = [cut.shard(step, index) for step in range(cut.steps) for index in range(cut.shards)]
    assert list(itertools.chain(*found)) == list(range(cut.length))
    assert all(found)


@given(cuts())
def test_shards_of_a_step_differ_by_one_sample_and_full_steps_are_cut_alike(cut: EpochCut) -> None:
    for step in range(cut.steps):
        sizes = [len(cut.shard(step, index)) for index in range(cut.shards)]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == len(cut.step(step))
        if step < cut.steps - 1:
            assert len(cut.step(step)) == cut.batch


@given(cuts())
def test_the_last_step_has_at_most_one_sample_more_in_each_shard(cut: EpochCut) -> None:
    last = cut.step(cut.steps - 1)
    assert cut.shards <= len(last) < cut.batch + cut.shards


@given(cuts(drop_last=True))
def test_with_drop_last_all_steps_are_full_and_less_than_one_is_left_out(cut: EpochCut) -> None:
    assert {len(cut.step(step)) for step in range(cut.steps)} == {cut.batch}
    assert 0 <= cut.length - cut.steps * cut.batch < cut.batch


@pytest.mark.parametrize(
    ("argument", "numbers"),
    [
        ("batch", (10, 0, 1)),
        ("batch", (10, 2.0, 1)),
        ("batch", (10, 3, 4)),
        ("shards", (10, 4, 0)),
        ("shards", (10, 4, True)),
        ("dataset", (0, 4, 2)),
        ("dataset", (3, 8, 4)),
        ("dataset", (7, 8, 4, True)),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(argument: str, numbers: Any) -> None:
    with pytest.raises(LoaderArgumentError) as caught:
        EpochCut(*numbers)
    assert caught.value.argument == argument
