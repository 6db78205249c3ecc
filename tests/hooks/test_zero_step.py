"""A sharded optimizer inside the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.groups import Group
from paceline.optim import ZeroRedundancyOptimizer
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import TINY, assert_same, weights
from tests.hooks.table import TABLE, Net, batch, loss

WRAPPERS = [hooks.hook_with_zero_step, hooks.hook_with_zero_step_interleaved]
SGD = {"lr": 0.1, "momentum": 0.9}


def zero_for(ddp: Any, group: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, group, overlap_with_ddp=True, **SGD
    )


def overlapped(
    group: Any, wrapper: Any, inner: Any = hooks.allreduce_hook, state: Any = None
) -> Any:
    ddp = DDP(Net(), process_group=group, bucket_cap_mb=TINY)
    hook = wrapper(inner, ddp, zero_for(ddp, group))
    ddp.register_comm_hook(group if state is None else state, hook)
    for _ in range(2):  # torch lets these go by, and so do we
        loss(ddp, batch(group.rank())).backward()
    ddp.zero_grad()
    return ddp


def train(ddp: Any, group: Any, optimizer: Any = None, steps: int = 4) -> dict[str, Tensor]:
    for step in range(steps):
        ddp.zero_grad()
        loss(ddp, batch(group.rank(), step)).backward()
        if optimizer is not None:
            optimizer.step()
    return weights(ddp)


def separate(group: Any) -> dict[str, Tensor]:
    ddp = DDP(Net(), process_group=group)
    return train(ddp, group, torch.optim.SGD(ddp.parameters(), **SGD))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_step_inside_is_the_step_after(wrapper: Any) -> None:
    def one_rank(group: Group) -> Any:
        return train(overlapped(group, wrapper), group), separate(group)

    for inside, after in run_ranks(2, one_rank):
        assert_same(inside, after)


def test_the_first_passes_change_nothing() -> None:
    def one_rank(group: Group) -> Any:
        return weights(overlapped(group, WRAPPERS[0])), weights(Net())

    for found, first in run_ranks(2, one_rank):
        assert_same(found, first)


def test_weights_are_divided_by_before_the_step() -> None:
    def one_rank(group: Group) -> Any:
        found = []
        for inside in (True, False):
            ddp = overlapped(group, WRAPPERS[1]) if inside else DDP(Net(), process_group=group)
            optimizer = torch.optim.SGD(ddp.parameters(), **SGD)
            for step in range(3):
                ddp.zero_grad()
                rows = 2 + 3 * group.rank()
                with ddp.samples(rows):
                    loss(ddp, batch(group.rank(), step, rows=rows)).backward()
                if not inside:
                    optimizer.step()
            found.append(weights(ddp))
        return found

    for inside, after in run_ranks(2, one_rank):
        assert_same(inside, after)


def test_a_rank_that_has_run_out_still_steps_its_shard() -> None:
    def one_rank(group: Group) -> Any:
        found = []
        for inside in (True, False):
            ddp = overlapped(group, WRAPPERS[0]) if inside else DDP(Net(), process_group=group)
            optimizer = torch.optim.SGD(ddp.parameters(), **SGD)
            with ddp.join():
                for step in range(2 + group.rank()):
                    ddp.zero_grad()
                    loss(ddp, batch(group.rank(), step)).backward()
                    if not inside:
                        optimizer.step()
            found.append(weights(ddp))
        return found

    ranks = run_ranks(2, one_rank)
    for inside, _ in ranks:  # without, the last rank alone has taken the last step
        assert_same(inside, ranks[1][1])


def test_a_pass_that_fails_somewhere_steps_nowhere() -> None:
    def one_rank(group: Group) -> Any:
        failing: list[bool] = []

        def inner(state: Any, bucket: Any) -> Any:
            if failing and bucket.is_last():
                raise ArithmeticError("no luck")
            return hooks.allreduce_hook(state, bucket)

        ddp = overlapped(group, WRAPPERS[1], inner)
        before = train(ddp, group)
        failing.append(True)
        with pytest.raises(ArithmeticError):
            loss(ddp, batch(group.rank())).backward()
        return before, weights(ddp)

    for before, after in run_ranks(2, one_rank):
        assert_same(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["fp16", "8 bits", "PowerSGD in full"])
def test_any_hook_may_do_the_averaging(name: str) -> None:
    entry = TABLE[name]

    def one_rank(group: Group) -> Any:
        ddp = overlapped(group, WRAPPERS[1], entry.hook, entry.state(group))
        return train(ddp, group), separate(group)

    ranks = run_ranks(2, one_rank)
    for inside, after in ranks:
        assert_same(inside, after, rtol=1e-2, atol=1e-2)
        assert_same(inside, ranks[0][0], rtol=0, atol=0)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_optimizer_that_was_not_made_for_it_is_refused(wrapper: Any) -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Net(), process_group=group)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, group, lr=0.1)
        with pytest.raises(ValueError, match="overlap_with_ddp=True"):
            wrapper(hooks.allreduce_hook, ddp, zero)

    run_ranks(1, one_rank)


def _under_torch(meeting: Meeting) -> list[dict[str, Tensor]]:
    """With each of the wrappers, and without."""
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    found = []
    for wrapper in (*WRAPPERS, None):
        ddp = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=TINY)
        optimizer = None if wrapper else torch.optim.SGD(ddp.parameters(), **SGD)
        if wrapper is not None:
            hook = wrapper(hooks.allreduce_hook, ddp, zero_for(ddp, world))
            ddp.register_comm_hook(None, hook)
            for _ in range(2):
                loss(ddp, batch(meeting.rank)).backward()
        found.append(train(ddp, world, optimizer))
    dist.destroy_process_group()
    return found


def test_it_works_under_torchs_ddp_over_gloo() -> None:
    for inside, interleaved, after in spawn_ranks(2, _under_torch):
        assert_same(inside, after)
        assert_same(interleaved, after)
