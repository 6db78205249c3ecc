"""Optimizers that step with their buckets, under torch's private names."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.optim import as_functional_optim

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline._exchange import mean_later
from paceline.groups import Group
from paceline.testing import run_ranks
from tests.ddp.toys import TINY, assert_same, weights
from tests.hooks.table import Net, batch, loss

ADAM = {"lr": 0.01}


def train(ddp: Any, group: Group, optimizer: Any = None) -> Any:
    for step in range(4):
        ddp.zero_grad()
        loss(ddp, batch(group.rank(), step)).backward()
        if optimizer is not None:
            optimizer.step()
    return weights(ddp)


def functional(ranks: int) -> list[Any]:
    """Made here: torch changes the filters of warnings meanwhile, which threads share."""
    with warnings.catch_warnings(record=True):
        return [as_functional_optim(torch.optim.Adam, **ADAM) for _ in range(ranks)]


def separate(group: Group) -> Any:
    ddp = DDP(Net(), process_group=group)
    return train(ddp, group, torch.optim.Adam(ddp.parameters(), **ADAM))


def elsewhere(state, bucket):
    """A hook whose result is not in the bucket's own memory."""
    return mean_later(state, bucket.buffer().clone())


@pytest.mark.parametrize("hook", [hooks.allreduce_hook, elsewhere])
def test_a_functional_optimizer_steps_what_the_hook_has_averaged(hook: Any) -> None:
    optimizers = functional(2)

    def one_rank(group: Group) -> Any:
        ddp = DDP(Net(), process_group=group, bucket_cap_mb=TINY)
        state = hooks._OptimizerHookState(optimizers[group.rank()])
        ddp.register_comm_hook(group, hooks._hook_then_optimizer(hook, state))
        return train(ddp, group), separate(group)

    for inside, after in run_ranks(2, one_rank):
        assert_same(inside, after)


def test_only_the_chosen_parameters_are_stepped() -> None:
    optimizers = functional(2)

    def one_rank(group: Group) -> Any:
        model = Net()
        ddp = DDP(model, process_group=group)
        state = hooks._OptimizerHookState(optimizers[group.rank()], [model.a.weight])
        ddp.register_comm_hook(group, hooks._hook_then_optimizer(hooks.allreduce_hook, state))
        return train(ddp, group)

    first = weights(Net())
    for found in run_ranks(2, one_rank):
        changed = [name for name, value in found.items() if not torch.equal(value, first[name])]
        assert changed == ["a.weight"]


def test_an_optimizer_without_step_param_is_refused() -> None:
    with pytest.raises(ValueError, match="must implement method step_param"):
        hooks._OptimizerHookState(torch.optim.SGD([torch.zeros(1)], lr=1))


def test_an_overlapped_optimizer_attaches_itself() -> None:
    def one_rank(group: Group) -> Any:
        ddp = DDP(Net(), process_group=group)
        overlapped = hooks._as_overlapped_optim(torch.optim.Adam, ddp.parameters(), **ADAM)
        assert isinstance(overlapped, hooks.OverlappedOptimizer)
        overlapped.register_ddp(ddp)
        with pytest.raises(NotImplementedError, match="does not support overlapped FSDP"):
            overlapped.register_fsdp(None)
        return train(ddp, group), separate(group)

    for inside, after in run_ranks(2, one_rank):
        assert_same(inside, after)


def test_a_kind_of_optimizer_may_bring_its_own_class() -> None:
    class Mine(torch.optim.SGD):
        pass

    class Overlapped(hooks.OverlappedOptimizer):
        def __init__(self, optim_cls: type, params: Any, lr: float) -> None:
            super().__init__(optim_cls)
            self.lr = lr

        def register_ddp(self, ddp: Any) -> None:
            ddp.append(self.lr)

        def register_fsdp(self, fsdp: Any) -> None:
            raise NotImplementedError

    hooks.register_overlapped(Mine)(Overlapped)
    seen: list[float] = []
    hooks._as_overlapped_optim(Mine, [], lr=0.5).register_ddp(seen)
    assert seen == [0.5]
    with pytest.raises(ValueError, match="already registered"):
        hooks.register_overlapped(torch.optim.Adam)(Overlapped)
