"""Sums of several ranks: who has which terms, and of which size, is not seen in the means."""

from __future__ import annotations

import math
import os
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import paceline
from paceline import DistributedDataParallel as DDP
from paceline._reducer import Done, StepSums, Summed, settle
from paceline.data import Shard
from paceline.errors import ModuleArgumentError, PeerDiedError, StepMismatchError
from paceline.groups import Call, Group
from paceline.optim import ZeroRedundancyOptimizer
from paceline.testing import Meeting, run_ranks, spawn_ranks

SHAPES = ((5,), (3, 4), (1,), (0,))
SIZES = (0.0, 1e-40, 1e-30, 1e-9, 1.0, 3.0, 1e4, 1e20, math.inf, math.nan)


def terms_of(shard: int, seed: int, kind: torch.dtype) -> dict[int, Tensor]:
    """The terms of one shard: some tensors have none, some are zeros, some are not finite."""
    source = random.Random(f"{seed} {shard}")
    generator = torch.Generator().manual_seed(source.randrange(1 << 30))
    found = {}
    for number, shape in enumerate(SHAPES):
        size = source.choice(SIZES)
        if source.random() < 0.8:
            found[number] = torch.randn(shape, generator=generator, dtype=kind) * size
    return found


def means(group: Group, owners: list[int], seed: int, kind: torch.dtype) -> dict[int, Any]:
    sums = StepSums([Summed(str(s), torch.empty(s, dtype=kind)) for s in SHAPES], 9, group)
    sums.begin(range(len(SHAPES)))
    source, weights = random.Random(seed), {}
    weighed = [source.choice([1, 2, 1000]) for _ in owners]
    mine = [shard for shard, owner in enumerate(owners) if owner == group.rank()]
    for shard in random.Random(str(owners)).sample(mine, len(mine)):
        sums.add(terms_of(shard, seed, kind), weighed[shard])
        weights[shard] = weighed[shard]
    agreed = settle(group, Done(len(owners), weights, {}), len(SHAPES), sums.sums)
    sums.exchange(agreed.levels)
    assert agreed.weight == sum(weighed)
    found = sums.means(sorted(agreed.touched), agreed.weight)
    return {n: mean.tolist() for n, mean in found.items()}


@given(
    seed=st.integers(0, 1 << 20),
    ranks=st.integers(2, 5),
    kind=st.sampled_from([torch.float32, torch.float64]),
    owners=st.lists(st.integers(0, 4), min_size=1, max_size=9),
)
@settings(max_examples=40, deadline=None)
def test_owners_and_orders_are_not_seen_whatever_the_sizes_of_terms(
    seed: int, ranks: int, kind: torch.dtype, owners: list[int]
) -> None:
    shared = [owner % ranks for owner in owners]
    (alone,) = run_ranks(1, lambda group: means(group, [0] * len(owners), seed, kind))
    for found in run_ranks(ranks, lambda group: means(group, shared, seed, kind)):
        assert repr(found) == repr(alone)


def calls_of_a_step(group: Group, sizes: list[float]) -> list[tuple[str, int]]:
    """What a step sends when shards have gradients of these sizes."""
    layer = nn.Linear(10, 10, bias=False)
    ddp, seen = DDP(layer, process_group=group, shards=len(sizes)), []

    def note(call: Call) -> None:
        seen.append((call.kind, call.inputs[0].numel()))

    handle: RemovableHandle = group.register_hooks(before=note)
    for index in ddp.shards_of(range(group.rank(), len(sizes), group.size())):
        with ddp.shard(Shard(0, 0, index, len(sizes))):
            (ddp(torch.ones(1, 10)) * sizes[index]).sum().backward()
    handle.remove()
    return seen


def test_a_step_is_two_collectives_and_a_third_where_sizes_differ_much() -> None:
    alike = run_ranks(2, lambda group: calls_of_a_step(group, [1.0, 1.5]))
    assert [[kind for kind, _ in calls] for calls in alike] == [["all_reduce"] * 2] * 2
    assert [calls[1][1] for calls in alike] == [104, 104]
    other = run_ranks(2, lambda group: calls_of_a_step(group, [1.0, 300.0]))
    assert [[kind for kind, _ in calls] for calls in other] == [["all_reduce"] * 3] * 2


