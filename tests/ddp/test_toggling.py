"""Parameters frozen and thawed inside a forward whose backward passes run inside it too.

That is how Lightning's Trainer runs a ``training_step`` with manual optimization: it is the forward
of the wrapped model, and ``toggle_optimizer`` lets only one optimizer's parameters be trained.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.errors import ThawedParameterError
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import assert_same, data, stack, weights

STEPS = 4


class Gan(nn.Module):
    """``style`` says what is trainable when a step ends."""

    def __init__(self, style: str, prepares: bool) -> None:
        super().__init__()
        self.generator, self.judge = stack(3, 4, 3), stack(3, 4, 1, seed=1)
        self.style, self.prepares = style, prepares
        self.wrapper: list[Any] = []  # a list, so that it is no submodule
        parts = (self.generator, self.judge)
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    def forward(self, noise: Tensor) -> None:
        self.train_one(0, lambda: -self.judge(self.generator(noise)).mean())
        self.train_one(1, lambda: self.judge(self.generator(noise).detach()).square().mean())

    def train_one(self, which: int, loss_fn: Any) -> None:
        parts = (self.generator, self.judge)
        for number, part in enumerate(parts):
            part.requires_grad_(number == which)
        loss = loss_fn()
        if self.prepares:
            self.prepare(loss)
        loss.backward()
        self.optimizers[which].step()
        self.optimizers[which].zero_grad()
        if self.style == "all":
            self.requires_grad_(True)

    def prepare(self, loss: Tensor) -> None:
        """What Lightning does before a backward of manual optimization."""
        for ddp in self.wrapper:
            ddp.require_forward_param_sync = True
            ddp.reducer._rebuild_buckets()
            ddp.reducer.prepare_for_backward([loss])


def train(ddp: Any, rank: int) -> dict[str, Tensor]:
    ddp.module.wrapper.append(ddp)
    for step in range(STEPS):
        ddp(data(4, 3, seed=10 * step + rank))
    return weights(ddp)


def _train_under_both(meeting: Meeting, backend: str) -> list[tuple[Any, Any]]:
    dist.init_process_group("gloo")
    group = meeting.new_group(backend)
    found = []
    for style in ("all", "last"):
        ours = train(DDP(Gan(style, True), process_group=group), meeting.rank)
        torchs = nn.parallel.DistributedDataParallel
        theirs = train(torchs(Gan(style, True), find_unused_parameters=True), meeting.rank)
        found.append((ours, theirs))
    group.shutdown()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_gan_in_the_manner_of_lightning_trains_as_under_torch(backend: str) -> None:
    for rank in spawn_ranks(2, _train_under_both, backend):
        for ours, theirs in rank:
            assert_same(ours, theirs)


@pytest.mark.parametrize("style", ["all", "last"])
@pytest.mark.parametrize("cap", [None, 1e-4])
@pytest.mark.parametrize("prepares", [True, False])
def test_a_gan_inside_one_forward_is_averaged(style: str, cap: float, prepares: bool) -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DDP(Gan(style, prepares), process_group=group, bucket_cap_mb=cap)
        return train(ddp, group.rank())

    first, second = run_ranks(2, one_rank)
    assert_same(first, second, rtol=0, atol=0)
    alone = Gan(style, prepares=False)
    alone(data(4, 3, seed=0))
    assert not torch.equal(alone.judge[0].weight, first["judge.0.weight"])


@pytest.mark.parametrize("given", [lambda out: out, lambda out: out.sum(), lambda out: [out]])
def test_a_reducer_is_told_of_one_tensor_or_of_several(given: Any) -> None:
    def one_rank(group: Group) -> float:
        ddp = DDP(nn.Linear(1, 1, bias=False), process_group=group)
        out = ddp.module(torch.full((2, 1), 1.0 + group.rank()))
        told = given(out)
        ddp.reducer.prepare_for_backward(told)
        (told if isinstance(told, Tensor) else out).sum().backward()
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [3.0, 3.0]


def test_what_was_frozen_for_long_and_thaws_inside_a_forward_is_an_error() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = stack(3, 3), stack(3, 3)

        def forward(self, x: Tensor, thaw: bool) -> None:
            self.first.requires_grad_(thaw)
            self.second(self.first(x)).sum().backward()

    def one_rank(group: Group) -> None:
        ddp = DDP(Late(), process_group=group)
        ddp.module.first.requires_grad_(False)
        for step in range(3):
            ddp(data(4, 3, seed=step), False)
        with pytest.raises(ThawedParameterError, match="first"):
            ddp(data(4, 3), True)

    run_ranks(2, one_rank)


def test_a_backward_of_the_module_alone_may_reach_what_has_thawed() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(stack(3, 3, 3), process_group=group)
        ddp.module[0].requires_grad_(False)
        for step in range(2):
            ddp(data(4, 3, seed=step)).sum().backward()
        ddp.module[0].requires_grad_(True)
        if group.rank() == 0:
            ddp.module(data(4, 3)).sum().backward()

    run_ranks(2, one_rank)
