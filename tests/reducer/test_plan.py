"""Which bucket holds what: the planner, against torch's own and by its rules."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._reducer.plan import Spec, assign, first_plan, joined, learned_plan, triggers

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SIZES = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(DTYPES), st.sampled_from([False] * 4 + [True])),
    min_size=1,
    max_size=25,
)
CAPS = st.lists(st.integers(1, 300), min_size=1, max_size=4)


def spec_of(numel: int, dtype: torch.dtype, sparse: bool) -> Spec:
    return Spec(numel * dtype.itemsize, (dtype, torch.device("cpu")), sparse)


def specs_of(*nbytes: int) -> list[Spec]:
    return [Spec(n, "kind") for n in nbytes]


# torch's planner.


@settings(max_examples=300, deadline=None)
@given(SIZES, CAPS)
def test_without_an_order_the_plan_is_torchs(
    sizes: list[tuple[int, torch.dtype, bool]], caps: list[int]
) -> None:
    tensors = [torch.empty(numel, dtype=dtype) for numel, dtype, _ in sizes]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, caps, [s for _, _, s in sizes])
    assert assign([spec_of(*size) for size in sizes], caps) == tuple(map(tuple, expected))


@settings(max_examples=300, deadline=None)
@given(SIZES, CAPS, st.randoms(use_true_random=False))
def test_in_a_given_order_the_plan_is_torchs(
    sizes: list[tuple[int, torch.dtype, bool]], caps: list[int], random: object
) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)
    tensors = [torch.empty(sizes[n][0], dtype=sizes[n][1]) for n in order]
    sparse = [s for _, _, s in sizes]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, caps, sparse, order)
    found = assign([spec_of(*size) for size in sizes], caps, order)
    kinds = {dtype for _, dtype, sparse in sizes if not sparse}
    if len(kinds) > 1:  # torch takes the buckets that stayed open in the order of a hash table
        assert sorted(found) == sorted(map(tuple, expected))
    else:
        assert found == tuple(map(tuple, expected))


# Its rules.


@settings(max_examples=200, deadline=None)
@given(SIZES, CAPS, st.data())
def test_every_parameter_is_in_exactly_one_bucket_of_its_own_kind(
    sizes: list[tuple[int, torch.dtype, bool]], caps: list[int], data: st.DataObject
) -> None:
    specs = [spec_of(*size) for size in sizes]
    arrival = data.draw(st.permutations(range(len(specs))))
    arrival = arrival[: data.draw(st.integers(0, len(arrival)))]
    for plan in (first_plan(specs, caps), learned_plan(specs, caps, arrival)):
        assert sorted(n for bucket in plan for n in bucket) == list(range(len(specs)))
        for bucket in plan:
            assert len({specs[n].kind for n in bucket}) == 1
            assert len(bucket) == 1 or not any(specs[n].sparse for n in bucket)


def test_a_bucket_is_closed_by_the_parameter_that_reaches_its_cap() -> None:
    assert assign(specs_of(4, 4, 4, 4), [8]) == ((0, 1), (2, 3))
    assert assign(specs_of(4, 100, 4), [8]) == ((0, 1), (2,))


def test_the_last_cap_holds_for_all_further_buckets_and_each_kind_counts_its_own() -> None:
    assert assign(specs_of(*[4] * 9), [4, 12]) == ((0,), (1, 2, 3), (4, 5, 6), (7, 8))
    mixed = [Spec(4, "ab"[n % 2]) for n in range(8)]
    assert assign(mixed, [4, 12]) == ((0,), (1,), (2, 4, 6), (3, 5, 7))


def test_a_sparse_parameter_travels_alone_and_does_not_close_the_others_bucket() -> None:
    specs = [Spec(4, "kind"), Spec(4, "kind", sparse=True), Spec(4, "kind")]
    assert assign(specs, [100]) == ((0, 2), (1,))


def test_a_parameter_without_elements_has_its_place_too() -> None:
    assert assign(specs_of(0, 4, 0), [4]) == ((0, 1), (2,))


def test_nothing_to_assign_makes_no_bucket() -> None:
    assert assign([], [8]) == ()
    assert first_plan([], [8]) == ()
    assert learned_plan([], [8], []) == ()


def test_the_first_plan_begins_with_the_last_parameters() -> None:
    assert first_plan(specs_of(4, 4, 4, 4), [8]) == ((2, 3), (0, 1))


def test_a_learned_plan_has_the_order_of_arrival() -> None:
    assert learned_plan(specs_of(4, 4, 4, 4), [8], [2, 0, 3, 1]) == ((2, 0), (3, 1))


def test_what_did_not_arrive_stands_last_and_the_latest_of_it_first() -> None:
    assert learned_plan(specs_of(*[4] * 5), [8], [1, 3]) == ((1, 3), (4, 2), (0,))


def test_buckets_of_a_learned_plan_stand_in_the_order_they_were_closed() -> None:
    specs = [Spec(4, "a"), Spec(8, "b"), Spec(4, "a")]
    assert learned_plan(specs, [8], [0, 1, 2]) == ((1,), (0, 2))


# Who speaks.


def test_the_one_that_came_last_speaks_for_its_bucket_and_nobody_for_the_last_bucket() -> None:
    assert triggers(((0, 1), (2, 3), (4,)), [1, 0, 2, 3, 4], frozenset()) == {0: 0, 3: 1}


def test_large_parameters_speak_for_themselves_also_in_the_last_bucket() -> None:
    found = triggers(((0, 1), (2, 3)), [0, 1, 2, 3], frozenset({0, 3}))
    assert found == {0: None, 1: 0, 3: None}


def test_a_large_parameter_that_completes_its_bucket_says_so() -> None:
    assert triggers(((0, 1), (2,)), [0, 1, 2], frozenset({1})) == {1: 0}


def test_a_bucket_of_which_nothing_came_has_no_speaker() -> None:
    assert triggers(((0, 1), (2, 3), (4,)), [3, 4], frozenset()) == {3: 1}
    assert triggers((), [], frozenset()) == {}


@pytest.mark.parametrize("arrival", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_a_speaker_is_the_last_of_its_bucket_to_arrive(arrival: list[int]) -> None:
    plan = ((0, 1), (2, 3), ())
    for number, index in triggers(plan, arrival, frozenset()).items():
        others = [arrival.index(n) for n in plan[index]]
        assert arrival.index(number) == max(others)


# Larger buckets for a GPU.


@settings(max_examples=200, deadline=None)
@given(SIZES, CAPS)
def test_joined_buckets_are_two_neighbours_of_one_kind(
    sizes: list[tuple[int, torch.dtype, bool]], caps: list[int]
) -> None:
    specs = [spec_of(*size) for size in sizes]
    plan = learned_plan(specs, caps, range(len(specs)))
    wide = joined(plan, specs)
    assert [n for row in wide for n in row] == [n for row in plan for n in row]
    assert (wide[0], wide[-2:]) == (plan[0], plan[-2:])
    for row in wide:
        assert row in plan or any(row == (*a, *b) for a, b in pairwise(plan))
        kinds = {(specs[n].kind, specs[n].sparse) for n in row}
        assert len(kinds) == 1
        assert len(row) == 1 or not kinds.pop()[1]


def test_thirteen_buckets_become_eight() -> None:
    plan = tuple((n,) for n in range(13))
    wide = joined(plan, specs_of(*[10] * 13))
    assert wide == ((0,), (1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11,), (12,))
