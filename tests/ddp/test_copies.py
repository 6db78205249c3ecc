"""Copies and states of a wrapped model, and the form without a wrapper."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel, parallelize, replica_of
from paceline.errors import ModelMismatchError, ModuleArgumentError, ModuleStateError, PeerError
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import batch, grads_of, mean_grads, mlp, seeded, watch


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


# Without a wrapper.


class Talking(nn.Module):
    """A model with more than a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"loss": self.norm(self.body(x)).square().sum() * scale}

    def greet(self) -> str:
        return f"{len(list(self.parameters()))} parameters"


def test_a_parallelized_model_stays_what_it_is() -> None:
    def one_rank(group: Group) -> None:
        model = Talking()
        kind, keys, greeting = type(model), list(model.state_dict()), model.greet()
        names = [n for n, _ in model.named_modules()]
        assert parallelize(model, group) is model
        assert type(model) is kind
        assert list(model.state_dict()) == keys
        assert model.greet() == greeting
        assert [n for n, _ in model.named_modules()] == names
        model.load_state_dict(Talking().state_dict())
        assert model.eval() is model

    run_ranks(1, one_rank)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("cap", [None, 0.00003])
def test_a_parallelized_model_has_the_wrappers_gradients(ranks: int, cap: float | None) -> None:
    def one_rank(group: Group) -> list[dict[str, Any]]:
        model = parallelize(seeded(mlp, group.rank()), group, bucket_cap_mb=cap)
        found = []
        for step in range(3):
            model.zero_grad()
            backward(model, group.rank(), step)
            found.append(grads_of(model))
        return found

    for grads in run_ranks(ranks, one_rank):
        for step, found in enumerate(grads):
            expected = mean_grads(
                seeded(mlp, 0), ranks, lambda m, rank, s=step: backward(m, rank, s)
            )
            assert_close(found, expected)


def test_a_parallelized_model_keeps_its_buffers_alike_if_asked() -> None:
    def one_rank(group: Group, alike: bool) -> float:
        model = parallelize(Talking(), group, forward_sync_buffers=alike)
        model.norm.running_mean.fill_(group.rank())
        model.eval()
        model(batch(0))
        return model.norm.running_mean.mean().item()

    assert run_ranks(2, lambda group: one_rank(group, True)) == [0.0, 0.0]
    assert run_ranks(2, lambda group: one_rank(group, False)) == [0.0, 1.0]


def test_replica_of_has_what_the_wrapper_has_as_methods() -> None:
    def one_rank(group: Group) -> None:
        model = parallelize(seeded(mlp), group)
        seen = watch(group)
        replica = replica_of(model)
        with replica.no_sync():
            backward(model, group.rank(), 0)
        assert seen == []
        replica.sync_grads()
        expected = mean_grads(seeded(mlp), 2, backward)
        assert_close(grads_of(model), expected)
        model.zero_grad()
        for step in range(2):
            with replica.accumulate(2):
                backward(model, group.rank(), step)
        both = mean_grads(seeded(mlp), 2, lambda m, r: (backward(m, r, 0), backward(m, r, 1)))
        assert_close(grads_of(model), both)

    run_ranks(2, one_rank)


def test_a_model_that_is_not_parallelized_has_no_replica() -> None:
    with pytest.raises(ModuleArgumentError, match=r"paceline\.parallelize"):
        replica_of(mlp())


def test_parallelizing_twice_is_refused() -> None:
    def one_rank(group: Group) -> None:
        model = parallelize(mlp(), group)
        with pytest.raises(ModuleArgumentError, match="already"):
            parallelize(model, group)

    run_ranks(1, one_rank)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(1, 1).requires_grad_(False)])
def test_a_model_with_nothing_to_train_is_not_parallelized(model: nn.Module) -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(RuntimeError):
            parallelize(model, group)
        with pytest.raises(ModuleArgumentError):
            replica_of(model)

    run_ranks(1, one_rank)


def test_models_that_differ_are_not_parallelized() -> None:
    def one_rank(group: Group) -> None:
        model = nn.Linear(2, 2 + group.rank())
        with pytest.raises(ModelMismatchError):
            parallelize(model, group)
        model(torch.ones(1, 2)).sum().backward()  # an ordinary model as before

    run_ranks(2, one_rank)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_a_copy_of_a_parallelized_model_is_an_ordinary_model(how: str) -> None:
    def one_rank(group: Group) -> dict[str, Any]:
        model = parallelize(seeded(mlp), group)
        backward(model, group.rank())
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        seen = watch(group)
        twin.zero_grad()
        backward(twin, group.rank())
        assert seen == []
        with pytest.raises(ModuleArgumentError):
            replica_of(twin)
        return grads_of(twin)

    for rank, grads in enumerate(run_ranks(2, one_rank)):
        assert_close(grads, mean_grads(seeded(mlp), 1, lambda m, _, r=rank: backward(m, r)))


def test_a_copy_of_a_parallelized_model_can_be_parallelized_as_any_other() -> None:
    def one_rank(group: Group) -> list[list[object]]:
        model = parallelize(Talking(), group)
        found = []
        seen = watch(group)
        for each in (model, parallelize(copy.deepcopy(model), group)):
            seen.clear()
            each(batch(group.rank()))["loss"].backward()
            found.append(list(seen))
        return found

    for first, second in run_ranks(2, one_rank):
        assert first == second  # not everything twice


def test_in_a_parallelized_model_too_a_forward_that_raises_is_told_to_the_others() -> None:
    def one_rank(group: Group) -> str:
        model = parallelize(seeded(mlp), group)
        said = ""
        if group.rank() == 1:
            with pytest.raises(RuntimeError):
                model(torch.ones(3, 5))
        else:
            with pytest.raises(PeerError) as caught:
                backward(model, 0)
            said = caught.value.messages[1]
        model.zero_grad()
        backward(model, group.rank())  # all go on
        assert_close(grads_of(model), mean_grads(seeded(mlp), 2, backward))
        return said

    assert "mat1 and mat2" in run_ranks(2, one_rank)[0]


def test_an_output_of_none_inside_an_except_block_is_no_failure() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> None:
            self.kept = (self.weight * x).sum()

    def one_rank(group: Group) -> float:
        model = parallelize(Silent(), group)
        try:
            raise KeyError
        except KeyError:
            model(torch.full((1,), float(group.rank())))
        model.kept.backward()
        return model.weight.grad.item()

    assert run_ranks(2, one_rank) == [0.5, 0.5]
