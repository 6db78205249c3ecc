"""Post-local SGD: all ranks first, a few of them later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.groups import Group
from paceline.testing import run_ranks
from tests.ddp.toys import assert_same, count_calls, data, grads, mean_grads, stack

RANKS = 4


def batch(rank: int) -> Tensor:
    return data(3, 4, seed=rank)


def loss(model: Any, rank: int) -> Tensor:
    return model(batch(rank)).square().mean()


def model() -> torch.nn.Module:
    return stack(4, 5, 2)


def mean_of(*ranks: int) -> Any:
    return mean_grads(model(), len(ranks), lambda m, at: loss(m, ranks[at]))


def train(steps: int, make: Any) -> list[Any]:
    """Each rank's gradients after every step; ``make(group)`` gives the state."""

    def one_rank(group: Group) -> Any:
        ddp = DDP(model(), process_group=group)
        state = make(group)
        ddp.register_comm_hook(state, hooks.post_localSGD_hook)
        found = []
        for _ in range(steps):
            ddp.zero_grad()
            loss(ddp, group.rank()).backward()
            found.append(grads(ddp))
        return found, state

    return run_ranks(RANKS, one_rank)


def pairs(group: Group) -> hooks.PostLocalSGDState:
    return hooks.PostLocalSGDState(group, group.split([[0, 1], [2, 3]]), 2)


def test_gradients_are_averaged_over_all_ranks_first_and_over_some_later() -> None:
    for rank, (found, state) in enumerate(train(4, pairs)):
        for early in found[:2]:
            assert_same(early, mean_of(0, 1, 2, 3))
        for late in found[2:]:
            assert_same(late, mean_of(0, 1) if rank < 2 else mean_of(2, 3))
        assert state.iter == 2


def test_gradients_may_stay_at_home() -> None:
    def alone(group: Group) -> hooks.PostLocalSGDState:
        return hooks.PostLocalSGDState(group, None, 1, post_local_gradient_allreduce=False)

    for rank, (found, state) in enumerate(train(3, alone)):
        assert_same(found[0], mean_of(0, 1, 2, 3))
        assert_same(found[2], mean_of(rank))
        assert state.subgroup is None


def test_without_a_subgroup_it_is_the_ranks_on_this_machine() -> None:
    def here(group: Group) -> hooks.PostLocalSGDState:
        return hooks.PostLocalSGDState(group, None, 1)

    for found, state in train(3, here):
        assert_same(found[2], mean_of(0, 1, 2, 3))
        assert state.subgroup.size() == RANKS


def test_weights_count_when_the_parameters_are_averaged_later() -> None:
    """The mean over ranks of what subgroups got is the mean over all samples."""
    counts = (1, 2, 3, 10)

    def one_rank(group: Group) -> list[Any]:
        found = []
        for state, hook in ((pairs(group), hooks.post_localSGD_hook), (group, None)):
            ddp = DDP(model(), process_group=group)
            if hook is not None:
                ddp.register_comm_hook(state, hook)
            for _ in range(4):
                ddp.zero_grad()
                with ddp.samples(counts[group.rank()]):
                    loss(ddp, group.rank()).backward()
            found.append(grads(ddp))
        return found

    ranks = run_ranks(RANKS, one_rank)
    local = [found for found, _ in ranks]
    mean = {name: sum(one[name] for one in local) / RANKS for name in local[0]}
    assert_same(mean, ranks[0][1])
    assert not torch.equal(local[0]["0.weight"], local[3]["0.weight"])


def test_the_bigger_group_has_little_to_do_then() -> None:
    def one_rank(group: Group) -> list[list[str]]:
        ddp = DDP(model(), process_group=group)
        ddp.register_comm_hook(pairs(group), hooks.post_localSGD_hook)
        seen, calls = [], count_calls(group)
        for _ in range(4):
            calls.clear()
            loss(ddp, group.rank()).backward()
            seen.append(list(calls))
        return seen

    for seen in run_ranks(RANKS, one_rank):
        assert len(seen[3]) == len(seen[1]) - 1 == 1  # DDP's own header is left


@pytest.mark.parametrize("name", ["process_group", "subgroup", "start_localSGD_iter", "iter"])
def test_the_state_has_torchs_attributes(name: str) -> None:
    assert hasattr(hooks.PostLocalSGDState(None, None, 3), name)
