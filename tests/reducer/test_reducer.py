"""Reducer: passes from their first sign to their end, with ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline._reducer import Reducer
from paceline._reducer.passes import State
from paceline.errors import PeerError
from paceline.groups import Group
from paceline.policies import BucketCaps, Reduction
from paceline.testing import run_ranks

MANY = 12


def reducer_of(group: Group, count: int = MANY, cap_mb: float = 25, **options: Any) -> Reducer:
    params = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    policy = Reduction(BucketCaps.create(cap_mb, None))
    return Reducer(params, [f"p{n}" for n in range(count)], group, policy, **options)


def forward(
    reducer: Reducer, value: float, used: slice = slice(None), *, fails: bool = False
) -> Tensor:
    """A loss; ``fails``: its backward pass raises before it comes to a parameter."""
    reducer.make_good()
    reducer.begin_step()
    reducer.forward_begins()
    sums = torch.stack([param.sum() for param in reducer.params[used]])
    if fails:
        sums.register_hook(_stop)
    loss = value * sums.sum()
    reducer.forward_ends([loss], averaged=True)
    return loss


def clear(reducer: Reducer) -> None:
    for param in reducer.params:
        param.grad = None


def found(reducer: Reducer) -> list[float | None]:
    return [None if p.grad is None else p.grad[0].item() for p in reducer.params]


SMALL = 16 / 2**20  # MiB: two parameters to a bucket


@pytest.mark.parametrize("cap_mb", [25, SMALL])
def test_gradients_are_averaged_pass_after_pass(cap_mb: float) -> None:
    def one_rank(group: Group) -> list[list[float | None]]:
        reducer, seen = reducer_of(group, cap_mb=cap_mb), []
        for step in range(4):
            clear(reducer)
            forward(reducer, step + group.rank()).backward()
            seen.append(found(reducer))
        assert len(reducer.buckets) == (1 if cap_mb == 25 else MANY // 2)
        return seen

    for seen in run_ranks(2, one_rank):
        assert seen == [[step + 0.5] * MANY for step in range(4)]


@pytest.mark.parametrize("cap_mb", [25, SMALL])
def test_what_was_held_before_is_averaged_with_what_comes(cap_mb: float) -> None:
    def one_rank(group: Group) -> list[float | None]:
        reducer = reducer_of(group, cap_mb=cap_mb)
        for _ in range(3):
            clear(reducer)
            forward(reducer, 1.0).backward()
        for param in reducer.params[3:]:
            param.grad = torch.full((2,), 10.0 * group.rank())
        forward(reducer, 2.0).backward()
        return found(reducer)

    for seen in run_ranks(2, one_rank):
        assert seen == [3.0] * 3 + [7.0] * (MANY - 3)


def test_gradients_cleared_in_place_are_averaged_as_well() -> None:
    def one_rank(group: Group) -> list[list[float | None]]:
        reducer, seen = reducer_of(group, cap_mb=SMALL), []
        for step in range(4):
            for param in reducer.params:
                if param.grad is not None:
                    param.grad.zero_()
            forward(reducer, step + group.rank()).backward()
            seen.append(found(reducer))
        return seen

    for seen in run_ranks(2, one_rank):
        assert seen == [[step + 0.5] * MANY for step in range(4)]


def test_parameters_that_one_rank_did_not_reach_get_the_share_of_the_others() -> None:
    def one_rank(group: Group) -> list[list[float | None]]:
        reducer, seen = reducer_of(group, cap_mb=SMALL), []
        for step in range(3):
            clear(reducer)
            used = slice(None) if group.rank() == step % 2 else slice(4)
            forward(reducer, 2.0, used).backward()
            seen.append(found(reducer))
        return seen

    for seen in run_ranks(2, one_rank):
        assert seen == [[2.0] * 4 + [1.0] * (MANY - 4)] * 3


def test_what_no_rank_reached_stays_without_a_gradient() -> None:
    def one_rank(group: Group) -> list[float | None]:
        reducer = reducer_of(group)
        for _ in range(3):
            clear(reducer)
            forward(reducer, 1.0, slice(5)).backward()
        return found(reducer)

    for seen in run_ranks(2, one_rank):
        assert seen == [1.0] * 5 + [None] * (MANY - 5)


def test_autograd_grad_is_no_pass() -> None:
    def one_rank(group: Group) -> None:
        reducer = reducer_of(group)
        for _ in range(2):  # while it learns, and after
            loss = forward(reducer, 1.0)
            torch.autograd.grad(loss, reducer.params)
            assert reducer.runner.current is None
            clear(reducer)
            forward(reducer, 1.0).backward()
        assert reducer.passes == 2

    run_ranks(2, one_rank)


def test_a_pass_that_is_not_wanted_leaves_gradients_here() -> None:
    def one_rank(group: Group) -> list[list[float | None]]:
        wanted = [True]
        reducer = reducer_of(group, wanted=lambda: wanted[0])
        seen = []
        for step in range(4):
            clear(reducer)
            wanted[0] = step % 2 == 0
            forward(reducer, 1.0 + group.rank()).backward()
            seen.append(found(reducer))
        assert reducer.passes == 2
        return seen

    for rank, seen in enumerate(run_ranks(2, one_rank)):
        assert seen == [[1.5] * MANY, [1.0 + rank] * MANY] * 2


def test_a_backward_pass_that_failed_is_made_good_before_its_first_gradient_too() -> None:
    def one_rank(group: Group) -> str:
        reducer = reducer_of(group)
        forward(reducer, 1.0).backward()
        clear(reducer)
        loss = forward(reducer, 1.0, fails=group.rank() == 0)
        told = ""
        if group.rank() == 0:
            with pytest.raises(ArithmeticError):
                loss.backward()
        else:
            with pytest.raises(PeerError) as caught:
                loss.backward()
            told = str(caught.value)
        clear(reducer)
        forward(reducer, 1.0 + group.rank()).backward()
        assert found(reducer) == [1.5] * MANY
        return told

    assert "its backward pass failed halfway" in run_ranks(2, one_rank)[1]


# Giving up.


def give_up_the_third_pass(reducer: Reducer) -> None:
    """It raises at a parameter, when buckets may have left."""
    for _ in range(2):
        clear(reducer)
        forward(reducer, 1.0).backward()
    clear(reducer)
    stop = reducer.params[0].register_hook(_stop)
    with pytest.raises(ArithmeticError):
        forward(reducer, 100.0).backward()
    stop.remove()
    reducer.give_up(ArithmeticError("stopped"))
    assert reducer.runner.current is None


@pytest.mark.parametrize("cap_mb", [25, SMALL])
def test_a_pass_that_all_ranks_give_up_can_be_done_again(cap_mb: float) -> None:
    def one_rank(group: Group) -> list[float | None]:
        reducer = reducer_of(group, cap_mb=cap_mb)
        give_up_the_third_pass(reducer)
        clear(reducer)
        forward(reducer, 1.0 + group.rank()).backward()
        return found(reducer)

    assert run_ranks(2, one_rank) == [[1.5] * MANY] * 2


def test_a_pass_is_done_again_by_other_ranks() -> None:
    def one_rank(group: Group) -> list[float | None]:
        reducer = reducer_of(group, cap_mb=SMALL)
        give_up_the_third_pass(reducer)
        rest = group.split_group([0, 1])
        if rest is None:
            return []
        reducer.move_to(rest)
        clear(reducer)
        forward(reducer, 1.0 + group.rank()).backward()
        return found(reducer)

    assert run_ranks(3, one_rank) == [[1.5] * MANY, [1.5] * MANY, []]


def test_giving_up_where_nothing_runs_changes_nothing() -> None:
    def one_rank(group: Group) -> None:
        reducer = reducer_of(group)
        forward(reducer, 1.0).backward()
        reducer.give_up(ArithmeticError("no reason"))
        assert found(reducer) == [1.0] * MANY

    run_ranks(2, one_rank)


def _stop(_grad: Tensor) -> None:
    raise ArithmeticError("stopped")


def test_the_states_of_a_pass_are_seen_from_hooks() -> None:
    def one_rank(group: Group) -> list[State]:
        reducer = reducer_of(group, cap_mb=SMALL)
        for _ in range(2):
            clear(reducer)
            forward(reducer, 1.0).backward()
        clear(reducer)
        states: list[State] = []
        order = reducer.listeners.learned
        for number in (order[0], order[-1]):
            reducer.params[number].register_hook(
                lambda _grad: states.append(reducer.runner.running.state)
            )
        loss = forward(reducer, 1.0)
        assert reducer.runner.current is None
        reducer.observers.on_end(lambda done: states.append(done.state))
        loss.backward()
        return states

    for states in run_ranks(2, one_rank):
        assert states == [State.WAITING, State.FILLING, State.AWAITING]
