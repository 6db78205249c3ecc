"""What a rank holds when a weighted pass begins: earlier averages, or gradients of its own.

A plain pass averages all that ``.grad`` holds when it ends. A weighted pass does so too: the result
is ``sum(w * (held + new)) / sum(w)`` over ranks. Averages of an earlier pass, equal on all ranks,
come out as they went in; what differed is equal afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import TINY, Branches, data, grads, stack


def sum_exactly(group, bucket):
    work = group.all_reduce(bucket.buffer().div_(group.size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def wrap(model: nn.Module, group: Group, way: str = "") -> DDP:
    views = way != "copies"
    ddp = DDP(model, process_group=group, gradient_as_bucket_view=views, bucket_cap_mb=TINY)
    if way == "late":
        ddp.replica.read_late()
    if way == "hook":
        ddp.register_comm_hook(group, sum_exactly)
    return ddp


WAYS = ["views", "copies", "late", "hook"]


def line() -> nn.Linear:
    """One weight; its gradient is the input."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def backward(model: nn.Module, value: float, weight: float | None = None) -> None:
    if weight is not None:
        model.samples(weight)
    model(torch.full((1, 1), value)).sum().backward()


def found_by(ranks: int, act: Callable[[DDP, int], None], way: str = "") -> float:
    """What all of them have in ``.grad`` after ``act``; the same bits."""

    def one_rank(group: Group) -> float:
        ddp = wrap(line(), group, way)
        backward(ddp, 1.0)
        ddp.zero_grad()
        act(ddp, group.rank())
        return ddp.module.weight.grad.item()

    found = run_ranks(ranks, one_rank)
    assert set(found) == {found[0]}
    return found[0]


