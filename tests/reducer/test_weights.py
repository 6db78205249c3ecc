"""The ledger of weights: what a rank owes to the next average. No group, no process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from paceline._reducer.weights import Ledger

COUNTS = st.sampled_from([0.0, 0.5, 1.0, 3.0, 64.0])
VALUES = st.integers(1, 8).map(float)  # plain ones that cancel look as if they were cleared


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def backward(params: list[nn.Parameter], *values: float | None) -> None:
    """Add to ``.grad`` as autograd does; None: the loss did not use that parameter."""
    for param, value in zip(params, values, strict=True):
        if value is not None:
            grad = torch.full_like(param, value)
            param.grad = grad if param.grad is None else param.grad + grad


def run_pass(ledger: Ledger, params: list[nn.Parameter], *values: float | None) -> None:
    """One pass on this rank whose gradients are not averaged: weighted if that was asked for."""
    if ledger.weighs:
        ledger.begin(params)
        backward(params, *values)
        ledger.end(params)
    else:
        backward(params, *values)
        ledger.plain += 1


def send(ledger: Ledger, params: list[nn.Parameter], *values: float | None) -> float:
    """The pass that is averaged, up to where its gradients leave; returns their weight."""
    if not ledger.weighs:
        backward(params, *values)
        return 1.0
    ledger.begin(params)
    backward(params, *values)
    for index, param in enumerate(params):
        ledger.give(index, param)
    return ledger.owed() * ledger.unit


def value_of(param: nn.Parameter) -> float | None:
    return None if param.grad is None else float(param.grad[0])


# One pass.


def test_without_a_count_passes_are_plain_and_count_as_one() -> None:
    ledger = Ledger()
    assert not ledger.weighs
    assert not ledger.counts
    assert (ledger.weight, ledger.owed()) == (1.0, 1.0)


def test_gradients_leave_multiplied_by_their_count() -> None:
    ledger, params = Ledger(explicit=3.0), parameters(2, 1)
    assert send(ledger, params, 2.0, -1.0) == 3.0
    assert ledger.counts
    assert [value_of(param) for param in params] == [6.0, -3.0]


def test_a_count_of_nothing_leaves_nothing_whatever_the_gradient_is() -> None:
    ledger, params = Ledger(explicit=0.0), parameters(1)
    assert send(ledger, params, math.nan) == 0.0
    assert params[0].grad is None


def test_a_parameter_that_was_not_used_stays_without_a_gradient() -> None:
    ledger, params = Ledger(explicit=3.0), parameters(1, 1)
    send(ledger, params, None, 1.0)
    assert [value_of(param) for param in params] == [None, 3.0]


@pytest.mark.parametrize("once", [True, False])
def test_a_count_for_one_pass_is_gone_after_it_and_that_of_a_context_stays(once: bool) -> None:
    ledger, params = Ledger(explicit=2.0, once=once), parameters(1)
    run_pass(ledger, params, 1.0)
    assert ledger.explicit == (None if once else 2.0)
    assert not ledger.open


# Several passes before an average.


def test_passes_add_up_each_by_its_count() -> None:
    ledger, params = Ledger(explicit=2.0), parameters(1)
    run_pass(ledger, params, 1.0)
    ledger.explicit = 3.0
    assert send(ledger, params, 10.0) == 5.0
    assert value_of(params[0]) == 2.0 * 1.0 + 3.0 * 10.0


def test_plain_passes_before_a_weighted_one_count_as_one_each() -> None:
    ledger, params = Ledger(), parameters(1)
    run_pass(ledger, params, 1.0)
    run_pass(ledger, params, 4.0)
    ledger.explicit = 3.0
    assert send(ledger, params, 10.0) == 5.0
    assert value_of(params[0]) == 1.0 + 4.0 + 3.0 * 10.0


def test_a_plain_pass_after_weighted_ones_counts_as_one() -> None:
    ledger, params = Ledger(explicit=3.0, once=True), parameters(1)
    run_pass(ledger, params, 2.0)
    assert ledger.weighs  # since something is owed
    assert send(ledger, params, 5.0) == 4.0
    assert value_of(params[0]) == 3.0 * 2.0 + 5.0


def test_a_parameter_that_only_an_earlier_pass_used_keeps_what_it_left() -> None:
    ledger, params = Ledger(explicit=2.0), parameters(1, 1)
    run_pass(ledger, params, 1.0, None)
    send(ledger, params, None, 5.0)
    assert [value_of(param) for param in params] == [2.0, 10.0]


@pytest.mark.parametrize("to_none", [True, False])
def test_what_the_user_has_cleared_is_not_owed(to_none: bool) -> None:
    ledger, params = Ledger(explicit=2.0), parameters(1, 1)
    run_pass(ledger, params, 1.0, 7.0)
    for param in params:
        if to_none:
            param.grad = None
        else:
            param.grad.zero_()
    assert not ledger.owes(params)
    assert send(ledger, params, 4.0, 5.0) == 2.0
    assert [value_of(param) for param in params] == [8.0, 10.0]


def test_gradients_that_are_zero_by_themselves_are_still_owed() -> None:
    ledger, params = Ledger(explicit=2.0), parameters(1)
    run_pass(ledger, params, 0.0)
    assert ledger.owes(params)
    assert send(ledger, params, 3.0) == 4.0


def test_clipping_what_was_gathered_does_not_make_it_forgotten() -> None:
    ledger, params = Ledger(explicit=2.0), parameters(1)
    run_pass(ledger, params, 4.0)
    params[0].grad.mul_(0.5)
    assert ledger.owes(params)
    assert send(ledger, params, 1.0) == 4.0
    assert value_of(params[0]) == 4.0 + 2.0


# What was held before.


def test_what_was_held_leaves_with_the_weight_of_all_passes_so_that_it_counts_once() -> None:
    ledger, params = Ledger(explicit=3.0), parameters(1, 1)
    params[0].grad = torch.full((1,), 100.0)
    run_pass(ledger, params, 2.0, 1.0)
    ledger.explicit = 2.0
    assert send(ledger, params, 7.0, 1.0) == 5.0
    assert value_of(params[0]) == 3.0 * 2.0 + 2.0 * 7.0 + 5.0 * 100.0
    assert value_of(params[1]) == 5.0


def test_it_leaves_alone_where_no_pass_left_a_gradient() -> None:
    ledger, params = Ledger(explicit=3.0), parameters(1, 1)
    params[0].grad = torch.full((1,), 100.0)
    ledger.begin(params)
    backward(params, None, 1.0)
    assert [ledger.give(0, params[0]), ledger.give(1, params[1])] == [True, False]
    assert [value_of(param) for param in params] == [300.0, 3.0]


def test_a_rank_that_counts_nothing_gives_nothing_of_it() -> None:
    ledger, params = Ledger(explicit=0.0), parameters(1)
    params[0].grad = torch.full((1,), 100.0)
    ledger.begin(params)
    backward(params, math.nan)
    assert ledger.give(0, params[0])
    assert params[0].grad is None
    assert ledger.base[0].item() == 100.0


def test_what_no_bucket_sent_comes_back() -> None:
    ledger, params = Ledger(explicit=3.0), parameters(1, 1)
    backward(params, 100.0, 7.0)
    ledger.begin(params)
    ledger.give(0, params[0])
    ledger.settle(params, {0})
    assert [value_of(param) for param in params] == [300.0, 7.0]
    assert not ledger.open
    assert (ledger.total, ledger.base) == (0.0, {})


def test_it_comes_back_after_a_pass_that_counted_nothing() -> None:
    ledger, params = Ledger(explicit=0.0, once=True), parameters(1)
    params[0].grad = torch.full((1,), 100.0)
    run_pass(ledger, params, math.nan)
    assert not ledger.weighs
    assert value_of(params[0]) == 100.0
    assert ledger.base == {}


def test_it_is_put_aside_in_memory_of_its_own() -> None:
    """The pass uses that of the buckets, which ``.grad`` was a stretch of."""
    ledger, params = Ledger(explicit=3.0), parameters(1)
    bucket = torch.full((1,), 100.0)
    params[0].grad = bucket
    ledger.begin(params)
    bucket.zero_()
    ledger.give(0, params[0])
    assert value_of(params[0]) == 300.0


@pytest.mark.parametrize("gathered", [True, False])
def test_a_pass_that_did_not_come_puts_everything_back(gathered: bool) -> None:
    ledger, params = Ledger(explicit=3.0), parameters(1, 1)
    if gathered:
        run_pass(ledger, params, 5.0, None)
    else:
        params[0].grad = torch.full((1,), 15.0)
    ledger.begin(params)
    assert params[0].grad is None
    ledger.cancel(params)
    assert [value_of(param) for param in params] == [15.0, None]
    assert not ledger.open
    assert ledger.owes(params) is gathered


def test_a_pass_that_did_not_come_leaves_what_was_gathered_on_top_of_what_was_held() -> None:
    ledger, params = Ledger(explicit=3.0), parameters(1, 1)
    params[0].grad = torch.full((1,), 100.0)
    run_pass(ledger, params, 2.0, 1.0)
    ledger.begin(params)
    ledger.cancel(params)
    assert [value_of(param) for param in params] == [6.0, 3.0]
    assert send(ledger, params, 4.0, 1.0) == 6.0
    assert [value_of(param) for param in params] == [6.0 + 12.0 + 6.0 * 100.0, 6.0]


@pytest.mark.parametrize("held", [None, 0.0])
def test_half_a_pass_that_failed_is_no_part_of_what_was_gathered(held: float | None) -> None:
    ledger, params = Ledger(explicit=3.0), parameters(1, 1)
    params[0].grad = torch.ones(1)
    params[1].grad = None if held is None else torch.full((1,), held)
    run_pass(ledger, params, 2.0, None)  # the second is not reached
    ledger.begin(params)
    params[1].grad = torch.full((1,), 50.0)
    ledger.cancel(params)
    assert value_of(params[0]) == 6.0
    assert params[1].grad is None


def test_after_an_average_nothing_is_owed() -> None:
    ledger, params = Ledger(explicit=3.0, once=True), parameters(1)
    run_pass(ledger, params, 1.0)
    send(ledger, params, 1.0)
    ledger.forget()
    assert not ledger.weighs
    assert ledger.owed() == 1.0
    assert (ledger.gathered, ledger.base) == ({}, {})


@pytest.mark.parametrize("plain", [True, False])
def test_what_was_held_stays_with_its_parameter_when_others_come_and_go(plain: bool) -> None:
    ledger, (a, b, c) = Ledger(explicit=None if plain else 3.0, used=True), parameters(1, 2, 3)
    a.grad, b.grad = torch.full((1,), 50.0), torch.full((2,), 100.0)
    if plain:
        ledger.begin_plain([a, b])
        backward([a, b], 2.0, 2.0)
        ledger.keep_plain([a, b])
    else:
        run_pass(ledger, [a, b], 2.0, 2.0)
    ledger.follow([a, b], [c, b])
    assert value_of(a) == 50.0 + 2.0  # the mean of its passes
    ledger.explicit = 1.0
    weight = send(ledger, [c, b], 4.0, 4.0)
    gathered = 2.0 if plain else 6.0
    assert [value_of(c), value_of(b)] == [4.0, gathered + 4.0 + weight * 100.0]


def test_what_is_zero_is_owed_until_it_is_cleared_when_others_come_too() -> None:
    ledger, (a, b) = Ledger(explicit=3.0), parameters(1, 2)
    run_pass(ledger, [b], 0.0)
    ledger.follow([b], [a, b])
    assert ledger.owes([a, b])  # zero by itself
    b.grad.zero_()
    assert not ledger.owes([a, b])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11: the first in a process
def test_sparse_gradients_are_weighted_and_looked_into() -> None:
    def rows(value: float) -> Tensor:
        return torch.sparse_coo_tensor([[1]], [[value, value]], (3, 2), check_invariants=True)

    ledger, param = Ledger(explicit=2.0), nn.Parameter(torch.zeros(3, 2))
    ledger.begin([param])
    param.grad = rows(4.0)
    ledger.end([param])
    assert ledger.owes([param])
    assert_close(param.grad.to_dense()[1], torch.full((2,), 8.0))
    param.grad = rows(0.0)
    assert not ledger.owes([param])


# Units.


def test_counts_travel_in_units_that_all_ranks_choose_alike() -> None:
    ledger, params = Ledger(explicit=1000.0), parameters(1)
    ledger.choose_unit(1000.0)
    assert ledger.unit == 1024.0
    ledger.begin(params)
    assert ledger.owed() == 1000.0 / 1024.0
    ledger.choose_unit(ledger.owed())
    assert ledger.unit == 1024.0  # it fits already


def test_a_plain_pass_in_other_units_says_its_weight_too() -> None:
    ledger = Ledger(unit=8.0)
    assert ledger.counts
    assert ledger.owed() == 1 / 8


@pytest.mark.parametrize("mean", [0.0, -1.0])
def test_a_mean_of_nothing_leaves_the_unit(mean: float) -> None:
    ledger = Ledger(unit=8.0)
    ledger.choose_unit(mean)
    assert ledger.unit == 8.0


@settings(deadline=None)
@given(st.floats(1e-6, 1e9))
def test_in_the_unit_that_is_chosen_counts_are_about_one(count: float) -> None:
    ledger = Ledger()
    ledger.choose_unit(count)
    assert 0.7 < count / ledger.unit < 1.42
    assert math.log2(ledger.unit) == round(math.log2(ledger.unit))


# All of it: the mean over ranks and passes.


PASSES = st.lists(st.tuples(st.none() | COUNTS, VALUES), max_size=3)


Rank = tuple[list[tuple[float | None, float]], tuple[float, float], float | None]
RANKS = st.tuples(PASSES, st.tuples(COUNTS, VALUES), st.none() | VALUES)


@settings(deadline=None, max_examples=60)
@given(st.lists(RANKS, min_size=1, max_size=3))
def test_ranks_give_all_that_they_counted_and_what_they_held_by_their_share(
    ranks: list[Rank],
) -> None:
    """Each rank has passes of its own, of which the last is weighted and averaged."""
    for passes, (last, value), held in ranks:
        ledger, params = Ledger(), parameters(1)
        holds = held is not None and all(count is not None for count, _ in passes)
        if holds:
            params[0].grad = torch.full((1,), held)
        for count, earlier in passes:
            ledger.explicit, ledger.once = count, True
            run_pass(ledger, params, earlier)
        ledger.explicit = last
        total = send(ledger, params, value)
        counted = [(1.0 if count is None else count, v) for count, v in (*passes, (last, value))]
        assert total == sum(count for count, _ in counted)
        given_ = value_of(params[0]) or 0.0
        assert given_ == sum(c * v for c, v in counted) + total * (held if holds else 0.0)
