"""Headers that are read a pass later, as on a device, with gradients on the CPU."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline import replicate
from paceline.errors import PeerError
from paceline.groups import Group
from paceline.optim import (
    LocalSGD,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
)
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import TINY, Branches, Grads, assert_same, data, grads, mean_grads, stack


def late(model: nn.Module, group: Group, **options: Any) -> DDP:
    ddp = DDP(model, process_group=group, **options)
    ddp.replica.read_late()
    return ddp


def batch(step: int, rank: int, rows: int = 4) -> Tensor:
    return data(rows, 3, seed=10 * step + rank)


def line(dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.ones_(layer.weight)
    return layer


def backward(ddp: DDP, value: float, weight: float | None = None) -> float:
    ddp.zero_grad()
    if weight is not None:
        ddp.samples(weight)
    layer = ddp.module
    ddp(torch.full((1, 1), value, dtype=layer.weight.dtype)).sum().backward()
    return layer.weight.grad.item()


# What the header changes is changed in its pass.


def test_a_rank_that_asks_between_passes_does_not_change_its_unit_before_the_others() -> None:
    def one_rank(group: Group) -> list[tuple[float, float]]:
        ddp, rank = late(line(), group), group.rank()
        seen = []
        for step, weight in enumerate((1000.0, 1000.0, 9.0, 9.0, 9.0)):
            mean = backward(ddp, 1.0 + rank, weight * (1 + rank))
            if rank == step % 2:
                ddp.state_dict()
            seen.append((mean, ddp.replica.reducer.ledger.unit))
        return seen

    first, second = run_ranks(2, one_rank)
    assert first == second
    assert [mean for mean, _ in first] == pytest.approx([5 / 3] * 5)
    assert len({unit for _, unit in first}) > 1, "the unit follows the weights"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ranks_without_a_weight_divide_as_those_with_one(dtype: torch.dtype) -> None:
    def one_rank(group: Group) -> list[float]:
        ddp, rank = late(line(dtype), group), group.rank()
        plain = [backward(ddp, 1.0 + rank) for _ in range(2)]
        mixed = [backward(ddp, 1.0 + rank, weight=3.0 if rank else None) for _ in range(4)]
        return [*plain, *mixed, backward(ddp, 1.0 + rank)]

    for found in run_ranks(2, one_rank):
        assert found == [1.5, 1.5, 1.75, 1.75, 1.75, 1.75, 1.5]


def test_weights_that_grow_keep_one_unit_on_all_ranks() -> None:
    def one_rank(group: Group) -> list[float]:
        ddp, rank = late(line(), group), group.rank()
        weights = [None, None, 4096.0, 4096.0, 4096.0, 2.0, 2.0, 1.0]
        return [backward(ddp, float(rank), weight=w if rank else None) for w in weights]

    first, second = run_ranks(2, one_rank)
    expected = [w / (w + 1) for w in (1, 1, 4096, 4096, 4096, 2, 2, 1)]
    assert first == second
    assert first == pytest.approx(expected)


@pytest.mark.parametrize("cap", [None, TINY])
def test_branches_that_differ_by_rank_are_averaged(cap: float | None) -> None:
    def one_rank(group: Group) -> list[Grads]:
        ddp = late(Branches(), group, bucket_cap_mb=cap)
        found = []
        for step in range(5):
            ddp.zero_grad()
            ddp(batch(step, group.rank()), ((step + group.rank()) % 3,)).sum().backward()
            found.append(grads(ddp))
        return found

    for found in run_ranks(2, one_rank):
        for step in range(5):
            expected = mean_grads(
                Branches(),
                2,
                lambda m, rank, step=step: m(batch(step, rank), ((step + rank) % 3,)).sum(),
            )
            assert_same(found[step], expected)


def test_in_join_a_mean_over_active_ranks_is_exact() -> None:
    def one_rank(group: Group) -> list[float]:
        ddp, rank = late(line(), group), group.rank()
        with ddp.join(divide_by_initial_world_size=False):
            return [backward(ddp, 1.0 + rank) for _ in range(2 + 2 * rank)]

    first, second = run_ranks(2, one_rank)
    assert (first, second) == ([1.5] * 2, [1.5, 1.5, 2.0, 2.0])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.weight * x


def test_in_join_all_ranks_make_buffers_alike() -> None:
    def one_rank(group: Group) -> float:
        ddp, rank = late(Counting(), group), group.rank()
        with ddp.join():
            for _ in range(2 + 2 * rank):
                ddp(torch.ones(())).backward()
        return ddp.module.seen.item()

    assert run_ranks(2, one_rank) == [4.0, 4.0]


# A failure in the last pass.


class Unlucky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = stack(3, 3)

    def forward(self, x: Tensor, fails: bool) -> Tensor:
        if fails:
            raise ArithmeticError("no luck")
        return self.layer(x)


def train(ddp: DDP, rank: int, steps: int = 3) -> None:
    """Rank 1 fails in the forward of the last step."""
    for step in range(steps):
        ddp.zero_grad()
        fails = rank == 1 and step == steps - 1
        try:
            ddp(batch(step, rank), fails).sum().backward()
        except ArithmeticError:
            assert fails


def save(ddp: DDP) -> None:
    ddp.state_dict()


def save_module(ddp: DDP) -> None:
    ddp.module.state_dict()


def evaluate(ddp: DDP) -> None:
    ddp.eval()


def validate(ddp: DDP) -> None:
    with torch.no_grad():
        ddp(batch(0, 0), False)


@pytest.mark.parametrize("act", [save, evaluate, validate])
def test_a_replicated_module_hears_of_it_too(act: Any) -> None:
    def one_rank(group: Group) -> None:
        model = replicate(Unlucky(), process_group=group)
        replicate.state(model).wrapper.replica.read_late()
        train(model, group.rank())
        if group.rank() == 0:
            with pytest.raises(PeerError, match="in the last pass"):
                act(model)
        act(model)

    run_ranks(2, one_rank)


@pytest.mark.parametrize("act", [save, save_module, evaluate, validate])
def test_a_failure_in_the_last_pass_is_heard_before(act: Any) -> None:
    def one_rank(group: Group) -> None:
        ddp = late(Unlucky(), group)
        train(ddp, group.rank())
        if group.rank() == 0:
            with pytest.raises(PeerError, match="in the last pass"):
                act(ddp)
        act(ddp)  # once

    run_ranks(2, one_rank)


def test_nobody_steps_with_half_a_gradient() -> None:
    def one_rank(group: Group) -> None:
        ddp = late(Unlucky(), group)
        train(ddp, group.rank())
        if group.rank() == 0:
            assert all(not p.grad.any() for p in ddp.parameters())
            with pytest.raises(PeerError):
                ddp.eval()

    run_ranks(2, one_rank)


MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_steps_with_averages_only_and_the_error_has_the_message(name: str) -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        ddp, rank = late(Unlucky(), group), group.rank()
        optimizer = MAKERS[name](ddp.parameters())
        for step in range(3):
            optimizer.zero_grad()
            ddp(batch(step, rank), False).sum().backward()
            optimizer.step()
        before = [p.detach().clone() for p in ddp.parameters()]
        optimizer.zero_grad()
        if rank == 1:
            with pytest.raises(ArithmeticError):
                ddp(batch(4, rank), True)
        else:
            ddp(batch(4, rank), False).sum().backward()
        heard = "ArithmeticError in forward: no luck"
        if rank == 0:
            with pytest.raises(PeerError, match=heard):
                optimizer.step()
        unchanged = [p.detach().clone() for p in ddp.parameters()]
        optimizer.zero_grad()
        ddp(batch(5, rank), False).sum().backward()
        optimizer.step()
        assert not any(torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True))
        return before, unchanged, [p.detach().clone() for p in ddp.parameters()]

    (before, unchanged, after), (_, _, others) = run_ranks(2, one_rank)
    assert all(torch.equal(p, q) for p, q in zip(before, unchanged, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(after, others, strict=True))


def test_an_average_that_is_not_a_number_becomes_zero_when_a_rank_fails() -> None:
    def one_rank(group: Group) -> None:
        ddp, rank = late(Unlucky(), group), group.rank()
        for step in range(2):
            ddp.zero_grad()
            ddp(batch(step, rank), False).sum().backward()
        ddp.zero_grad()
        if rank == 1:
            with pytest.raises(ArithmeticError):
                ddp(batch(4, rank), True)
        else:
            (ddp(batch(4, rank), False).sum() * torch.nan).backward()
            assert all(not p.grad.any() for p in ddp.parameters())
            with pytest.raises(PeerError):
                ddp.eval()

    run_ranks(2, one_rank)


def test_a_failure_is_raised_a_pass_later_and_the_ranks_stay_in_step() -> None:
    def one_rank(group: Group) -> Grads:
        ddp = late(Unlucky(), group)
        train(ddp, group.rank())
        loss = ddp(batch(7, group.rank()), False).sum()
        if group.rank() == 0:
            with pytest.raises(PeerError, match="in the pass before"):
                loss.backward()
        else:
            loss.backward()
        ddp.zero_grad()
        ddp(batch(8, group.rank()), False).sum().backward()
        return grads(ddp)

    first, second = run_ranks(2, one_rank)
    assert_same(first, second)


@pytest.mark.parametrize("asks", [True, False])
def test_after_a_failure_all_ranks_count_in_the_same_unit(asks: bool) -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = line()

        def forward(self, x: Tensor, fails: bool) -> Tensor:
            if fails:
                raise ArithmeticError
            return self.layer(x)

    def one_rank(group: Group) -> dict[int, tuple[float, float]]:
        ddp, rank, seen = late(Line(), group), group.rank(), {}
        for step in range(10):
            ddp.zero_grad()
            try:
                with ddp.samples(4.0 if step < 2 else 64.0):
                    ddp(torch.full((1, 1), 1.0 + rank), rank == 1 and step == 3).sum().backward()
                if asks:
                    ddp.state_dict()
            except (ArithmeticError, PeerError):
                continue
            seen[step] = ddp.module.layer.weight.grad.item(), ddp.replica.reducer.ledger.unit
        return seen

    first, second = run_ranks(2, one_rank)
    both = first.keys() & second.keys()
    assert {step: first[step] for step in both} == {step: second[step] for step in both}
    assert len(both) == (9 if asks else 8)
    assert [first[step][0] for step in both] == pytest.approx([1.5] * len(both))


def _fail_last(meeting: Meeting) -> str:
    try:
        with meeting.new_group("gloo") as group:
            ddp = late(Unlucky(), group)  # it is asked: one that is gone has nothing to say
            train(ddp, meeting.rank)
    except PeerError as error:
        return str(error)
    return ""


def test_a_failure_in_the_last_pass_is_heard_at_the_end_of_the_group() -> None:
    heard, failed = spawn_ranks(2, _fail_last)
    assert "in the last pass" in heard
    assert not failed


def test_an_aborted_group_says_nothing_more() -> None:
    def one_rank(group: Group) -> None:
        ddp = late(Unlucky(), group)
        train(ddp, group.rank())
        group.abort()
        group.shutdown()

    run_ranks(2, one_rank)


def test_a_sharded_optimizer_hears_before_it_steps() -> None:
    def one_rank(group: Group) -> None:
        ddp = late(Unlucky(), group)
        ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
        ddp(batch(0, group.rank()), False).sum().backward()
        if group.rank() == 0:
            with pytest.raises(PeerError, match="no luck"):
                ddp(batch(0, 0), False).sum().backward()
        else:
            with pytest.raises(ArithmeticError):
                ddp(batch(0, 1), True)

    run_ranks(2, one_rank)


def zero(ddp: DDP, group: Group) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, group, lr=0.1)


def local_sgd(ddp: DDP, group: Group) -> torch.optim.Optimizer:
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return LocalSGD(ddp.module, inner, 100, process_group=group)


def post_local_sgd(ddp: DDP, group: Group) -> torch.optim.Optimizer:
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(100, 100, group))


@pytest.mark.parametrize("make", [zero, local_sgd, post_local_sgd])
def test_an_optimizer_of_ours_hears_before_it_steps(make: Any) -> None:
    def one_rank(group: Group) -> None:
        ddp = late(Unlucky(), group)
        optimizer = make(ddp, group)
        other = torch.optim.SGD(stack(3, 3).parameters(), lr=0.1)
        train(ddp, group.rank())
        before = [p.detach().clone() for p in ddp.parameters()]
        other.step()  # which has nothing to do with it
        if group.rank() == 0:
            with pytest.raises(PeerError, match="in the last pass"):
                optimizer.step()
        for param, was in zip(ddp.parameters(), before, strict=True):
            assert torch.equal(param, was)

    run_ranks(2, one_rank)


def test_a_wrapper_that_is_no_more_is_heard_at_the_end_of_the_group() -> None:
    def one_rank(group: Group) -> bool:
        inner = group.split([0, 1])
        assert inner is not None
        ddp = late(Unlucky(), inner)
        train(ddp, group.rank())
        gone = weakref.ref(ddp.replica)
        del ddp
        for turn in range(2):  # two threads at once do not both collect
            if turn == group.rank():
                gc.collect()
            group.barrier()
        assert gone() is None
        if group.rank() == 0:
            with pytest.raises(PeerError, match="in the last pass"):
                inner.shutdown()
        else:
            inner.shutdown()
        return True

    assert all(run_ranks(2, one_rank))


def test_a_model_that_asks_before_it_is_saved_can_be_copied_and_pickled() -> None:
    def one_rank(group: Group) -> None:
        model = stack(3, 3)
        late(model, group)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin.state_dict().keys() == model.state_dict().keys()

    run_ranks(2, one_rank)
