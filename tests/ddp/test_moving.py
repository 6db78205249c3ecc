"""A wrapper goes on in another group: what was given the old one follows, or says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline import SyncBatchNorm, hooks
from paceline.data import DistributedSampler
from paceline.errors import HookStateError, ModuleStateError, OptimizerStateError
from paceline.groups import Group
from paceline.optim import ZeroRedundancyOptimizer
from paceline.testing import run_ranks
from tests.ddp.ranks import batch, grads_of, mlp, seeded

Change = Callable[[Group], Group | None]


def split(group: Group) -> Group | None:
    """The last of three ranks is lost; the others go on in another object."""
    return group.split([[0, 1], [2]]) if group.rank() < 2 else lost(group)


def lost(group: Group) -> None:
    group.split([[0, 1], [2]])


def reconfigure(group: Group) -> Group | None:
    """The last of three ranks is lost; the others go on in the same object."""
    rank = group.rank()
    group.reconfigure([0, 1])
    return group if rank < 2 else None


CHANGES = [split, reconfigure]


def register(ddp: DDP, group: Group, name: str) -> Any:
    """A hook that was given the wrapper's group by name; its state."""
    if name == "builtin":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        return None
    if name == "codec":
        hook = hooks.CodecHook(hooks.Fp16(), group, small=0)
        hook.register(ddp)
        return hook
    states = {
        "fp16": lambda: (group, hooks.fp16_compress_hook),
        "powersgd": lambda: (
            hooks.PowerSGDState(group, 64, start_powerSGD_iter=2),
            hooks.powerSGD_hook,
        ),
        "local": lambda: (hooks.PostLocalSGDState(group, None, 0), hooks.post_localSGD_hook),
        "quantized": lambda: (group, hooks.quantization_pertensor_hook),
    }
    state, hook = states[name]()
    ddp.register_comm_hook(state, hook)
    return state


def backward(ddp: DDP, rank: int, step: int) -> dict[str, Any]:
    ddp.zero_grad()
    ddp(batch(rank, step)).square().sum().backward()
    return grads_of(ddp.module)


