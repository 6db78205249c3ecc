"""Passes that are not averaged, and what the first averaged one makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel
from paceline.errors import ModuleArgumentError
from paceline.groups import Group
from paceline.testing import run_ranks
from tests.ddp.ranks import batch, grads_of, mean_grads, mlp, seeded, watch

Grads = dict[str, Tensor | None]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().sum()


def local(rank: int, *steps: int) -> Grads:
    """What the bare model has after these steps of ``rank``."""
    model = seeded(mlp)
    for step in steps:
        loss_of(model, rank, step).backward()
    return grads_of(model)


def mean(*steps: int, ranks: int = 2) -> Grads:
    """What all ranks have after these steps, averaged."""
    return mean_grads(
        seeded(mlp), ranks, lambda m, rank: [loss_of(m, rank, s).backward() for s in steps]
    )


def on_ranks(
    script: Callable[[DistributedDataParallel, Group], None], n: int = 2, **options: Any
) -> list[Grads]:
    """The gradients of each rank after ``script``, which runs on a wrapped ``mlp``."""

    def one_rank(group: Group) -> Grads:
        ddp = DistributedDataParallel(seeded(mlp), process_group=group, **options)
        script(ddp, group)
        return grads_of(ddp.module)

    return run_ranks(n, one_rank)


# no_sync.


def test_inside_no_sync_every_rank_has_its_own_gradients_and_nothing_is_sent() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        seen = watch(group)
        with ddp.no_sync():
            loss_of(ddp, group.rank(), 0).backward()
            loss_of(ddp, group.rank(), 1).backward()
        assert seen == []

    for rank, grads in enumerate(on_ranks(script)):
        assert_close(grads, local(rank, 0, 1))


def test_no_sync_around_backward_alone_is_enough() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        loss = loss_of(ddp, group.rank(), 0)
        with ddp.no_sync():
            loss.backward()

    for rank, grads in enumerate(on_ranks(script)):
        assert_close(grads, local(rank, 0))


def test_no_sync_around_forward_alone_speaks_for_its_backward() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        with ddp.no_sync():
            loss = loss_of(ddp, group.rank(), 0)
        loss.backward()

    for rank, grads in enumerate(on_ranks(script)):
        assert_close(grads, local(rank, 0))


@pytest.mark.parametrize("around", ["both", "forward", "backward"])
@pytest.mark.parametrize("views", [True, False])
def test_the_first_pass_outside_averages_all_that_gathered(around: str, views: bool) -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        for first in (0, 3, 6):
            ddp.zero_grad()
            for step in (first, first + 1):
                if around == "both":
                    with ddp.no_sync():
                        loss_of(ddp, group.rank(), step).backward()
                elif around == "forward":
                    with ddp.no_sync():
                        loss = loss_of(ddp, group.rank(), step)
                    loss.backward()
                else:
                    loss = loss_of(ddp, group.rank(), step)
                    with ddp.no_sync():
                        loss.backward()
            loss_of(ddp, group.rank(), first + 2).backward()
            assert_close(grads_of(ddp.module), mean(first, first + 1, first + 2))

    on_ranks(script, gradient_as_bucket_view=views, bucket_cap_mb=0.00003)


def test_no_sync_inside_no_sync_and_an_exception_leave_things_as_they_were() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        with ddp.no_sync():
            with ddp.no_sync():
                pass
            assert not ddp.require_backward_grad_sync
            loss_of(ddp, group.rank(), 0).backward()
        with pytest.raises(KeyError), ddp.no_sync():
            raise KeyError
        assert ddp.require_backward_grad_sync
        loss_of(ddp, group.rank(), 1).backward()

    for grads in on_ranks(script):
        assert_close(grads, mean(0, 1))


def test_a_forward_without_grad_inside_no_sync_does_not_keep_the_next_pass_from_averaging() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        loss = loss_of(ddp, group.rank(), 0)
        with ddp.no_sync(), torch.no_grad():
            loss_of(ddp, group.rank(), 1)
        loss.backward()

    for grads in on_ranks(script):
        assert_close(grads, mean(0))


def test_a_forward_inside_no_sync_whose_backward_never_comes_is_forgotten() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        with ddp.no_sync():
            loss_of(ddp, group.rank(), 0)
        loss_of(ddp, group.rank(), 1).backward()

    for grads in on_ranks(script):
        assert_close(grads, mean(1))


def test_averaged_gradients_that_are_kept_are_not_averaged_twice_over() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        loss_of(ddp, group.rank(), 0).backward()  # averaged, and kept
        with ddp.no_sync():
            loss_of(ddp, group.rank(), 1).backward()
        loss_of(ddp, group.rank(), 2).backward()

    for grads in on_ranks(script, n=3):
        assert_close(grads, mean(0, 1, 2, ranks=3))


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_trains_as_one_process_does_on_the_whole_data(
    views: bool, set_to_none: bool
) -> None:
    def train(model: nn.Module, ranks: list[int], sync: Callable[[int], object]) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            for micro in range(3):
                with sync(micro):
                    x = torch.cat([batch(rank, 10 * step + micro) for rank in ranks])
                    (model(x).square().sum(1).mean() / 3).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def one_rank(group: Group) -> list[Tensor]:
        ddp = DistributedDataParallel(
            seeded(mlp), process_group=group, gradient_as_bucket_view=views, bucket_cap_mb=0.00003
        )
        return train(
            ddp, [group.rank()], lambda micro: torch.enable_grad() if micro == 2 else ddp.no_sync()
        )

    expected = train(seeded(mlp), [0, 1], lambda _: torch.enable_grad())
    for found in run_ranks(2, one_rank):
        assert_close(found, expected)


# accumulate.


def test_accumulate_averages_in_every_last_step_which_is_true() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        seen = watch(group)
        for step in range(6):
            seen.clear()
            with ddp.accumulate(3) as last:
                loss_of(ddp, group.rank(), step).backward()
            assert last == (step % 3 == 2)
            assert bool(seen) == last
            if last:
                assert_close(grads_of(ddp.module), mean(step - 2, step - 1, step))
                ddp.zero_grad()

    on_ranks(script)


def test_accumulate_of_one_averages_always() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        for step in range(2):
            ddp.zero_grad()
            with ddp.accumulate(1) as last:
                loss_of(ddp, group.rank(), step).backward()
            assert last
            assert_close(grads_of(ddp.module), mean(step))

    on_ranks(script)


def test_a_micro_step_that_raises_does_not_count() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        for attempt in range(2):
            with pytest.raises(KeyError), ddp.accumulate(2) as last:
                assert not last, attempt
                raise KeyError
        with ddp.accumulate(2) as last:
            loss_of(ddp, group.rank(), 0).backward()
        assert not last
        with ddp.accumulate(2) as last:
            loss_of(ddp, group.rank(), 1).backward()
        assert last

    for grads in on_ranks(script):
        assert_close(grads, mean(0, 1))


@pytest.mark.parametrize("steps", [0, -1])
def test_fewer_than_one_step_is_refused(steps: int) -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        with pytest.raises(ModuleArgumentError), ddp.accumulate(steps):
            pass

    on_ranks(script, n=1)


# sync_grads.


@pytest.mark.parametrize("views", [True, False])
def test_sync_grads_averages_what_is_there_and_again_changes_nothing(views: bool) -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        with ddp.no_sync():
            loss_of(ddp, group.rank(), 0).backward()
            loss_of(ddp, group.rank(), 1).backward()
        for _ in range(3):
            ddp.sync_grads()
            assert_close(grads_of(ddp.module), mean(0, 1))

    on_ranks(script, gradient_as_bucket_view=views)


def test_sync_grads_before_any_backward_leaves_no_gradient() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        ddp.sync_grads()

    for grads in on_ranks(script):
        assert set(grads.values()) == {None}


def test_sync_grads_first_and_training_afterwards_go_together() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        with ddp.no_sync():
            loss_of(ddp, group.rank(), 0).backward()
        ddp.sync_grads()
        for step in range(1, 4):
            ddp.zero_grad()
            loss_of(ddp, group.rank(), step).backward()
            assert_close(grads_of(ddp.module), mean(step))

    on_ranks(script, bucket_cap_mb=0.00003)


def test_sync_grads_counts_a_rank_without_gradients_as_zeros() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        if group.rank() == 0:
            with ddp.no_sync():
                loss_of(ddp, 0, 0).backward()
        ddp.sync_grads()

    half = {name: grad / 2 for name, grad in local(0, 0).items()}
    for grads in on_ranks(script):
        assert_close(grads, half)


# More than one forward or backward.


@pytest.mark.parametrize("views", [True, False])
def test_backward_twice_after_one_forward_gives_twice_the_mean(views: bool) -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        for step in range(3):
            ddp.zero_grad()
            loss = loss_of(ddp, group.rank(), step)
            loss.backward(retain_graph=True)
            loss.backward()
            assert_close(grads_of(ddp.module), {n: 2 * g for n, g in mean(step).items()})

    on_ranks(script, gradient_as_bucket_view=views, bucket_cap_mb=0.00003)


def test_backward_twice_of_which_the_first_is_inside_no_sync() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        loss = loss_of(ddp, group.rank(), 0)
        with ddp.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()

    for grads in on_ranks(script):
        assert_close(grads, {n: 2 * g for n, g in mean(0).items()})


def test_two_forwards_and_one_backward_are_one_pass() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        seen = watch(group)
        for _ in range(3):
            seen.clear()
            ddp.zero_grad()
            (loss_of(ddp, group.rank(), 0) + loss_of(ddp, group.rank(), 1)).backward()
            assert_close(grads_of(ddp.module), mean(0, 1))
        assert len(seen) == len(ddp.replica.reducer.layout.plan)

    on_ranks(script, bucket_cap_mb=0.00003)


def test_two_forwards_and_two_backwards_in_any_order_are_averaged() -> None:
    def script(ddp: DistributedDataParallel, group: Group) -> None:
        for _ in range(3):
            ddp.zero_grad()
            first, second = (loss_of(ddp, group.rank(), step) for step in (0, 1))
            second.backward()
            assert_close(grads_of(ddp.module), mean(1))
            first.backward()
            assert_close(grads_of(ddp.module), mean(0, 1))

    on_ranks(script, bucket_cap_mb=0.00003)


# Parameters that the averaged pass does not reach.


class Branches(nn.Module):
    """Takes one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)

    def forward(self, x: Tensor, side: str) -> Tensor:
        return self.get_submodule(side)(x).square().sum()