def with_threads(meeting: Meeting) -> str:
    torch.set_num_threads(1 + meeting.rank)
    group = meeting.new_group("shm")
    ddp = DDP(nn.Linear(2, 1), process_group=group, shards=2)
    try:
        with pytest.raises(StepMismatchError, match="threads differ") as caught:
            for index in ddp.shards_of([group.rank()]):
                with ddp.shard(Shard(0, 0, index, 2)):
                    ddp(torch.ones(1, 2)).sum().backward()
        return str(caught.value)
    finally:
        group.shutdown()


def test_ranks_with_different_numbers_of_threads_are_refused() -> None:
    for said in spawn_ranks(2, with_threads):
        assert "rank 0 has 1; rank 1 has 2" in said


def dies(meeting: Meeting) -> list[int]:
    group = meeting.new_group("shm")
    ddp = DDP(nn.Linear(2, 1), process_group=group, shards=2)
    with pytest.raises(PeerDiedError) as caught:
        for index in ddp.shards_of([group.rank()]):
            with ddp.shard(Shard(0, 0, index, 2)):
                ddp(torch.ones(1, 2)).sum().backward()
                if group.rank() == 1:
                    os._exit(0)
    return list(caught.value.ranks)


def test_a_rank_that_dies_in_a_shard_is_noticed_at_the_end_of_the_step() -> None:
    assert spawn_ranks(2, dies, may_die=[1]) == [[1], None]


class Squares(nn.Module):
    """A model that is only parameters."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(p * x).sum().square() for p in self.params]).sum()


@pytest.mark.parametrize("fused", [False, True])
def test_steps_of_zero_have_the_same_bits_for_parameters_of_any_size(fused: bool) -> None:
    sizes = [1, 2, 3, *range(14, 50, 3), *range(64, 81)]

    def one_rank(group: Group) -> list[Tensor]:
        source = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(n, generator=source)) for n in sizes]
        ddp = DDP(Squares(params), process_group=group, shards=3)
        zero = ZeroRedundancyOptimizer(
            params, torch.optim.SGD, group, ddp=ddp, lr=0.01, momentum=0.9, fused=fused
        )
        for step in range(3):
            mine = [i for i in range(3) if (i + step) % group.size() == group.rank()]
            for index in ddp.shards_of(mine):
                with ddp.shard(Shard(0, step, index, 3)):
                    ddp(torch.tensor(index + 0.3)).backward()
            zero.step()
            zero.zero_grad()
        return [p.detach().clone() for p in params]

    (alone,) = run_ranks(1, one_rank)
    for ranks in (2, 3):
        for found in run_ranks(ranks, one_rank):
            assert all(map(torch.equal, alone, found))


def test_zero_that_cuts_parameters_is_refused() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(nn.Linear(2, 1), process_group=group, shards=1)
        with pytest.raises(paceline.errors.OptimizerArgumentError, match="has shards"):
            ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.SGD, group, ddp=ddp, lr=1.0, cut="flat"
            )
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, group, lr=1.0)
        with pytest.raises(ModuleArgumentError, match="cuts parameters"):
            zero.step()

    run_ranks(1, one_rank)


def test_a_group_of_other_ranks_goes_on_with_the_same_bits() -> None:
    """The wrapper is moved from a group of three to one of its two first ranks."""

    def one_rank(group: Group) -> Any:
        layer = nn.Linear(3, 2)
        nn.init.constant_(layer.weight, 0.5)
        nn.init.constant_(layer.bias, 0.1)
        ddp = DDP(layer, process_group=group, shards=4)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        inner = group.split([0, 1])
        for step in range(4):
            if step == 2 and group.size() == 3:
                if group.rank() == 2:
                    return None
                ddp._update_process_group(inner)
            ranks = ddp.replica.group.size()
            for index in ddp.shards_of(range(group.rank(), 4, ranks)):
                with ddp.shard(Shard(0, step, index, 4)):
                    ddp(torch.full((1, 3), index + 0.7)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.detach().clone()

    def alone(group: Group) -> Any:
        layer = nn.Linear(3, 2)
        nn.init.constant_(layer.weight, 0.5)
        nn.init.constant_(layer.bias, 0.1)
        ddp = DDP(layer, process_group=group, shards=4)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            for index in ddp.shards_of(range(4)):
                with ddp.shard(Shard(0, step, index, 4)):
                    ddp(torch.full((1, 3), index + 0.7)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.detach().clone()

    first, second, _ = run_ranks(3, one_rank)
    (expected,) = run_ranks(1, alone)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
