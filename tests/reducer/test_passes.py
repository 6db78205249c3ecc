"""A pass: its states, and what it knows of gradients without being told."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from paceline._reducer.passes import Before, Pass, Role, State
from paceline.errors import PassStateError

LIFE = (
    State.WAITING,
    State.LEARNING,
    State.FILLING,
    State.EXCHANGING,
    State.SENT,
    State.AWAITING,
    State.ENDED,
)


def parameters(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def backward(*params: nn.Parameter) -> None:
    torch.stack([param.sum() for param in params]).sum().backward()


# States.


def test_a_pass_goes_through_its_states_in_order() -> None:
    running = Pass()
    for state in LIFE[1:]:
        running.move(state)
    assert running.state is State.ENDED


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_a_state_never_follows_itself_or_an_earlier_one(before: State, after: State) -> None:
    running = Pass(state=before)
    order = list(State)
    if order.index(after) <= order.index(before):
        with pytest.raises(PassStateError, match=f"is {before.name}, and {after.name} cannot"):
            running.move(after)
        assert running.state is before


@pytest.mark.parametrize("over", [State.ENDED, State.FAILED])
def test_nothing_follows_the_end(over: State) -> None:
    for state in State:
        with pytest.raises(PassStateError):
            Pass(state=over).move(state)


def test_gradients_that_left_cannot_be_said_not_to_have_been() -> None:
    with pytest.raises(PassStateError):
        Pass(state=State.FILLING).move(State.ENDED)


def test_other_ranks_may_wait_for_a_pass_that_fills_exchanges_or_is_awaited() -> None:
    begun = [state for state in State if Pass(state=state).has_begun]
    assert begun == [State.FILLING, State.EXCHANGING, State.SENT, State.AWAITING]


def test_the_first_arrival_begins_to_learn_and_every_one_is_counted() -> None:
    running = Pass()
    for number in (2, 0, 2):
        running.note_arrival(number)
    assert running.state is State.LEARNING
    assert (running.arrival, running.seen[2]) == ([2, 0, 2], 2)


def test_the_first_failure_is_the_one_that_is_raised_and_told() -> None:
    running = Pass()
    running.fail(ValueError("first"), "as told")
    running.fail(ValueError("second"))
    assert (str(running.failure), running.trouble) == ("first", "as told")


def test_who_stands_in_gives_nothing() -> None:
    assert [Pass(role).gives for role in Role] == [True, True, False]


# What .grad held before.


def test_a_gradient_has_come_where_there_was_none() -> None:
    params = parameters()
    before = Before(params)
    assert not before
    assert not before.came(params)
    backward(params[1])
    assert before.came(params)
    assert [before.differs(n, p.grad) for n, p in enumerate(params)] == [False, True, False]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_gradient_that_is_added_to_one_has_come(fresh: bool) -> None:
    params = parameters()
    backward(*params)
    before = Before(params)
    assert before
    if fresh:
        params[2].grad = None
    backward(params[2])
    assert [before.differs(n, p.grad) for n, p in enumerate(params)] == [False, False, True]
    assert before.untouched(params) == {0, 1}


def test_a_gradient_that_was_cleared_in_place_and_came_again_has_come() -> None:
    params = parameters(1)
    backward(*params)
    params[0].grad.zero_()
    before = Before(params)
    assert not before.came(params)
    backward(*params)
    assert before.came(params)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_gradients_is_no_hindrance() -> None:
    params = parameters(1)
    (params[0] ** 2).sum().backward(create_graph=True)
    before = Before(params)
    (params[0] ** 2).sum().backward(create_graph=True)
    assert before.came(params)


def test_a_gradient_made_in_inference_mode_is_held_without_a_version() -> None:
    params = parameters(2)
    with torch.inference_mode():
        params[0].grad = torch.zeros(2)
    before = Before(params)
    assert before.untouched(params) == {0}


def test_only_the_chosen_ones_count_as_held() -> None:
    params = parameters()
    backward(*params)
    before = Before(params, only={1})
    assert [before.differs(n, p.grad) for n, p in enumerate(params)] == [True, False, True]
