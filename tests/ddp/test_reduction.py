"""Gradients are averaged: the values, the memory they lie in, and the collectives it takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import batch, grads_of, mean_grads, mlp, seeded, watch

MIB = 1024 * 1024


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    model(batch(rank, step, dtype=dtype)).square().sum().backward()


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Chain(nn.Module):
    """Parameters of 1, 2, 3… elements, used in any order: the last one used arrives first."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order
        self.weights = nn.ParameterList(torch.ones(n + 1) for n in range(len(order)))

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = x * self.weights[number].mean()
        return x


# Values.


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cap", [None, 0.00005])
def test_gradients_are_the_mean_over_ranks_in_every_step(
    ranks: int, dtype: torch.dtype, cap: float | None
) -> None:
    def one_rank(group: Group) -> list[dict[str, Tensor]]:
        model = seeded(mlp).to(dtype)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap)
        found = []
        for step in range(4):
            ddp.zero_grad()
            backward(ddp, group.rank(), step)
            found.append(grads_of(model))
        return found

    model = seeded(mlp).to(dtype)
    for grads in run_ranks(ranks, one_rank):
        for step, found in enumerate(grads):
            expected = mean_grads(model, ranks, lambda m, rank, s=step: backward(m, rank, s))
            assert_close(found, expected)


@settings(max_examples=25, deadline=None)
@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    ranks=st.integers(1, 4),
    cap=st.sampled_from([None, 0.00002, 0.0001]),
    views=st.booleans(),
    unset=st.booleans(),
)
def test_models_of_any_size_train_as_one_process_does_on_all_data(
    widths: list[int], ranks: int, cap: float | None, views: bool, unset: bool
) -> None:
    def make() -> nn.Sequential:
        sizes = [4, *widths]
        return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))).double()

    def train(model: nn.Module, data: list[Tensor]) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for x in data:
            optimizer.zero_grad(set_to_none=unset)
            model(x).tanh().sum(1).mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def one_rank(group: Group) -> list[Tensor]:
        ddp = DistributedDataParallel(
            seeded(make), process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=views
        )
        data = [batch(group.rank(), step, dtype=torch.float64) for step in range(4)]
        return train(ddp, data)

    whole = [
        torch.cat([batch(rank, step, dtype=torch.float64) for rank in range(ranks)])
        for step in range(4)
    ]
    expected = train(seeded(make), whole)
    for found in run_ranks(ranks, one_rank):
        assert_close(found, expected)


@pytest.mark.parametrize("ranks", [3, 10, 11])
def test_a_group_without_an_average_of_its_own_gives_exactly_what_torch_gives(ranks: int) -> None:
    def one_rank(group: Group) -> None:
        group._engine.capabilities = replace(group.capabilities, averages=False)
        model = nn.Linear(8, 1, bias=False)
        ddp = DistributedDataParallel(model, process_group=group)
        x = batch(group.rank(), shape=(1, 8))
        ddp(x).backward()
        expected = x * (1 / ranks)
        group.all_reduce(expected)
        assert torch.equal(model.weight.grad, expected)  # and not divided by 0.99999994

    run_ranks(ranks, one_rank)