HOOKS = ["builtin", "fp16", "codec", "powersgd", "local", "quantized"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_was_given_the_group_follows(name: str, change: Change) -> None:
    def one_rank(group: Group) -> dict[str, Any] | None:
        rank = group.rank()
        ddp = DDP(seeded(mlp), process_group=group)
        register(ddp, group, name)
        for step in range(2):
            backward(ddp, rank, step)
        now = change(group)
        if now is None:
            return None
        ddp._update_process_group(now)
        for step in range(2, 4):
            found = backward(ddp, rank, step)
        return found

    expected = copy.deepcopy(seeded(mlp))
    for rank in range(2):
        (expected(batch(rank, 3)).square().sum() / 2).backward()
    first, second, gone = run_ranks(3, one_rank)
    assert gone is None
    assert_close(first, second, rtol=0, atol=0)
    loose = {"rtol": 0.1, "atol": 0.2} if name == "quantized" else {"rtol": 1e-2, "atol": 1e-2}
    assert_close(first, grads_of(expected), **loose)


@pytest.mark.parametrize("name", ["builtin", "fp16", "powersgd"])
def test_a_hook_follows_into_a_group_that_a_rank_has_joined(name: str) -> None:
    def one_rank(group: Group) -> dict[str, Any]:
        rank = group.rank()
        part = group.split([[0, 1], [2]])
        ddp = DDP(seeded(mlp), process_group=part)
        register(ddp, part, name)
        for step in range(3):
            backward(ddp, rank, step)
        ddp._update_process_group(group)
        return backward(ddp, rank, 3)

    expected = seeded(mlp)
    for rank in range(3):
        (expected(batch(rank, 3)).square().sum() / 3).backward()
    for found in run_ranks(3, one_rank):
        assert_close(found, grads_of(expected), rtol=1e-2, atol=1e-2)


def test_another_wrapper_keeps_the_group_it_was_given() -> None:
    def one_rank(group: Group) -> tuple[Any, Any]:
        moved, stays = (DDP(seeded(mlp), process_group=group) for _ in range(2))
        for ddp in (moved, stays):
            ddp.register_comm_hook(group, hooks.fp16_compress_hook)
        moved._update_process_group(group.split([[0, 1], [2]]))
        return stays._comm_hooks[0][1] is group, moved._comm_hooks[0][1] is group

    assert run_ranks(3, one_rank) == [(True, False)] * 3


def test_a_subgroup_of_the_old_group_is_named_before_anything_moves() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(seeded(mlp), process_group=group)
        part = group.split([[0, 1], [2]])
        state = hooks.PostLocalSGDState(group, part, 0)
        ddp.register_comm_hook(state, hooks.post_localSGD_hook)
        with pytest.raises(HookStateError, match="has a subgroup of the old one"):
            ddp._update_process_group(part)
        assert ddp.process_group is group
        assert state.process_group is group

    run_ranks(3, one_rank)


# Layers.


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_sync_batch_norm_follows(change: Change, given: bool) -> None:
    def norm(group: Group) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        nn.init.eye_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        return SyncBatchNorm.convert_sync_batchnorm(model, group if given else None)

    def one_rank(group: Group) -> Tensor | None:
        rank = group.rank()
        ddp = DDP(norm(group), process_group=group)
        ddp(batch(rank)).sum().backward()
        now = change(group)
        if now is None:
            return None
        ddp._update_process_group(now)
        ddp.module[1].reset_running_stats()
        ddp(batch(rank, 1)).sum().backward()
        return ddp.module[1].running_mean.clone()

    found = run_ranks(3, one_rank)
    both = torch.cat([batch(rank, 1) for rank in range(2)]).mean(0)
    assert_close(found[:2], [0.1 * both] * 2)


# Optimizers and samplers.


def test_a_sharded_optimizer_says_that_its_group_has_other_ranks() -> None:
    def one_rank(group: Group) -> None:
        model = seeded(mlp)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group, lr=0.1
        )
        rank = group.rank()
        model(batch(0)).sum().backward()
        optimizer.step()
        group.reconfigure([0, 1])
        if rank == 2:
            return
        for act in (optimizer.step, optimizer.consolidate_state_dict):
            with pytest.raises(OptimizerStateError, match=r"then this was rank \d of 3"):
                act()

    run_ranks(3, one_rank)


def test_a_wrapper_whose_gradients_are_sharded_stays_where_it_is() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(seeded(mlp), process_group=group)
        ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
        with pytest.raises(ModuleStateError, match="holds its part of the gradients"):
            ddp._update_process_group(group.split([[0, 1], [2]]))
        assert ddp.process_group is group

    run_ranks(3, one_rank)


@pytest.mark.parametrize("through", ["group", "wrapper"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_sampler_deals_what_is_left_to_those_who_are_left(change: Change, through: str) -> None:
    def one_rank(group: Group) -> tuple[list[int], list[int]]:
        ddp = DDP(seeded(mlp), process_group=group)
        source = ddp if through == "wrapper" else group
        sampler = DistributedSampler(range(14), shuffle=False, group=source)
        drawn = iter(sampler)
        first = [next(drawn) for _ in range(2)]
        now = change(group)
        if now is None:
            return first, []
        if through == "wrapper":
            ddp._update_process_group(now)
        elif now is not group:  # nobody tells a sampler of another object
            sampler = DistributedSampler(range(14), shuffle=False, group=now)
            sampler.load_state_dict({**sampler.state_dict(), "position": 6})
            return first, list(sampler)
        sampler.load_state_dict(sampler.state_dict())
        return first, list(sampler)

    found = run_ranks(3, one_rank)
    assert sorted(index for first, _ in found for index in first) == list(range(6))
    assert [rest for _, rest in found] == [[6, 8, 10, 12], [7, 9, 11, 13], []]


def test_a_copy_of_a_sampler_deals_as_it_did() -> None:
    def one_rank(group: Group) -> list[int]:
        sampler = DistributedSampler(range(5), shuffle=False, group=group)
        return list(copy.deepcopy(sampler))

    assert run_ranks(2, one_rank) == [[0, 2, 4], [1, 3]]