def branches(plan: list[str], **options: Any) -> None:
    """``plan``: for each step the side that each rank takes (l or r); the last is averaged."""
    sides = {"l": "left", "r": "right"}

    def work(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(batch(rank, step), sides[plan[step][rank]])

    def one_rank(group: Group) -> list[Grads]:
        ddp = DistributedDataParallel(seeded(Branches), process_group=group, **options)
        found = []
        for _ in range(3):
            ddp.zero_grad()
            for step in range(len(plan) - 1):
                with ddp.no_sync():
                    work(ddp, group.rank(), step).backward()
            work(ddp, group.rank(), len(plan) - 1).backward()
            found.append({n: g for n, g in grads_of(ddp.module).items() if g is not None})
        return found

    alone = copy.deepcopy(seeded(Branches))
    for rank in (0, 1):
        for step in range(len(plan)):
            work(alone, rank, step).backward()
    expected = {n: p.grad / 2 for n, p in alone.named_parameters() if p.grad is not None}
    for rounds in run_ranks(2, one_rank):
        for found in rounds:
            assert_close(found, expected)


@pytest.mark.parametrize("cap", [None, 0.00001])
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize(
    "plan",
    [
        ["rr", "ll"],  # none reaches what gathered
        ["rl", "ll"],  # one rank has gathered there, the other never
        ["rl", "lr"],
        ["lr", "rl", "ll"],
        ["lr"],  # nothing gathered
        ["ll", "ll"],  # right is never used: no gradient at all
    ],
)
def test_what_gathered_where_the_averaged_pass_does_not_come_is_averaged_too(
    plan: list[str], cap: float | None, views: bool
) -> None:
    branches(plan, bucket_cap_mb=cap, gradient_as_bucket_view=views)


def test_a_gradient_averaged_earlier_stays_as_it_is_when_later_passes_do_not_touch_it() -> None:
    def one_rank(group: Group) -> None:
        ddp = DistributedDataParallel(seeded(Branches), process_group=group, bucket_cap_mb=0.00001)
        ddp(batch(group.rank()), "right").backward()
        kept = ddp.module.right.weight.grad.clone()
        for step in range(3):
            ddp(batch(group.rank(), step), "left").backward()
            assert_close(ddp.module.right.weight.grad, kept)

    run_ranks(2, one_rank)