class Large(nn.Module):
    """Gradients so large that each is taken as soon as it arrives, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 300)
        self.first = nn.Linear(300, 300)  # 360 kB
        self.second = nn.Linear(300, 300)
        self.again = nn.Linear(300, 300)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second(self.first(self.wide(x)).tanh()).tanh())


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_large_gradients_are_averaged_too(
    views: bool, set_to_none: bool, cap: float | None
) -> None:
    def one_rank(group: Group) -> None:
        ddp = DistributedDataParallel(
            seeded(Large), process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=views
        )
        for _ in range(3):
            ddp.zero_grad(set_to_none=set_to_none)
            backward(ddp, group.rank())
            assert_close(grads_of(ddp.module), expected)
        with ddp.no_sync():
            backward(ddp, group.rank())
        backward(ddp, group.rank())
        assert_close(grads_of(ddp.module), {n: 3 * g for n, g in expected.items()})

    expected = mean_grads(seeded(Large), 2, backward)
    run_ranks(2, one_rank)


# However backward comes to the parameters.


class Box:
    """An output of a kind that nobody can look into."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class Hidden(nn.Module):
    """A loss that ``way`` says how to get at."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.way = way

    def forward(self, x: Tensor) -> object:
        self.loss = (self.weight * x).sum()
        return {"box": Box(self.loss), "leaf": self.weight}.get(self.way)


@pytest.mark.parametrize("way", ["box", "leaf", "attribute", "penalty"])
def test_a_pass_is_averaged_however_backward_comes_to_the_parameters(way: str) -> None:
    def one_rank(group: Group) -> list[float]:
        ddp = DistributedDataParallel(Hidden(way), process_group=group)
        x = torch.tensor(float(group.rank()))
        found = []
        for _ in range(4):
            ddp.zero_grad()
            output = ddp(x)
            if way == "box":
                output.loss.backward()
            elif way == "leaf":
                (output * x).sum().backward()
            elif way == "attribute":
                ddp.module.loss.backward()
            else:
                (ddp.module.weight * x).sum().backward()
            found.append(ddp.module.weight.grad.mean().item())
        return found

    assert run_ranks(2, one_rank) == [[0.5] * 4] * 2


def test_a_penalty_on_the_parameters_alone_is_averaged_after_a_forward_only() -> None:
    def one_rank(group: Group) -> list[float]:
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
        x = torch.full((1, 1), float(group.rank()))
        found = []
        for step in range(4):
            ddp.zero_grad()
            output = ddp(x) if step < 3 else x
            loss = output if step < 2 else ddp.module.weight * x
            loss.sum().backward()
            found.append(ddp.module.weight.grad.item())
        return found

    assert run_ranks(2, one_rank) == [[0.5, 0.5, 0.5, float(rank)] for rank in range(2)]


# Memory.


@pytest.mark.parametrize("set_to_none", [True, False])
def test_grad_is_a_stretch_of_its_bucket_and_stays_one(set_to_none: bool) -> None:
    def one_rank(group: Group) -> None:
        ddp = DistributedDataParallel(mlp(), process_group=group)
        places = []
        for step in range(4):
            ddp.zero_grad(set_to_none=set_to_none)
            backward(ddp, group.rank(), step)
            assert len({storage(p.grad) for p in ddp.parameters()}) == 1
            places.append([p.grad.data_ptr() for p in ddp.parameters()])
        assert places[1] == places[2] == places[3]  # the first pass had another plan

    run_ranks(2, one_rank)


def test_grad_is_the_buckets_own_memory() -> None:
    def one_rank(group: Group) -> None:
        ddp = DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=0.00005)
        for step in range(3):
            backward(ddp, group.rank(), step)
        for bucket in ddp.replica.reducer.buckets:
            assert all(storage(p.grad) == storage(bucket.buffer) for p in bucket.params)

    run_ranks(2, one_rank)


def test_gradients_that_are_kept_move_along_when_buckets_are_laid_out_anew() -> None:
    def one_rank(group: Group) -> None:
        ddp = DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=0.00005)
        backward(ddp, group.rank())
        before = grads_of(ddp)
        ddp(batch(0))
        assert ddp._has_rebuilt_buckets
        assert_close(grads_of(ddp), before, rtol=0, atol=0)
        for bucket in ddp.replica.reducer.buckets:
            assert all(storage(p.grad) == storage(bucket.buffer) for p in bucket.params)

    run_ranks(2, one_rank)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_without_views_every_gradient_has_memory_of_its_own(set_to_none: bool) -> None:
    def one_rank(group: Group) -> None:
        ddp = DistributedDataParallel(mlp(), process_group=group, gradient_as_bucket_view=False)
        for step in range(3):
            ddp.zero_grad(set_to_none=set_to_none)
            before = [p.grad for p in ddp.parameters()]
            backward(ddp, group.rank(), step)
            after = [p.grad for p in ddp.parameters()]
            assert len({storage(grad) for grad in after}) == len(after)
            buffers = {storage(bucket.buffer) for bucket in ddp.replica.reducer.buckets}
            assert not buffers & {storage(grad) for grad in after}
            if step and not set_to_none:  # whoever holds the object sees the average in it
                assert all(a is b for a, b in zip(before, after, strict=True))

    run_ranks(2, one_rank)


def test_a_gradient_put_there_by_hand_is_averaged_too() -> None:
    def one_rank(group: Group) -> float:
        model = nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(model, process_group=group)
        for _ in range(3):
            model.weight.grad = torch.full((1, 1), 10.0 * group.rank())
            ddp(torch.ones(1, 1)).backward()
        return model.weight.grad.item()

    assert run_ranks(2, one_rank) == [6.0, 6.0]


def test_gradients_keep_the_strides_of_their_parameters() -> None:
    def one_rank(group: Group) -> None:
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        ddp = DistributedDataParallel(model, process_group=group)
        for _ in range(3):
            ddp.zero_grad()
            ddp(batch(group.rank(), shape=(2, 3, 5, 5))).sum().backward()
            assert model.weight.grad.stride() == model.weight.stride()
            model.weight.grad.detach_()

    run_ranks(2, one_rank)


# Plans.


def test_buckets_are_rebuilt_in_the_order_of_arrival() -> None:
    def one_rank(group: Group) -> tuple[object, ...]:
        ddp = DistributedDataParallel(
            Chain([1, 3, 0, 2]), process_group=group, bucket_cap_mb=1 / MIB
        )
        for _ in range(2):
            ddp(torch.ones(())).backward()
        return ddp.replica.reducer.layout.plan

    assert run_ranks(2, one_rank) == [((2,), (0,), (3,), (1,))] * 2


def test_ranks_whose_gradients_arrive_in_different_orders_have_one_plan() -> None:
    orders = [[1, 3, 0, 2], [2, 0, 1, 3], [0, 1, 2, 3]]

    def one_rank(group: Group) -> tuple[object, ...]:
        ddp = DistributedDataParallel(
            Chain(orders[group.rank()]), process_group=group, bucket_cap_mb=1 / MIB
        )
        for step in range(4):
            ddp.zero_grad()
            ddp(torch.tensor(float(group.rank()))).backward()
            seen = [p.grad.sum().item() for p in ddp.parameters()]
            assert seen == pytest.approx([1.0] * 4), step
        return ddp.replica.reducer.layout.plan

    assert run_ranks(3, one_rank) == [((2,), (0,), (3,), (1,))] * 3


def test_buckets_leave_in_the_order_of_their_index() -> None:
    def one_rank(group: Group) -> list[tuple[str, int]]:
        ddp = DistributedDataParallel(
            Chain([1, 3, 0, 2] if group.rank() == 0 else [0, 1, 2, 3]),
            process_group=group,
            bucket_cap_mb=1 / MIB,
        )
        ddp(torch.ones(())).backward()
        seen = watch(group)
        for _ in range(2):
            ddp(torch.ones(())).backward()
        return seen

    for seen in run_ranks(2, one_rank):
        assert seen[:4] == seen[4:]
        assert seen[:3] == [("all_reduce", n) for n in (3, 1, 4)]  # then 2, and the header


def test_a_full_bucket_leaves_while_backward_still_runs() -> None:
    def one_rank(group: Group) -> list[Any]:
        ddp = DistributedDataParallel(
            Chain([0, 1, 2, 3]), process_group=group, bucket_cap_mb=1 / MIB
        )
        ddp(torch.ones(())).backward()
        seen = watch(group)
        x = torch.ones((), requires_grad=True)
        x.register_hook(lambda _: seen.append("backward is through"))
        ddp(x).backward()
        return seen

    for seen in run_ranks(2, one_rank):
        assert seen.index("backward is through") == 3  # all but the last bucket, which waits


def test_the_size_of_buckets_is_as_asked_for() -> None:
    def one_rank(group: Group, **caps: Any) -> list[int]:
        ddp = DistributedDataParallel(Chain(list(range(6))), process_group=group, **caps)
        ddp(torch.ones(())).backward()
        seen = watch(group)
        ddp(torch.ones(())).backward()
        buckets = ddp.replica.reducer.buckets
        assert [numel for _, numel in seen] == [bucket.buffer.numel() for bucket in buckets]
        return [bucket.payload.numel() for bucket in buckets]

    def sizes(**caps: Any) -> list[int]:
        return run_ranks(2, lambda group: one_rank(group, **caps))[0]

    assert sizes() == [21]  # 6, 5, 4, 3, 2, 1 elements arrive
    assert sizes(bucket_cap_mb=40 / MIB) == [11, 10]
    assert sizes(bucket_cap_mb=28 / MIB) == [11, 7, 3]
    assert sizes(bucket_cap_mb_list=[24 / MIB, 36 / MIB]) == [6, 9, 6]
    assert sizes(bucket_cap_mb_list=[4 / MIB]) == [6, 5, 4, 3, 2, 1]


def test_the_first_bucket_is_small_unless_a_size_was_asked_for() -> None:
    def one_rank(group: Group, cap: float | None) -> int:
        layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]  # 1 MiB each
        ddp = DistributedDataParallel(
            nn.Sequential(*layers), process_group=group, bucket_cap_mb=cap
        )
        ddp(torch.ones(1, 512)).sum().backward()
        return len(ddp.replica.reducer.layout.plan[0])

    assert run_ranks(2, lambda group: one_rank(group, None)) == [1, 1]
    assert run_ranks(2, lambda group: one_rank(group, 2)) == [2, 2]


def test_what_a_plan_holds_is_told_in_the_logging_data() -> None:
    def one_rank(group: Group) -> dict[str, Any]:
        ddp = DistributedDataParallel(
            Chain([1, 3, 0, 2]), process_group=group, bucket_cap_mb=1 / MIB
        )
        assert ddp._get_ddp_logging_data()["has_rebuilt_buckets"] == 0
        ddp(torch.ones(())).backward()
        return ddp._get_ddp_logging_data()

    for data in run_ranks(2, one_rank):
        assert data["has_rebuilt_buckets"] == 1
        assert data["rebuilt_bucket_sizes"] == "12, 4, 16, 8"
        assert data["rebuilt_per_bucket_param_indices"] == "2, 0, 3, 1"


# Collectives.


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_takes_one_collective_for_each_bucket_and_nothing_else(
    views: bool, set_to_none: bool
) -> None:
    def one_rank(group: Group) -> list[int]:
        ddp = DistributedDataParallel(
            seeded(mlp),
            process_group=group,
            bucket_cap_mb=1 / MIB,
            gradient_as_bucket_view=views,
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        seen = watch(group)
        counts = []
        for step in range(4):
            seen.clear()
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(ddp, group.rank(), step)
            optimizer.step()
            counts.append(len(seen))
        assert {kind for kind, _ in seen} == {"all_reduce"}
        assert counts[-1] == len(ddp.replica.reducer.layout.plan)
        return counts

    for first, *rest in run_ranks(2, one_rank):
        assert first == 2  # one bucket for all, and the order of arrival
        assert rest == [4, 4, 4]


def test_a_forward_alone_takes_no_collective() -> None:
    def one_rank(group: Group) -> list[object]:
        ddp = DistributedDataParallel(mlp(), process_group=group)
        seen = watch(group)
        for _ in range(2):
            ddp(batch(0))
            with torch.no_grad():
                ddp(batch(0))
            ddp.eval()(batch(0))
        return seen

    assert run_ranks(2, one_rank) == [[], []]


@pytest.mark.parametrize("norm", [False, True])
def test_a_world_of_one_takes_no_collective(norm: bool) -> None:
    def one_rank(group: Group) -> list[object]:
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4)] if norm else [nn.Linear(4, 4)]
        ddp = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
        seen = watch(group)
        for _ in range(2):
            ddp.zero_grad()
            backward(ddp, 0)
        ddp.sync_grads()
        return seen

    assert run_ranks(1, one_rank) == [[]]


def test_in_a_world_of_one_gradients_are_what_the_bare_model_has() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        model = seeded(mlp)
        ddp = DistributedDataParallel(model, process_group=group)
        with ddp.no_sync():
            backward(ddp, 0, 0)
        backward(ddp, 0, 1)
        return grads_of(model)

    bare = seeded(mlp)
    backward(bare, 0, 0)
    backward(bare, 0, 1)
    assert_close(run_ranks(1, one_rank)[0], grads_of(bare))


# Other groups.


def train_over(meeting: Meeting, backend: str) -> list[dict[str, Tensor]]:
    if backend == "torch":
        dist.init_process_group("gloo")
        group = None
    else:
        group = meeting.new_group(backend)
    model = seeded(mlp, meeting.rank)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.00005)
    found = []
    for step in range(4):
        ddp.zero_grad()
        backward(ddp, meeting.rank, step)
        found.append(grads_of(model))
        buckets = ddp.replica.reducer.buckets
        assert all(storage(b.buffer) == storage(b.grads[0]) for b in buckets)
    dist.destroy_process_group() if group is None else group.shutdown()
    return found


@pytest.mark.parametrize("backend", ["torch", "gloo", "shm"])
def test_any_group_averages(backend: str) -> None:
    model = seeded(mlp, 0)
    for grads in spawn_ranks(2, train_over, backend):
        for step, found in enumerate(grads):
            expected = mean_grads(model, 2, lambda m, rank, s=step: backward(m, rank, s))
            assert_close(found, expected)


def sub_groups(meeting: Meeting) -> float:
    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(model, process_group=pairs[meeting.rank // 2])
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 1), float(meeting.rank))).backward()
    dist.barrier()  # rank 0 has the store, which the others may still need to meet
    dist.destroy_process_group()
    return model.weight.grad.item()


def test_a_group_of_some_ranks_averages_over_those() -> None:
    assert spawn_ranks(4, sub_groups) == [0.5, 0.5, 2.5, 2.5]


def test_split_groups_average_side_by_side() -> None:
    def one_rank(group: Group) -> float:
        part = group.split([[0, 2], [1, 3]])
        model = nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(model, process_group=part)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.full((1, 1), float(group.rank()))).backward()
        return model.weight.grad.item()

    assert run_ranks(4, one_rank) == [1.0, 2.0, 1.0, 2.0]


def test_several_models_in_one_group_do_not_mix() -> None:
    def one_rank(group: Group) -> list[float]:
        models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        first, second = (DistributedDataParallel(m, process_group=group) for m in models)
        x = torch.full((1, 1), float(group.rank()))
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            (first(x) + 10 * second(x)).backward()
        return [m.weight.grad.item() for m in models]

    assert run_ranks(2, one_rank) == [[0.5, 5.0]] * 2