# Gradients of a rank alone.


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_the_bare_module_are_averaged_by_the_weighted_pass_that_follows(
    way: str,
) -> None:
    def act(ddp: DDP, rank: int) -> None:
        backward(ddp.module, 10.0 * rank)
        backward(ddp, 1.0 + rank, weight=1.0 + 2 * rank)

    # rank 0 has 0 and 1 and counts 1, rank 1 has 10 and 2 and counts 3
    assert found_by(2, act, way) == pytest.approx((1 * 1 + 3 * 12) / 4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("holder", [0, 1, 2])
def test_so_are_gradients_that_one_rank_alone_has_set(way: str, holder: int) -> None:
    def act(ddp: DDP, rank: int) -> None:
        if rank == holder:
            ddp.module.weight.grad = torch.full((1, 1), 12.0)
        backward(ddp, 3.0, weight=1.0 + rank)

    assert found_by(3, act, way) == pytest.approx(3.0 + 12.0 * (1 + holder) / 6)


@pytest.mark.parametrize("way", WAYS)
def test_so_is_what_a_rank_has_added_to_an_average_that_others_left_as_it_was(way: str) -> None:
    def act(ddp: DDP, rank: int) -> None:
        backward(ddp, 8.0, weight=2.0)
        if rank == 1:
            backward(ddp.module, 20.0)
        backward(ddp, 1.0, weight=1.0 + 3 * rank)

    assert found_by(2, act, way) == pytest.approx(8.0 + 1.0 + 20.0 * 4 / 5)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_without_a_weight_and_ranks_with_one_agree_on_what_they_kept(way: str) -> None:
    def act(ddp: DDP, rank: int) -> None:
        for _ in range(3):
            backward(ddp, 4.0 * rank, weight=3.0 if rank else None)

    assert found_by(2, act, way) == pytest.approx(3 * 3.0)


@pytest.mark.parametrize("way", WAYS)
def test_averages_are_added_to_and_do_not_change(way: str) -> None:
    def act(ddp: DDP, rank: int) -> None:
        for step in range(4):
            backward(ddp, 3.0 * rank + step, weight=(1.0, 3.0, 7.0)[(rank + step) % 3])

    def mean(step: int) -> float:
        counts = [(1.0, 3.0, 7.0)[(rank + step) % 3] for rank in range(3)]
        return sum(c * (3.0 * rank + step) for rank, c in enumerate(counts)) / 11

    assert found_by(3, act, way) == pytest.approx(sum(map(mean, range(4))))


# With several passes before an average.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shared", [True, False])
def test_what_was_held_before_the_first_of_several_passes_counts_once(
    way: str, shared: bool
) -> None:
    def act(ddp: DDP, rank: int) -> None:
        if shared:
            backward(ddp, 16.0)
        else:
            backward(ddp.module, 16.0 * rank)
        with ddp.no_sync():
            backward(ddp, 1.0, weight=1.0)
            backward(ddp, 2.0, weight=2.0)
        backward(ddp, 3.0, weight=1.0 + 4 * rank)

    # rank 0 counts 4, rank 1 counts 8
    passes = (2 * (1 * 1 + 2 * 2) + (1 + 5) * 3) / 12
    assert found_by(2, act, way) == pytest.approx(passes + (16.0 if shared else 16.0 * 8 / 12))


@pytest.mark.parametrize("then", [2.0, None])
def test_it_stays_when_the_first_of_them_counts_nothing(then: float | None) -> None:
    def act(ddp: DDP, rank: int) -> None:
        backward(ddp, 16.0)
        with ddp.no_sync():
            backward(ddp, 9.0, weight=0.0)
        backward(ddp, 1.0 + rank, weight=then)

    assert found_by(2, act) == pytest.approx(16.0 + 1.5)


# Weights of nothing.


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_without_samples_counts_for_nothing_and_gets_what_the_others_have(way: str) -> None:
    def act(ddp: DDP, rank: int) -> None:
        backward(ddp, 8.0)  # which all hold
        if rank == 0:
            backward(ddp.module, 100.0)
        backward(ddp, 1.0, weight=2.0 * rank)

    assert found_by(2, act, way) == pytest.approx(8.0 + 1.0)


@pytest.mark.parametrize("way", WAYS)
def test_where_no_rank_has_samples_what_they_hold_is_averaged_as_without_weights(way: str) -> None:
    def act(ddp: DDP, rank: int) -> None:
        backward(ddp, 8.0)
        if rank == 0:
            backward(ddp.module, 100.0)
        ddp.samples(0.0)
        (ddp(torch.ones(1, 1)).sum() * torch.nan).backward()

    assert found_by(2, act, way) == pytest.approx(8.0 + 50.0)


def test_where_no_rank_has_samples_or_holds_anything_there_is_no_gradient() -> None:
    def one_rank(group: Group) -> Tensor | None:
        ddp = wrap(line(), group)
        backward(ddp, 1.0)
        ddp.zero_grad()
        backward(ddp, 1.0, weight=0.0)
        return ddp.module.weight.grad

    assert run_ranks(2, one_rank) == [None, None]


# Without a backward pass.


def test_sync_grads_averages_by_weight_what_ranks_hold() -> None:
    def act(ddp: DDP, rank: int) -> None:
        backward(ddp.module, 4.0 * rank)
        with ddp.samples(1.0 + 2 * rank):
            ddp.sync_grads()

    assert found_by(2, act) == 3.0


# Parameters of all kinds.


def weighted_by_hand(
    model: nn.Module, losses: Sequence[tuple[float, Callable[[nn.Module], Tensor]]]
) -> dict[str, Tensor | None]:
    """What one process gets from the mean of ``losses`` by their weights."""
    model = copy.deepcopy(model)
    total = sum(weight for weight, _ in losses)
    torch.stack([loss(model) * weight / total for weight, loss in losses]).sum().backward()
    return grads(model)


def branches_loss(model: nn.Module, rank: int) -> Tensor:
    bare = getattr(model, "module", model)
    held = bare(data(2, 3, seed=rank), (rank,)).square().sum()
    if model is not bare:
        held.backward()
        held = torch.zeros(())
    return held + model(data(2, 3, seed=10 + rank), (1, rank)).square().sum()


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_some_ranks_hold_and_others_reach_get_the_same_mean(way: str) -> None:
    def one_rank(group: Group) -> Any:
        ddp, rank = wrap(Branches(), group, way), group.rank()
        for _ in range(3):
            ddp.zero_grad()
            ddp.samples(1 + 2 * rank)
            branches_loss(ddp, rank).backward()
        return grads(ddp)

    losses = [(1 + 2 * r, lambda m, r=r: branches_loss(m, r)) for r in range(2)]
    expected = weighted_by_hand(Branches(), losses)
    for found in run_ranks(2, one_rank):
        assert_close(found, expected)


def test_parameters_that_only_a_held_gradient_reached_are_still_known_as_unused() -> None:
    def one_rank(group: Group) -> list[str]:
        ddp = wrap(Branches(), group)
        for _ in range(3):
            ddp.zero_grad()
            ddp.module(data(2, 3), (2,)).sum().backward()
            ddp.samples(3)
            ddp(data(2, 3), (0,)).sum().backward()
        summary = ddp.replica.reducer.summary()
        return [ddp.replica.reducer.names[n] for n, used in enumerate(summary.used) if not used]

    unused = [f"others.{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")]
    assert run_ranks(2, one_rank) == [unused, unused]


