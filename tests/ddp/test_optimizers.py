"""Optimizers on bucket views and inside the backward; what is delayed, ignored or sparse."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import (
    TINY,
    Branches,
    Grads,
    assert_same,
    data,
    fill,
    grads,
    mean_grads,
    stack,
    weights,
)

CAPS = pytest.mark.parametrize("cap", [None, TINY])


def loss(model: Any, step: int, rank: int) -> Tensor:
    return model(data(4, 3, seed=10 * step + rank)).square().sum()


def train_alone(
    optimizer: Callable[[Any], torch.optim.Optimizer], clip: float | None = None
) -> dict[str, Tensor]:
    """One process on the whole batch."""
    model = Branches()
    stepper = optimizer(model.parameters())
    for step in range(4):
        stepper.zero_grad()
        ((loss(model, step, 0) + loss(model, step, 1)) / 2).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
    return weights(model)


# Ordinary optimizers.

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW plain": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_on_bucket_views(name: str, set_to_none: bool) -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        stepper = OPTIMIZERS[name](ddp.parameters())
        for step in range(4):
            stepper.zero_grad(set_to_none=set_to_none)
            loss(ddp, step, group.rank()).backward()
            stepper.step()
        return weights(ddp)

    expected = train_alone(OPTIMIZERS[name])
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


def test_gradients_are_the_same_memory_in_every_step() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group)
        places = []
        for step in range(4):
            ddp.zero_grad()
            loss(ddp, step, group.rank()).backward()
            places.append([p.grad.data_ptr() for p in ddp.parameters()])
        assert places[1] == places[2] == places[3]  # the first pass had another layout

    run_ranks(2, one_rank)


def test_clipping_sees_the_averages() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        stepper = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            stepper.zero_grad()
            loss(ddp, step, group.rank()).backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            stepper.step()
        return weights(ddp)

    expected = train_alone(lambda p: torch.optim.SGD(p, lr=0.1), clip=0.1)
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


def test_a_grad_scaler_skips_the_step_on_all_ranks() -> None:
    def one_rank(group: Group) -> tuple[float, dict[str, Tensor]]:
        ddp = DDP(stack(3, 2).float(), process_group=group)
        stepper = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for step in range(4):
            stepper.zero_grad()
            result = ddp(data(4, 3, seed=10 * step + group.rank()).float()).square().sum()
            if step == 2 and group.rank() == 1:
                result = result * float("inf")
            scaler.scale(result).backward()
            scaler.step(stepper)
            scaler.update()
        return scaler.get_scale(), weights(ddp)

    (scale, first), (other_scale, second) = run_ranks(2, one_rank)
    assert scale == other_scale == 2.0
    assert_same(first, second, rtol=0, atol=0)
    assert all(w.isfinite().all() for w in first.values())


# Optimizers in the backward.


def step_in_backward(model: nn.Module) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward  # a slow import

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


@CAPS
def test_fused_optimizers_step_with_their_buckets(cap: float | None) -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=cap)
        ddp._register_fused_optim(torch.optim.AdamW, lr=0.1)
        for step in range(4):
            ddp.zero_grad()
            loss(ddp, step, group.rank()).backward()
        return weights(ddp)

    expected = train_alone(lambda p: torch.optim.AdamW(p, lr=0.1))
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


def test_fused_optimizers_may_have_some_of_the_parameters() -> None:
    def one_rank(group: Group) -> tuple[dict[str, Tensor], Grads]:
        ddp = DDP(Branches(), process_group=group)
        chosen = list(ddp.module.others.parameters())
        ddp._register_fused_optim(torch.optim.SGD, 0.1, optim_params=chosen)
        for step in range(2):
            ddp.zero_grad()
            loss(ddp, step, group.rank()).backward()
        return weights(ddp), grads(ddp)

    start = weights(Branches())
    for found, gradients in run_ranks(2, one_rank):
        for name, value in found.items():
            assert torch.equal(value, start[name]) == name.startswith("first")
        assert gradients["first.weight"] is not None


def test_a_fused_optimizer_and_a_hook_do_not_go_together() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group)
        ddp.register_comm_hook(None, lambda state, bucket: None)
        with pytest.raises(RuntimeError):
            ddp._register_fused_optim(torch.optim.SGD, 0.1)

    run_ranks(1, one_rank)


@CAPS
@pytest.mark.parametrize("kind", ["fused", "in backward"])
def test_optimizers_in_the_backward_wait_for_late_gradients(kind: str, cap: float | None) -> None:
    """A gradient that comes after its bucket has left is part of the same step."""
    orders = [(0, 1, 2), (0, 1, 2), (0,), (2, 1, 0), (1, 2, 0), (0, 2)]

    def walk(model: Any, step: int, rank: int) -> Tensor:
        return model(data(4, 3, seed=10 * step + rank), orders[step]).square().sum()

    def one_rank(group: Group) -> dict[str, Tensor]:
        model = Branches()
        if kind == "in backward":
            step_in_backward(model)
        ddp = DDP(model, process_group=group, bucket_cap_mb=cap)
        if kind == "fused":
            ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
        for step in range(len(orders)):
            ddp.zero_grad()
            walk(ddp, step, group.rank()).backward()
        return weights(ddp)

    single = Branches()
    stepper = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in range(len(orders)):
        stepper.zero_grad()
        ((walk(single, step, 0) + walk(single, step, 1)) / 2).backward()
        stepper.step()
    for found in run_ranks(2, one_rank):
        assert_same(found, weights(single))


@CAPS
def test_torchs_optimizers_in_backward_step_on_averages(cap: float | None) -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        model = Branches()
        step_in_backward(model)
        ddp = DDP(model, process_group=group, bucket_cap_mb=cap)
        for step in range(4):
            loss(ddp, step, group.rank()).backward()
            assert all(p.grad is None for p in ddp.parameters())
        return weights(ddp)

    expected = train_alone(lambda p: torch.optim.SGD(p, lr=0.1))
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


# Delayed all-reduce.


@CAPS
@pytest.mark.parametrize("chosen", ["others.", "", "first"])
def test_delayed_parameters_are_averaged_too(chosen: str, cap: float | None) -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        model = fill(Branches(), seed=group.rank())
        late = [(n, p) for n, p in model.named_parameters() if n.startswith(chosen)]
        ddp = DDP(
            model,
            process_group=group,
            bucket_cap_mb=cap,
            delay_all_reduce_named_params=late,
            param_to_hook_all_reduce=model.first.weight,
        )
        stepper = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            stepper.zero_grad()
            loss(ddp, step, group.rank()).backward()
            stepper.step()
        return weights(ddp)

    expected = train_alone(lambda p: torch.optim.SGD(p, lr=0.1))
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


def test_delayed_parameters_follow_into_another_group() -> None:
    def one_rank(group: Group) -> dict[str, Tensor | None]:
        alone = group.split([group.rank()])
        model = Branches()
        ddp = DDP(
            model,
            process_group=alone,
            delay_all_reduce_named_params=list(model.others.named_parameters(prefix="others")),
            param_to_hook_all_reduce=model.first.weight,
        )
        loss(ddp, 0, group.rank()).backward()
        ddp._update_process_group(group)
        ddp.zero_grad()
        loss(ddp, 1, group.rank()).backward()
        return grads(ddp)

    expected = mean_grads(Branches(), 2, lambda m, rank: loss(m, 1, rank))
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


# Ignored parameters and buffers.


def test_ignored_parameters_and_buffers_are_each_ranks_own() -> None:
    def one_rank(group: Group) -> None:
        rank = group.rank()
        model = nn.Sequential(fill(Branches(), seed=rank), nn.BatchNorm1d(3, dtype=torch.float64))
        model[1].running_mean.fill_(rank)
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.first.weight", "1.running_mean"])
        mine = model[0].first.weight.detach().clone()
        ddp = DDP(model, process_group=group)
        assert torch.equal(model[0].first.weight, mine)
        assert model[1].running_mean.eq(rank).all()
        for step in range(2):
            ddp.zero_grad()
            loss(ddp, step, rank).backward()
        got = [torch.empty(3, 3, dtype=torch.float64) for _ in range(2)]
        group.all_gather(got, model[0].first.weight.grad)
        assert not torch.equal(*got)
        group.all_gather(got, model[0].others[0].weight.grad)
        assert torch.equal(*got)

    run_ranks(2, one_rank)


def test_an_ignored_parameter_may_have_another_shape_on_every_rank() -> None:
    def one_rank(group: Group) -> None:
        model = nn.ModuleDict({"own": stack(3, 2 + group.rank()), "all": stack(3, 2)})
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["own.0.weight", "own.0.bias"])
        DDP(model, process_group=group)

    run_ranks(2, one_rank)


# Sparse gradients.


class Table(nn.Module):
    """Rows of a table through a layer; ``mixed``: and through one in float32.

    Then the table's bucket is not the last one, and after a step without a gradient for it it is
    sent early.
    """

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
        self.head = stack(2, 2)
        self.tail = stack(2, 2).float() if mixed else None
        fill(self)

    def forward(self, rows: Sequence[int]) -> Tensor:
        ones = torch.ones(1, 2, dtype=torch.float64)
        found = self.head(self.table(torch.tensor(rows)) if rows else ones)
        return found if self.tail is None else self.tail(found.float())


ROWS = [[[0, 1, 1], [5]], [[2], [2, 3, 4]], [[0], []], [[], [1]], [[], []], [[3], [4, 4]]]


@CAPS
@pytest.mark.parametrize("mixed", [False, True])
def test_sparse_gradients_may_be_uneven_and_missing(mixed: bool, cap: float | None) -> None:
    def one_rank(group: Group) -> list[Grads]:
        ddp = DDP(Table(mixed), process_group=group, bucket_cap_mb=cap)
        found = []
        for rows in ROWS:
            ddp.zero_grad()
            ddp(rows[group.rank()]).square().sum().backward()
            grad = ddp.module.table.weight.grad
            assert grad is None or grad.is_sparse
            found.append(grads(ddp))
        return found

    results = run_ranks(2, one_rank)
    for step, rows in enumerate(ROWS):
        expected = mean_grads(
            Table(mixed), 2, lambda m, rank, rows=rows: m(rows[rank]).square().sum()
        )
        for found in results:
            assert_same(found[step], expected, rtol=1e-5, atol=1e-6)


def _train_sparse(meeting: Meeting, backend: str) -> Grads:
    if backend == "stock gloo":
        dist.init_process_group("gloo")
        ddp = DDP(Table())
    else:
        group = meeting.new_group(backend)
        ddp = DDP(Table(), process_group=group)
    stepper = torch.optim.SparseAdam([ddp.module.table.weight], lr=0.1)
    for rows in ROWS[:2]:
        ddp.zero_grad()
        ddp(rows[meeting.rank]).square().sum().backward()
        found = grads(ddp)
    stepper.step()
    if backend == "stock gloo":
        dist.destroy_process_group()
    else:
        group.shutdown()
    return found


@pytest.mark.parametrize("backend", ["shm", "stock gloo"])
def test_sparse_gradients_travel_between_processes(backend: str) -> None:
    expected = mean_grads(Table(), 2, lambda m, rank: m(ROWS[1][rank]).square().sum())
    for found in spawn_ranks(2, _train_sparse, backend):
        assert_same(found, expected)


def test_sparse_gradients_accumulate() -> None:
    def one_rank(group: Group) -> Grads:
        ddp = DDP(Table(), process_group=group, static_graph=True)
        for _ in range(2):
            ddp.zero_grad()
            for rows in ROWS[:2]:
                with ddp.accumulate(2):
                    ddp(rows[group.rank()]).square().sum().backward()
        return grads(ddp)

    expected = mean_grads(
        Table(), 2, lambda m, rank: sum(m(rows[rank]).square().sum() for rows in ROWS[:2])
    )
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


def test_a_deepcopied_wrapper_steps_on_its_own() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group)
        twin = copy.deepcopy(ddp)
        before = weights(ddp)
        loss(twin, 0, group.rank()).backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        assert all(g is None for g in grads(ddp).values())
        assert_close(weights(ddp), before)

    run_ranks(2, one_rank)
