"""The layout of buckets: what is planned, how buckets follow the plan, and what moves with them.

Against a group without peers: no thread, no process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from paceline import new_group
from paceline._reducer.bucket import SparseBucket
from paceline._reducer.layout import Layout, agreed_order, last_times
from paceline._reducer.plan import Assignment
from paceline._reducer.stretches import ScatteredBucket
from paceline.groups import Group
from paceline.policies import BucketCaps, Reduction
from paceline.testing import run_ranks

KIB = 1 / 1024  # in MiB
CPU = torch.device("cpu")


@pytest.fixture
def group() -> Group:
    return new_group("fake", store=HashStore(), rank=0, world_size=2)


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def layout_of(
    params: list[nn.Parameter],
    sparse: tuple[bool, ...] = (),
    cap: float | None = KIB,
    **settings: Any,
) -> Layout:
    return Layout(params, sparse, Reduction(BucketCaps.create(cap, None), **settings))


def held(layout: Layout) -> list[list[int]]:
    """By bucket, which parameters lie in it."""
    places = {id(param): at for at, param in enumerate(layout.params)}
    return [[places[id(param)] for param in bucket.params] for bucket in layout.buckets]


# Plans.


def test_before_the_first_pass_everything_is_planned_into_one_bucket() -> None:
    layout = layout_of(parameters(300, 300, 300))
    assert len(layout.plan) == 1
    assert sorted(layout.plan[0]) == [0, 1, 2]
    assert not layout.rebuilt


def test_what_torchs_flag_keeps_in_one_plan_has_its_caps_at_once() -> None:
    layout = layout_of(parameters(300, 300, 300), find_unused=True)
    assert layout.plan == ((2,), (1,), (0,))
    assert not layout.rebuilds


@pytest.mark.parametrize(
    ("settings", "rebuilds"),
    [({}, True), ({"find_unused": True}, False), ({"static_graph": True}, True)],
)
def test_the_plan_is_made_anew_unless_torchs_flag_forbids_it(
    settings: dict[str, bool], rebuilds: bool
) -> None:
    assert layout_of(parameters(1), **settings).rebuilds is rebuilds
    both = layout_of(parameters(1), find_unused=True, static_graph=True)
    assert both.rebuilds


def test_after_the_first_pass_buckets_are_planned_in_the_order_of_arrival() -> None:
    layout = layout_of(parameters(300, 300, 300))
    layout.follow([1, 0, 2])
    assert layout.plan == ((1,), (0,), (2,))
    assert layout.rebuilt
    assert layout.place == {1: (0, 0), 0: (1, 0), 2: (2, 0)}


def test_small_parameters_share_a_bucket_and_each_has_its_slot() -> None:
    layout = layout_of(parameters(10, 10, 300))
    layout.follow([0, 1, 2])
    assert layout.plan == ((0, 1, 2),)
    assert layout.place == {0: (0, 0), 1: (0, 1), 2: (0, 2)}


@pytest.mark.parametrize(
    ("more", "cap", "plan"),
    [(0, None, ((0, 1, 2),)), (1, None, ((0,), (1, 2))), (0, 1.0, ((0,), (1, 2)))],
    ids=["2 MiB", "a number more", "2 MiB, with a size that was asked for"],
)
def test_little_leaves_at_once_unless_a_size_was_asked_for(
    more: int, cap: float | None, plan: Assignment
) -> None:
    layout = layout_of(parameters(2**18, 2**18 - 1, 1 + more), cap=cap)
    layout.follow([0, 1, 2])
    assert layout.plan == plan


def test_what_is_sparse_does_not_count_and_travels_alone() -> None:
    params = [*parameters(2**18, 2**20, 9), *parameters(9, dtype=torch.float64)]
    layout = layout_of(params, (False, True, False, False), cap=None)
    layout.follow([0, 1, 2, 3])
    assert sorted(layout.plan) == [(0, 2), (1,), (3,)]


def test_types_do_not_share_a_bucket() -> None:
    layout = layout_of([*parameters(4), *parameters(4, dtype=torch.float64)], cap=25)
    layout.follow([0, 1])
    assert layout.plan == ((0,), (1,))


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
def test_complex_gradients_travel_in_their_own_type_whatever_real_ones_travel_in(
    kind: torch.dtype, group: Group
) -> None:
    layout = layout_of([*parameters(4), *parameters(4, dtype=kind)], dtype=torch.float32)
    layout.settle(group, header_rides=True)
    found = {bucket.numbers: bucket.buffer.dtype for bucket in layout.buckets}
    assert found == {(0,): torch.float32, (1,): kind}
    assert layout.carries_header([0])
    assert not layout.carries_header([1])
    only = layout_of(parameters(4, dtype=kind), dtype=torch.bfloat16)
    assert not only.narrow


def test_parameters_that_nobody_wants_are_left_out_but_never_all() -> None:
    layout = layout_of(parameters(300, 300, 300))
    layout.follow([0, 1, 2])
    layout.keep_only(lambda index: index != 1)
    assert layout.plan == ((0,), (2,))
    layout.keep_only(lambda index: False)
    assert layout.plan == ((0,), (2,))


def test_a_plan_that_is_forgotten_is_the_first_one_again(group: Group) -> None:
    layout = layout_of(parameters(300, 300))
    first = layout.plan
    layout.follow([0, 1])
    layout.settle(group, header_rides=False)
    layout.forget()
    assert (layout.plan, layout.rebuilt, layout.buckets) == (first, False, [])


# What is known of parameters.


def test_sparse_ones_are_known_and_travel_alone() -> None:
    layout = layout_of(parameters(4, 4, 4), (False, True, False))
    assert [layout.is_sparse(index) for index in range(3)] == [False, True, False]
    assert (1,) in layout.plan


def test_large_gradients_on_a_cpu_are_taken_as_soon_as_they_come() -> None:
    layout = layout_of(parameters(64 * 1024, 64 * 1024 - 1))
    assert [layout.is_large(index) for index in range(2)] == [True, False]
    on_device = layout_of([nn.Parameter(torch.empty(64 * 1024, device="meta"))])
    assert not on_device.is_large(0)


@pytest.mark.parametrize(
    ("dtype", "sent_as", "narrow"),
    [
        (torch.float32, None, False),
        (torch.bfloat16, None, True),
        (torch.float32, torch.float16, True),
        (torch.bfloat16, torch.float32, False),
    ],
)
def test_gradients_are_narrow_by_the_type_they_travel_in(
    dtype: torch.dtype, sent_as: torch.dtype | None, narrow: bool
) -> None:
    assert layout_of(parameters(1, dtype=dtype), dtype=sent_as).narrow is narrow


# Buckets.


def test_buckets_are_laid_out_as_planned_and_then_left_alone(group: Group) -> None:
    layout = layout_of(parameters(300, 300, 300))
    layout.follow([2, 0, 1])
    assert layout.settle(group, header_rides=False)
    assert held(layout) == [[2], [0], [1]]
    buckets = list(layout.buckets)
    assert not layout.settle(group, header_rides=False)
    assert layout.buckets == buckets


def test_gradients_move_with_the_buckets_they_lie_in(group: Group) -> None:
    params = parameters(300, 300)
    layout = layout_of(params)
    layout.settle(group, header_rides=False)
    (bucket,), (order,) = layout.buckets, held(layout)
    for slot, index in enumerate(order):
        params[index].grad = bucket.grads[slot]
        params[index].grad.fill_(1.0 + index)
    layout.follow([0, 1])
    assert layout.settle(group, header_rides=False)
    for index, param in enumerate(params):
        assert param.grad is layout.buckets[index].grads[0]
        assert torch.equal(param.grad, torch.full((300,), 1.0 + index))


def test_gradients_of_ones_own_stay_where_they_are(group: Group) -> None:
    params = parameters(300, 300)
    layout = layout_of(params)
    layout.settle(group, header_rides=False)
    own = params[1].grad = torch.ones(300)
    layout.follow([0, 1])
    layout.settle(group, header_rides=False)
    assert params[1].grad is own
    assert params[0].grad is None


def test_without_views_buckets_lend_nothing(group: Group) -> None:
    layout = layout_of(parameters(4), grads_are_views=False)
    layout.settle(group, header_rides=False)
    assert not layout.buckets[0].lends


def test_the_header_rides_behind_the_last_bucket_alone(group: Group) -> None:
    layout = layout_of(parameters(300, 300))
    layout.follow([0, 1])
    layout.settle(group, header_rides=True)
    sizes = [bucket.buffer.numel() for bucket in layout.buckets]
    assert sizes[0] == 300
    assert sizes[1] > 300
    alone = layout_of(parameters(300, 300))
    alone.follow([0, 1])
    alone.settle(group, header_rides=False)
    assert [bucket.buffer.numel() for bucket in alone.buckets] == [300, 300]


def test_a_sparse_gradient_has_a_bucket_that_carries_no_header(group: Group) -> None:
    layout = layout_of(parameters(4, 4), (False, True))
    assert layout.carries_header([0])
    assert not layout.carries_header([1])
    layout.settle(group, header_rides=True)
    kinds = {type(bucket) for bucket in layout.buckets if held(layout)[bucket.index] == [1]}
    assert kinds == {SparseBucket}


def test_gradients_travel_in_the_type_that_was_asked_for(group: Group) -> None:
    layout = layout_of(parameters(4), dtype=torch.float16)
    layout.settle(group, header_rides=False)
    assert layout.buckets[0].buffer.dtype == torch.float16


def test_sharded_buckets_keep_to_one_plan_and_carry_no_header(group: Group) -> None:
    layout = layout_of(parameters(300, 300, 300))
    layout.follow([0, 1, 2])
    layout.scatter()
    assert layout.scattered
    assert not layout.rebuilds
    assert layout.plan == ((2,), (1,), (0,))
    assert not layout.carries_header([0])
    layout.settle(group, header_rides=True)
    assert {type(bucket) for bucket in layout.buckets} == {ScatteredBucket}
    layout.forget()
    assert layout.plan == ((2,), (1,), (0,))


# The order that ranks agree on.


def test_of_a_gradient_that_comes_twice_the_last_time_counts() -> None:
    assert last_times([3, 1, 3, 2, 1]) == [3, 2, 1]
    assert last_times([]) == []


def test_all_ranks_follow_the_order_of_rank_0() -> None:
    orders = ([2, 0, 2], [0, 1, 2], [1])

    def one_rank(group: Group) -> list[int]:
        return agreed_order(group, orders[group.rank()], 3, CPU)

    assert run_ranks(3, one_rank) == [[0, 2]] * 3
