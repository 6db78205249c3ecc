"""Ring two and three: compiled steps of shards have the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.compiled import train_step
from paceline.data import ShardedLoader
from paceline.errors import ModuleArgumentError, PeerError
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import seeded

SHARDS = 4


class Net(nn.Module):
    """With random numbers, and with buffers that change in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.norm(self.first(x)))))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def samples() -> TensorDataset:
    return TensorDataset(torch.randn(50, 6, generator=torch.Generator().manual_seed(1)))


def wrapped(group: Group, shards: int | None = SHARDS) -> Any:
    # Not by torch.manual_seed alone: ranks that are threads share its generator.
    return paceline.DistributedDataParallel(seeded(Net), process_group=group, shards=shards)


def trained(group: Group, backend: str, step_of: Callable[..., Any] | None = None) -> list[Tensor]:
    """The weights, buffers and state after two epochs, the last step of each being smaller."""
    ddp = wrapped(group)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    loader = ShardedLoader(samples(), shards=SHARDS, batch=16, group=group)
    make = step_of or train_step
    step = make(ddp, optimizer, loss_of, max_norm=0.5, backend=backend)
    losses = [step(part) for _ in range(2) for part in loader]
    assert all(torch.isfinite(loss) for loss in losses)
    state = [value for found in optimizer.state.values() for value in found.values()]
    return [t.detach().clone() for t in (*ddp.parameters(), *ddp.buffers(), *state)]


def written_out(ddp: Any, optimizer: Any, loss: Any, max_norm: float, backend: str) -> Any:
    def step(part: Any) -> Tensor:
        found = torch.zeros(())
        for shard, (x,) in ddp.shards_of(part):
            with ddp.shard(shard):
                found = loss(ddp, x)
                found.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return step


def test_a_step_traced_and_not_compiled_has_the_bits_of_one_written_out() -> None:
    def one_rank(group: Group) -> None:
        found = trained(group, "eager")
        expected = trained(group, "eager", written_out)
        assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))

    run_ranks(1, one_rank)


def _trained(meeting: Meeting, backend: str) -> list[Tensor]:
    torch.set_num_threads(1)
    with meeting.new_group("gloo") as group:
        return trained(group, backend)


def test_two_ranks_have_the_bits_of_one() -> None:
    """As processes: while one thread compiles, torch's optimizers in all threads of its process
    take the way for compilers, which rounds differently."""
    (alone,) = spawn_ranks(1, _trained, "eager")
    for found in spawn_ranks(2, _trained, "eager"):
        assert all(torch.equal(p, q) for p, q in zip(found, alone, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_bits_are_the_same_on_any_number_of_ranks(backend: str) -> None:
    alone, *_ = spawn_ranks(1, _trained, backend)
    for found in spawn_ranks(3, _trained, backend):
        assert all(torch.equal(p, q) for p, q in zip(found, alone, strict=True))


def test_what_cannot_be_traced_is_an_error_on_all_ranks() -> None:
    def untraceable(model: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return model(x).square().mean()

    def one_rank(group: Group) -> str:
        ddp = wrapped(group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        before = [p.detach().clone() for p in ddp.parameters()]
        bad = group.rank() == 0
        step = train_step(ddp, optimizer, untraceable if bad else loss_of, backend="eager")
        loader = ShardedLoader(samples(), shards=SHARDS, batch=16, group=group)
        with pytest.raises(Exception) as caught:
            step(next(iter(loader)))
        assert all(torch.equal(p, q) for p, q in zip(before, ddp.parameters(), strict=True))
        return type(caught.value).__name__

    first, second = run_ranks(2, one_rank)
    assert first != PeerError.__name__
    assert second == PeerError.__name__


def test_parameters_that_are_frozen_between_steps_are_left_alone() -> None:
    def one_rank(group: Group) -> None:
        ddp = wrapped(group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        step = train_step(ddp, optimizer, loss_of, backend="eager")
        loader = iter(ShardedLoader(samples(), shards=SHARDS, batch=16, group=group))
        step(next(loader))
        ddp.module.first.weight.requires_grad_(False)
        frozen = ddp.module.first.weight.detach().clone()
        other = ddp.module.second.weight.detach().clone()
        step(next(loader))
        assert torch.equal(ddp.module.first.weight, frozen)
        assert not torch.equal(ddp.module.second.weight, other)

    run_ranks(2, one_rank)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"accumulate": 2}, "a step has its shards already"),
        ({"dynamic": True}, "code for any size"),
        ({"graph": True}, "not a single graph"),
        ({"options": {"max_autotune": True}}, "max_autotune chooses code by timing it"),
    ],
)
def test_what_would_change_the_bits_is_refused(options: dict[str, Any], why: str) -> None:
    def one_rank(group: Group) -> None:
        ddp = wrapped(group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with pytest.raises(ModuleArgumentError, match=why):
            train_step(ddp, optimizer, loss_of, **options)

    run_ranks(1, one_rank)