@pytest.mark.parametrize("dense", [True, False])
def test_sparse_gradients_that_a_rank_holds_are_averaged_too(dense: bool) -> None:
    def one_rank(group: Group) -> Tensor:
        table = nn.Embedding(4, 2, sparse=True)
        nn.init.zeros_(table.weight)
        ddp, rank = DDP(table, process_group=group), group.rank()
        ddp(torch.tensor([0])).sum().backward()
        ddp.zero_grad()
        table(torch.tensor([rank])).sum().backward()
        if dense:
            table.weight.grad = table.weight.grad.to_dense()
        ddp.samples(1 + 2 * rank)
        ddp(torch.tensor([1 + rank])).sum().backward()
        return table.weight.grad.to_dense()[:, 0]

    for found in run_ranks(2, one_rank):
        assert_close(found, torch.tensor([0.25, 0.25 + 0.75, 0.75, 0.0]))


def test_gradients_in_stretches_take_in_what_a_rank_holds() -> None:
    def one_rank(group: Group) -> Tensor:
        ddp, rank = DDP(line(), process_group=group), group.rank()
        sharded = ddp.scatter_gradients()
        for _ in range(2):
            sharded.clear()
            backward(ddp.module, 10.0 * rank)
            backward(ddp, 1.0 + rank, weight=1.0 + 2 * rank)
        mine = sharded.stretches[0].grad
        return torch.zeros(1) if mine is None else mine[:1]

    assert run_ranks(2, one_rank)[0].item() == pytest.approx(37 / 4)


# Ranks that run out.


@pytest.mark.parametrize("way", WAYS)
def test_in_join_those_that_are_left_average_what_they_hold(way: str) -> None:
    def one_rank(group: Group) -> list[float]:
        ddp, rank = wrap(line(), group, way), group.rank()
        found = []
        with ddp.join():
            for step in range(1 + rank):
                ddp.zero_grad()
                backward(ddp.module, 6.0 * rank)
                backward(ddp, float(step), weight=1.0 + rank)
                found.append(ddp.module.weight.grad.item())
        return found

    first, second, third = run_ranks(3, one_rank)
    both = (0 + 2 * 6 + 3 * 12) / 6
    assert first == pytest.approx([both])
    assert second == pytest.approx([both, 1 + (2 * 6 + 3 * 12) / 5])
    assert third == pytest.approx([*second, 2 + 12])


def test_what_a_rank_kept_from_standing_in_does_not_bring_ranks_apart() -> None:
    def one_rank(group: Group) -> list[float]:
        ddp, rank = wrap(line(), group), group.rank()
        with ddp.join():
            for step in range(1 + rank):
                backward(ddp, 1.0 + step, weight=1.0)
        backward(ddp, 1.0, weight=1.0 + 2 * rank)
        return ddp.module.weight.grad.item()

    first, second = run_ranks(2, one_rank)
    assert first == second == pytest.approx(1.0 + (1 * 1.0 + 3 * 3.0) / 4)


# Processes.


def train_with_penalties(meeting: Meeting, backend: str) -> tuple[list[Any], list[Any]]:
    """Some ranks hold gradients of a penalty, of other sizes in every step."""
    group = meeting.new_group(backend)
    ddp = DDP(stack(3, 40, 4), process_group=group, bucket_cap_mb=TINY)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    kept = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if meeting.rank == step % 2:
            penalty(ddp.module, step).backward()
        with ddp.samples(1 + meeting.rank + step):
            ddp(data(2, 3, seed=10 * step + meeting.rank)).square().mean().backward()
        kept.append(grads(ddp))
        optimizer.step()
    group.shutdown()
    return kept, expected_of_penalties()


def penalty(model: nn.Module, step: int) -> Tensor:
    return (1 + step) * sum(p.square().sum() for p in model.parameters())  # type: ignore[return-value]


def expected_of_penalties() -> list[Any]:
    model = stack(3, 40, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            share = (1 + rank + step) / (3 + 2 * step)
            loss = model(data(2, 3, seed=10 * step + rank)).square().mean()
            loss = loss + penalty(model, step) if rank == step % 2 else loss
            (loss * share).backward()
        found.append(grads(model))
        optimizer.step()
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes_that_hold_penalties_train_as_one_process_does(backend: str) -> None:
    for found, expected in spawn_ranks(2, train_with_penalties, backend):
        assert_close(found, expected)
