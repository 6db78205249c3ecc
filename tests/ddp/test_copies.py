"""Copies and states of a wrapped model."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel
from paceline.errors import ModuleStateError
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import batch, mlp, seeded


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    model(batch(rank, step)).square().sum().backward()


def step_by_step(model: nn.Module, rank: int, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# States.


def test_state_dict_has_the_models_entries_under_module() -> None:
    def one_rank(group: Group) -> None:
        model = mlp()
        ddp = DistributedDataParallel(model, process_group=group)
        state = ddp.state_dict()
        assert list(state) == [f"module.{name}" for name in model.state_dict()]
        assert_close(list(state.values()), list(model.state_dict().values()))

    run_ranks(1, one_rank)


def test_a_state_is_loaded_into_a_wrapper_and_into_the_bare_model() -> None:
    def one_rank(group: Group) -> None:
        first = DistributedDataParallel(seeded(mlp, 1), process_group=group)
        second = DistributedDataParallel(seeded(mlp, 2), process_group=group)
        step_by_step(first, group.rank())
        step_by_step(second, group.rank())
        second.load_state_dict(first.state_dict())
        bare = mlp()
        bare.load_state_dict(first.module.state_dict())
        step_by_step(first, group.rank())
        step_by_step(second, group.rank())
        assert_close(weights(second), weights(first))
        assert_close(bare(batch(0)), bare(batch(0)))

    run_ranks(2, one_rank)


def test_train_and_eval_reach_the_model_and_return_the_wrapper() -> None:
    def one_rank(group: Group) -> None:
        ddp = DistributedDataParallel(nn.Sequential(mlp()), process_group=group)
        assert ddp.eval() is ddp
        assert not any(m.training for m in ddp.modules())
        assert ddp.train() is ddp
        assert all(m.training for m in ddp.modules())
        assert not ddp.train(False).module.training

    run_ranks(1, one_rank)


# Copies.


@pytest.mark.parametrize("trained", [False, True])
def test_a_deep_copy_trains_on_its_own(trained: bool) -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], ...]:
        ddp = DistributedDataParallel(seeded(mlp), process_group=group, bucket_cap_mb=0.00003)
        if trained:
            step_by_step(ddp, group.rank())
        twin = copy.deepcopy(ddp)
        assert type(twin) is DistributedDataParallel
        assert twin.module is not ddp.module
        assert twin.process_group is ddp.process_group
        before = weights(ddp)
        step_by_step(twin, group.rank())
        assert_close(weights(ddp), before, rtol=0, atol=0)  # the original did not move
        step_by_step(ddp, group.rank())
        return weights(ddp), weights(twin)

    ranks = run_ranks(2, one_rank)
    for own, twin in ranks:
        assert_close(own, twin)
        assert_close(own, ranks[0][0], rtol=0, atol=0)


def test_a_deep_copy_has_the_same_settings() -> None:
    def one_rank(group: Group) -> None:
        ddp = DistributedDataParallel(
            mlp(),
            process_group=group,
            bucket_cap_mb=3,
            gradient_as_bucket_view=False,
            find_unused_parameters=True,
            forward_sync_buffers=False,
        )
        twin = copy.deepcopy(ddp)
        for name in (
            "bucket_bytes_cap",
            "gradient_as_bucket_view",
            "find_unused_parameters",
            "forward_sync_buffers",
        ):
            assert getattr(twin, name) == getattr(ddp, name)

    run_ranks(1, one_rank)


def test_a_model_that_holds_a_wrapper_can_be_copied_too() -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], list[Tensor]]:
        outer = nn.Sequential(DistributedDataParallel(seeded(mlp), process_group=group))
        twin = copy.deepcopy(outer)
        step_by_step(twin, group.rank())
        step_by_step(outer, group.rank())
        return weights(outer), weights(twin)

    for outer, twin in run_ranks(2, one_rank):
        assert_close(outer, twin)


def test_pickling_is_refused_where_the_group_is_not_torchs_default() -> None:
    def one_rank(group: Group) -> None:
        ddp = DistributedDataParallel(mlp(), process_group=group)
        with pytest.raises(ModuleStateError, match="default process group"):
            pickle.dumps(ddp)
        with pytest.raises(RuntimeError):
            torch.save(ddp, io.BytesIO())

    run_ranks(1, one_rank)


def pickled(meeting: Meeting) -> tuple[bool, list[Tensor], list[Tensor], bool]:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(seeded(mlp), bucket_cap_mb=0.00003)
    step_by_step(ddp, meeting.rank)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    third = pickle.loads(pickle.dumps(twin))
    alike = all(map(torch.equal, weights(ddp), weights(third)))
    for model in (ddp, twin):
        step_by_step(model, meeting.rank)
    other = dist.new_group([0, 1])
    refused = False
    try:
        pickle.dumps(DistributedDataParallel(mlp(), process_group=other))
    except RuntimeError:
        refused = True
    dist.destroy_process_group()
    return alike, weights(ddp), weights(twin), refused


def test_with_torchs_default_group_a_wrapper_can_be_pickled_and_goes_on_training() -> None:
    ranks = spawn_ranks(2, pickled)
    for alike, own, twin, refused in ranks:
        assert alike
        assert refused
        assert_close(own, twin)
        assert_close(own, ranks[0][1], rtol=0, atol=0)
