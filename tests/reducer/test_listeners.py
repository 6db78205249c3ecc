"""Listeners: which parameters have hooks, and what is left of those that are gone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline._reducer import Reducer
from paceline._reducer.listeners import spread
from paceline.groups import Group
from paceline.policies import BucketCaps, Reduction
from paceline.testing import run_ranks

MANY = 30


def alone(check: Callable[[Group], None]) -> None:
    """Run ``check`` in a group of one that averages all the same."""
    run_ranks(1, check)


def reducer_of(
    group: Group, params: list[nn.Parameter], cap_mb: float = 25, **options: bool
) -> Reducer:
    policy = Reduction(BucketCaps.create(cap_mb, None), even_alone=True)
    names = [f"p{number}" for number in range(len(params))]
    return Reducer(params, names, group, policy, **options)


def parameters(count: int = MANY, size: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for _ in range(count)]


def forward(reducer: Reducer, params: list[nn.Parameter]) -> Tensor:
    reducer.forward_begins()
    loss = torch.stack([(param * param).sum() for param in params]).sum()
    reducer.forward_ends([loss], averaged=True)
    return loss


def hooks(params: list[nn.Parameter]) -> list[tuple[int, int]]:
    """By parameter, how many there are before and behind its gradient."""
    return [
        (len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())) for p in params
    ]


def test_every_parameter_is_listened_to_until_the_order_is_known() -> None:
    def check(group: Group) -> None:
        params = parameters()
        reducer = reducer_of(group, params)
        assert hooks(params) == [(1, 0)] * MANY
        assert [reducer.hooks_on(n) for n in range(MANY)] == [1] * MANY
        assert reducer.listeners.learning
        forward(reducer, params).backward()
        assert not reducer.listeners.learning
        assert len(reducer.listeners.learned) == MANY

    alone(check)


def test_large_gradients_are_taken_as_they_come_in_the_first_pass_too() -> None:
    def check(group: Group) -> None:
        params = [nn.Parameter(torch.ones(300, 300)) for _ in range(3)]
        reducer, held = reducer_of(group, params), []
        loss = forward(reducer, params)
        params[0].register_hook(lambda _grad: held.append([p.grad is None for p in params]))
        loss.backward()  # from the last parameter to the first
        assert held == [[True, True, True]]
        assert hooks(params)[1] == (1, 1)

    alone(check)


def test_after_it_only_a_few_are_and_others_have_no_trace_of_a_hook() -> None:
    def check(group: Group) -> None:
        params = parameters()
        reducer = reducer_of(group, params)
        forward(reducer, params).backward()
        found = hooks(params)
        assert sum(before for before, _ in found) == 4
        assert sum(behind for _, behind in found) == 0  # one bucket, which waits for the end
        assert [p._backward_hooks is None for p in params].count(True) == MANY - 4
        assert found[reducer.listeners.learned[-1]] == (1, 0)

    alone(check)


def test_what_completes_a_bucket_and_what_is_large_has_a_hook_behind_its_gradient() -> None:
    def check(group: Group) -> None:
        params = [*parameters(6), nn.Parameter(torch.ones(300, 300)), *parameters(3)]
        reducer = reducer_of(group, params, cap_mb=16 / 2**20)  # two small ones to a bucket
        forward(reducer, params).backward()
        acting = {n for n, (_, behind) in enumerate(hooks(params)) if behind}
        plan, order = reducer.layout.plan, list(reducer.listeners.learned)
        assert acting == {max(row, key=order.index) for row in plan[:-1]} | {6}

    alone(check)


def test_a_parameter_that_the_pass_did_not_reach_is_listened_to_further() -> None:
    def check(group: Group) -> None:
        params = parameters()
        reducer = reducer_of(group, params)
        forward(reducer, params[5:]).backward()
        assert [before for before, _ in hooks(params)[:5]] == [1] * 5

    alone(check)


def test_a_pass_that_came_through_no_output_makes_it_listen_to_all() -> None:
    def check(group: Group) -> None:
        params = parameters()
        reducer = reducer_of(group, params)
        (2 * torch.stack([param.sum() for param in params]).sum()).backward()
        assert reducer.passes == 1
        assert [before for before, _ in hooks(params)] == [1] * MANY

    alone(check)


def test_without_hooks_nothing_hangs_on_the_parameters() -> None:
    def check(group: Group) -> None:
        params = parameters()
        reducer = reducer_of(group, params, hooks=False)
        assert hooks(params) == [(0, 0)] * MANY
        reducer.forget_plan()
        assert hooks(params) == [(0, 0)] * MANY

    alone(check)


def test_hooks_of_others_stay_when_ours_go() -> None:
    def check(group: Group) -> None:
        params, seen = parameters(2), []
        reducer = reducer_of(group, params)
        params[0].register_hook(lambda grad: seen.append(1))
        params[1].register_post_accumulate_grad_hook(lambda param: seen.append(2))
        reducer.retire()
        assert hooks(params) == [(1, 0), (0, 1)]
        params[0].sum().backward()
        params[1].sum().backward()
        assert seen == [1, 2]
        assert reducer.passes == 0

    alone(check)


@pytest.mark.parametrize("when", ["wrapped", "after a pass", "before backward"])
@pytest.mark.parametrize("large", [True, False])
def test_hooks_behind_a_gradient_that_others_add_find_the_gradient(when: str, large: bool) -> None:
    def check(group: Group) -> None:
        params = [nn.Parameter(torch.ones(300, 300))] if large else parameters(4)
        cap = 25 if large else 8 / 2**20  # one to a bucket
        reducer, seen = reducer_of(group, params, cap_mb=cap), []

        def halve(param: Tensor) -> None:
            seen.append(param.grad is not None)
            param.grad.mul_(0.5)

        def put_on() -> None:
            for param in params:
                param.register_post_accumulate_grad_hook(halve)

        if when == "wrapped":
            put_on()
        forward(reducer, params).backward()
        if when == "after a pass":
            put_on()
        for _ in range(2):
            for param in params:
                param.grad = None
            loss = forward(reducer, params)
            if when == "before backward" and not seen:
                put_on()
            loss.backward()
            assert all(torch.equal(param.grad, torch.ones_like(param)) for param in params)
        assert seen
        assert all(seen)
        assert all(behind <= 2 for _, behind in hooks(params))

    alone(check)


def test_frozen_parameters_are_listened_to_and_stay_frozen() -> None:
    def check(group: Group) -> None:
        params = parameters(3)
        params[1].requires_grad_(False)
        reducer = reducer_of(group, params)
        assert hooks(params) == [(1, 0)] * 3
        assert [p.requires_grad for p in params] == [True, False, True]
        reducer.retire()

    alone(check)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 200])
def test_those_listened_to_are_spread_over_the_order_with_both_its_ends(count: int) -> None:
    order = list(range(count))[::-1]
    chosen = spread(order)
    assert len(chosen) == len(set(chosen)) == min(count, 4)
    if order:
        assert (chosen[0], chosen[-1]) == (order[0], order[-1])
