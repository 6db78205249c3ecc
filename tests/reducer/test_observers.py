"""Who is told of passes, and in which order."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from paceline import new_group
from paceline._reducer import Bucket, Observers, Pass, Reducer
from paceline.groups import Group
from paceline.policies import BucketCaps, Reduction


def reducer_of(params: list[nn.Parameter], ranks: int = 2) -> Reducer:
    group: Group = new_group("fake", store=HashStore(), rank=0, world_size=ranks)
    names = [f"p{index}" for index in range(len(params))]
    return Reducer(params, names, group, Reduction(BucketCaps.create(None, None)))


def some_params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)) for _ in range(2)]


def note_all(observers: Observers, seen: list[str]) -> None:
    observers.on_average(lambda: seen.append("averages"))
    observers.on_end(lambda done: seen.append("end"))
    observers.on_bucket(lambda bucket: seen.append(f"bucket {bucket.index}"))
    observers.on_failure(lambda: seen.append("failure"))


def train(params: list[nn.Parameter]) -> None:
    sum(p.sum() for p in params).backward()  # type: ignore[union-attr]


def test_buckets_come_first_then_the_end_of_the_pass_then_the_averages() -> None:
    params, seen = some_params(), []
    reducer = reducer_of(params)  # held: its parameters do not keep it
    note_all(reducer.observers, seen)
    train(params)
    assert seen == ["bucket 0", "end", "averages"]


def test_a_pass_that_fails_is_told_of_once_and_left_no_gradients() -> None:
    params, seen = some_params(), []
    reducer = reducer_of(params)
    note_all(reducer.observers, seen)
    reducer.observers.on_failure(lambda: seen.append(str([p.grad for p in params])))

    def refuse(bucket: Bucket) -> None:
        raise RuntimeError("not this one")

    reducer.observers.on_bucket(refuse)
    with pytest.raises(RuntimeError, match="not this one"):
        train(params)
    assert seen == ["bucket 0", "failure", "[None, None]"]


def test_a_handle_takes_its_callback_out_even_while_it_is_called() -> None:
    params, seen = some_params(), []
    reducer = reducer_of(params)  # held: its parameters do not keep it
    observers = reducer.observers

    def once(done: Pass) -> None:
        handle.remove()
        seen.append("once")

    handle = observers.on_end(once)
    observers.on_end(lambda done: seen.append("always"))
    train(params)
    train(params)
    assert seen == ["once", "always", "always"]


def test_one_rank_makes_averages_only_while_somebody_waits_for_them() -> None:
    reducer = reducer_of(some_params(), ranks=1)
    reducer.observers.on_end(lambda done: None)
    reducer.observers.on_failure(lambda: None)
    assert not reducer.averages
    for subscribe in (reducer.observers.on_average, reducer.observers.on_bucket):
        handle = subscribe(lambda *said: None)  # type: ignore[operator]
        assert reducer.averages
        handle.remove()
        assert not reducer.averages


def test_a_graph_that_hands_gradients_over_has_ended_before_the_end_of_its_pass_is_told() -> None:
    params, seen = some_params(), []
    reducer = reducer_of(params)
    note_all(reducer.observers, seen)
    reducer.handed.plan_ahead()
    reducer.handed.take([1, 0], [torch.ones(3), torch.ones(3)])
    reducer.handed.average()
    assert seen == ["bucket 0", "averages"]
    reducer.handed.graph_ended()
    reducer.handed.graph_ended()
    assert seen == ["bucket 0", "averages", "end"]


def test_a_successor_goes_on_with_the_observers_weights_and_expectations() -> None:
    params, seen = some_params(), []
    first = reducer_of(params)
    note_all(first.observers, seen)
    first.expect_no_backward()
    second = first.successor(params[:1], ["p0"], [False])
    assert second.observers is first.observers
    assert second.ledger is first.ledger  # layers that normalize over ranks hold it
    assert not second.expects_backward
    second.expect_backward([])
    train(params)
    assert seen == ["bucket 0", "end", "averages"]  # of the second alone
    assert (first.passes, second.passes) == (0, 1)


def test_a_reducer_without_hooks_puts_none_on_parameters_even_when_it_moves() -> None:
    params, begun = some_params(), []
    group: Group = new_group("fake", store=HashStore(), rank=0, world_size=2)
    policy = Reduction(BucketCaps.create(None, None))
    reducer = Reducer(params, ["p0", "p1"], group, policy, hooks=False)
    reducer.move_to(new_group("fake", store=HashStore(), rank=0, world_size=3))
    assert [reducer.hooks_on(index) for index in range(2)] == [0, 0]
    train(params)
    assert reducer.passes == 0
    params[0].register_post_accumulate_grad_hook(lambda _: begun.append(reducer.begin()))
    train(params)
    assert (begun, reducer.passes) == ([True], 1)
