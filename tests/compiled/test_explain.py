"""Reading a step's schedule without running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed import HashStore, ReduceOp

from paceline import DistributedDataParallel, Group, current_process_group, new_group
from paceline.compiled import UNAVAILABLE, explain
from paceline.errors import NotPlannedError

pytestmark = [
    pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE),
    # Dynamo makes an object of every autograd.Function it traces
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def real(size: int = 2) -> Group:
    return new_group("fake", store=HashStore(), rank=0, world_size=size)


class Averaged(torch.autograd.Function):
    """Identity whose gradient is averaged over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        ctx.group.all_reduce(grad, ReduceOp.AVG, async_op=True).wait()
        return grad, None


def test_a_step_lists_its_collectives_in_order_for_any_number_of_ranks() -> None:
    def step(x: Tensor, group: Group) -> Tensor:
        y = x * 2
        group.all_reduce(y)
        out = y.new_empty(group.size() * y.numel())
        group.all_gather_single(out, y)
        group.barrier()
        return out.sum()

    for size in (2, 1024):
        plan = explain(step, torch.ones(8), real(), world_size=size)
        assert [c.kind for c in plan.collectives] == ["all_reduce", "all_gather_single", "barrier"]
        assert [c.nbytes for c in plan.collectives] == [32, 32, 0]
        assert {c.ranks for c in plan.collectives} == {size}
        assert plan.collectives[0].wire_bytes == pytest.approx(2 * 32 * (size - 1) / size)
        assert plan.collectives[1].wire_bytes == 32 * (size - 1)
        assert plan.nbytes == 64


def test_each_collective_says_what_it_waits_for() -> None:
    def step(x: Tensor, group: Group) -> Tensor:
        a, b = x.sin(), x.cos()
        group.all_reduce(a)
        group.all_reduce(b)
        c = a * b
        group.all_reduce(c, ReduceOp.MAX)
        return c

    first, second, third = explain(step, torch.ones(2), real(), world_size=8).collectives
    assert (first.waits_for, second.waits_for, third.waits_for) == ((), (), (0, 1))
    assert first.after.startswith("sin")
    assert second.after.startswith("cos")
    assert third.after.startswith("mul")
    assert third.reduction == "max"


def test_what_is_computed_between_start_and_wait_is_counted() -> None:
    def step(x: Tensor, group: Group) -> Tensor:
        y = x * 2
        work = group.all_reduce(y, async_op=True)
        z = x.sin().cos().view(-1)
        work.wait()
        return y + z

    (only,) = explain(step, torch.ones(2), real(), world_size=4).collectives
    assert only.meanwhile == 2  # a view computes nothing


def test_the_backward_pass_is_part_of_the_schedule() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(x: Tensor, group: Group) -> Tensor:
        return Averaged.apply(second(Averaged.apply(first(x), group)), group).sum()

    plan = explain(step, torch.ones(3, 4), real(), world_size=16)
    assert [c.phase for c in plan.collectives] == ["backward", "backward"]
    assert plan.collectives[1].waits_for == (0,)
    assert first.weight.grad is None


def test_a_step_that_calls_autograd_itself_is_read_too() -> None:
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> Any:
        grads = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        for grad in grads:
            current_process_group().all_reduce(grad, ReduceOp.AVG)
        return grads

    plan = explain(step, torch.ones(3, 4), world_size=64)
    assert [c.nbytes for c in plan.collectives] == [64, 16]
    assert {c.ranks for c in plan.collectives} == {64}


def test_the_gradients_of_a_compiled_wrapper_are_listed_with_their_bytes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    ddp = DistributedDataParallel(model, process_group=real(2))
    plan = explain(lambda x: ddp(x).sum(), torch.ones(3, 4), world_size=1024)
    assert {c.kind for c in plan.collectives} == {"gradients"}
    assert {(c.phase, c.ranks) for c in plan.collectives} == {("backward", 1024)}
    assert plan.nbytes == sum(p.nbytes for p in model.parameters())


def test_functional_collectives_are_listed_by_our_names() -> None:
    group = real(2).register("explained")

    def step(x: Tensor) -> Tensor:
        return functional.all_reduce(x * 2, "sum", group) + 1

    try:
        (only,) = explain(step, torch.ones(4)).collectives
    finally:
        group.unregister()
    assert (only.kind, only.reduction, only.nbytes, only.ranks) == ("all_reduce", "sum", 16, 2)


def test_nothing_is_run_and_nothing_is_sent() -> None:
    group = real()
    calls: list[str] = []
    group.register_hooks(before=lambda call: calls.append(call.kind))
    seen: list[int] = []

    def step(x: Tensor, group: Group) -> Tensor:
        seen.append(1)
        x.add_(1)
        group.all_reduce(x)
        return x

    x = torch.zeros(2)
    assert len(explain(step, x, group).collectives) == 1
    assert (calls, seen) == ([], [])
    assert torch.equal(x, torch.zeros(2))


def test_a_step_that_holds_another_group_is_refused_with_its_line() -> None:
    held = real(2)

    def step(x: Tensor) -> Tensor:
        y = x * 1
        held.all_reduce(y)
        return y

    with pytest.raises(NotPlannedError, match=r"2 ranks, not 64.*test_explain\.py"):
        explain(step, torch.ones(2), world_size=64)


def test_a_step_that_is_not_one_graph_is_refused_with_the_reason() -> None:
    def step(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(NotPlannedError, match="not one graph"):
        explain(step, torch.ones(2), world_size=4)


def test_a_schedule_prints_one_line_for_each_collective_and_the_sums() -> None:
    def step(x: Tensor, group: Group) -> Tensor:
        y = x * 1
        dist.all_reduce(y, group=group)
        return y

    lines = str(explain(step, torch.ones(2), real(), world_size=4)).splitlines()
    assert lines[0].startswith("#0   forward  all_reduce")
    assert "test_explain.py:" in lines[0]
    assert lines[1] == "1 collectives, 8 bytes given, 12 sent"
