"""replicate: torch's composable form, on ours and beside torch's own."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import DistributedDataParallel, hooks, replicate
from paceline.errors import ModelMismatchError, ModuleTypeError, PeerError, ReplicatedTwiceError
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import batch, grads_of, mean_grads, mlp, seeded, watch


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    model(batch(rank, step)).square().sum().backward()


# A replicated model stays what it is.


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


def test_a_replicated_model_keeps_its_names_and_methods() -> None:
    def one_rank(group: Group) -> None:
        model = Talking()
        kind, keys, greeting = type(model), list(model.state_dict()), model.greet()
        names = [n for n, _ in model.named_modules()]
        assert replicate(model, process_group=group) is model
        assert isinstance(model, kind)
        assert list(model.state_dict()) == keys
        assert model.greet() == greeting
        assert [n for n, _ in model.named_modules()] == names
        model.load_state_dict(Talking().state_dict())
        assert model.eval() is model

    run_ranks(1, one_rank)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("cap", [None, 0.00003])
def test_a_replicated_model_has_the_wrappers_gradients(ranks: int, cap: float | None) -> None:
    def one_rank(group: Group) -> list[dict[str, Any]]:
        model = replicate(seeded(mlp, group.rank()), process_group=group, bucket_cap_mb=cap)
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


def test_a_replicated_model_keeps_its_buffers_alike_if_asked() -> None:
    def one_rank(group: Group, alike: bool) -> float:
        model = replicate(Talking(), process_group=group, forward_sync_buffers=alike)
        model.eval()
        model(batch(0))  # ranks meet
        model.norm.running_mean.fill_(group.rank())
        model(batch(0))
        return model.norm.running_mean.mean().item()

    assert run_ranks(2, lambda group: one_rank(group, True)) == [0.0, 0.0]
    assert run_ranks(2, lambda group: one_rank(group, False)) == [0.0, 1.0]


def test_its_state_has_what_the_wrapper_has_as_methods() -> None:
    def one_rank(group: Group) -> None:
        model = replicate(seeded(mlp), process_group=group)
        replica = replicate.state(model).wrapper
        seen = watch(group)
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


def test_a_model_that_is_not_replicated_has_no_state() -> None:
    assert replicate.state(mlp()) is None


def test_replicating_twice_is_refused() -> None:
    def one_rank(group: Group) -> None:
        model = replicate(mlp(), process_group=group)
        with pytest.raises(ReplicatedTwiceError, match="has already been applied to this Seq"):
            replicate(model, process_group=group)
        with pytest.raises(AssertionError):  # what torch raises
            replicate(model)

    run_ranks(1, one_rank)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(1, 1).requires_grad_(False)])
def test_a_model_with_nothing_to_train_is_refused_in_its_first_forward(model: nn.Module) -> None:
    def one_rank(group: Group) -> None:
        replicate(copy.deepcopy(model), process_group=group)
        with pytest.raises(RuntimeError, match="requires a gradient"):
            replicate(copy.deepcopy(model), process_group=group)(torch.ones(1, 1))

    run_ranks(1, one_rank)


def test_models_that_differ_are_found_out_in_the_first_forward() -> None:
    def one_rank(group: Group) -> None:
        model = replicate(nn.Linear(2, 2 + group.rank()), process_group=group)
        for _ in range(2):
            with pytest.raises(ModelMismatchError):
                model(torch.ones(1, 2))
        model.forward(torch.ones(1, 2)).sum().backward()  # past the class

    run_ranks(2, one_rank)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_a_copy_of_a_replicated_model_is_an_ordinary_model(how: str) -> None:
    def one_rank(group: Group) -> dict[str, Any]:
        model = replicate(seeded(mlp), process_group=group)
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
        assert replicate.state(twin) is None
        assert type(twin) is nn.Sequential
        return grads_of(twin)

    for rank, grads in enumerate(run_ranks(2, one_rank)):
        assert_close(grads, mean_grads(seeded(mlp), 1, lambda m, _, r=rank: backward(m, r)))


def test_a_copy_of_a_replicated_model_can_be_replicated_as_any_other() -> None:
    def one_rank(group: Group) -> list[list[object]]:
        model = replicate(Talking(), process_group=group)
        found = []
        seen = watch(group)
        for each in (model, replicate(copy.deepcopy(model), process_group=group)):
            seen.clear()
            each(batch(group.rank()))["loss"].backward()
            found.append(list(seen))
        return found

    for first, second in run_ranks(2, one_rank):
        assert first == second  # not everything twice


def test_in_a_replicated_model_too_a_forward_that_raises_is_told_to_the_others() -> None:
    def one_rank(group: Group) -> str:
        model = replicate(seeded(mlp), process_group=group)
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
        model = replicate(Silent(), process_group=group)
        try:
            raise KeyError
        except KeyError:
            model(torch.full((1,), float(group.rank())))
        model.kept.backward()
        return model.weight.grad.item()

    assert run_ranks(2, one_rank) == [0.5, 0.5]


def test_hooks_of_the_module_run_once_and_are_given_the_module() -> None:
    def one_rank(group: Group) -> list[tuple[str, bool]]:
        model, seen = seeded(mlp), []
        model.register_forward_pre_hook(lambda m, _: seen.append(("before", m is model)))
        replicate(model, process_group=group)
        model.register_forward_hook(lambda m, _i, _o: seen.append(("after", m is model)))
        backward(model, group.rank())
        return seen

    assert run_ranks(2, one_rank) == [[("before", True), ("after", True)]] * 2


def test_a_forward_that_was_set_on_the_object_is_called() -> None:
    def one_rank(group: Group) -> list[float]:
        model = seeded(mlp)
        model.forward = lambda x: nn.Sequential.forward(model, x) * 2.0
        replicate(model, process_group=group)
        model(batch(group.rank())).sum().backward()
        return model[2].bias.grad.tolist()

    assert run_ranks(2, one_rank) == [[6.0, 6.0]] * 2


def test_a_part_of_a_replicated_sequential_is_an_ordinary_one() -> None:
    def one_rank(group: Group) -> None:
        model = replicate(seeded(mlp), process_group=group)
        part = model[:2]
        assert type(part) is nn.Sequential
        assert len(part) == 2
        assert part[0] is model[0]

    run_ranks(1, one_rank)


def test_dynamo_finds_the_innermost_wrapper_and_then_the_outer_one_again() -> None:
    """It splits what is compiled inside by that one's buckets."""

    class Asks(nn.Module):
        def __init__(self, seen: list[Any]) -> None:
            super().__init__()
            self.inner, self.other, self.seen = nn.Linear(2, 2), nn.Linear(2, 2), seen

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(TorchDDP._get_active_ddp_module())
            x = self.inner(x)
            self.seen.append(TorchDDP._get_active_ddp_module())
            return self.other(x)

    def one_rank(group: Group) -> None:
        for outer in (replicate, DistributedDataParallel, TorchDDP):
            seen: list[Any] = []
            model = Asks(seen)
            replicate(model.inner, process_group=group)
            if outer is TorchDDP:  # its reducer would average what is replicated once more
                names = ["inner.weight", "inner.bias"]
                TorchDDP._set_params_and_buffers_to_ignore_for_model(model, names)
            whole = outer(model, process_group=group)
            whole(torch.ones(1, 2))
            wrapper = replicate.state(model).wrapper if outer is replicate else whole
            assert seen == [wrapper, wrapper]

    run_ranks(1, one_rank)


# Parts of a model.


class Net(nn.Module):
    """As in PyTorch's own tests of replicate, in float64."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 10, bias=False, dtype=torch.float64)
        self.fc2 = nn.Linear(10, 50, bias=False, dtype=torch.float64)
        self.fc3 = nn.Linear(50, 2, bias=False, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            x = checkpoint(self.fc1, x, use_reentrant=False)
        else:
            x = self.fc1(x)
        return self.fc3(torch.relu(self.fc2(torch.relu(x)))) * self.scale


PARTS = ("fc1", "fc2", "fc3")


def inputs(rank: int, step: int) -> Tensor:
    return batch(rank, step, shape=(3, 2), dtype=torch.float64)


@given(
    root=st.booleans(),
    parts=st.sets(st.sampled_from(PARTS)),
    ignored=st.sets(st.sampled_from(PARTS)),
    later=st.booleans(),
    syncs=st.lists(st.booleans(), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=40)
def test_what_is_replicated_is_averaged_and_the_rest_is_left_alone(
    root: bool, parts: set[str], ignored: set[str], later: bool, syncs: list[bool]
) -> None:
    """The root with ``ignored`` modules, and ``parts`` of it, also if these are ignored there."""

    def one_rank(group: Group) -> tuple[dict[str, Any], dict[str, Any]]:
        model, alone = seeded(Net), seeded(Net)
        chosen = [getattr(model, name) for name in sorted(parts)]
        if root and not later:
            replicate(model, [getattr(model, name) for name in ignored], process_group=group)
        for part in chosen:
            replicate(part, process_group=group)
        if root and later:
            replicate(model, [getattr(model, name) for name in ignored], process_group=group)
        for step, sync in enumerate((*syncs, True)):
            for module in [*chosen, *([model] if root else [])]:
                module.set_requires_gradient_sync(sync)
            model(inputs(group.rank(), step)).square().sum().backward()
            alone(inputs(group.rank(), step)).square().sum().backward()
        return grads_of(model), grads_of(alone)

    (first, own), (second, other) = run_ranks(2, one_rank)
    for name in first:
        part = name.split(".")[0]
        averaged = part in parts or (root and part not in ignored)
        means = [(own[name] + other[name]) / 2] * 2 if averaged else [own[name], other[name]]
        assert_close([first[name], second[name]], means)


def test_a_parameter_shared_with_an_ignored_module_is_ignored() -> None:
    def one_rank(group: Group) -> list[str]:
        model = Net()
        model.fc4 = nn.Linear(2, 10, bias=False, dtype=torch.float64)
        model.fc4.weight = model.fc1.weight
        replicate(model, [model.fc4], process_group=group)
        return replicate.state(model)._param_names

    assert run_ranks(1, one_rank) == [["scale", "fc2.weight", "fc3.weight"]]


def test_buffers_of_ignored_modules_stay_each_ranks_own() -> None:
    def one_rank(group: Group) -> list[float]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        replicate(model, [model[2]], process_group=group)
        for layer in model[1:]:
            layer.running_mean.fill_(group.rank())
        model.eval()(batch(0))
        return [layer.running_mean[0].item() for layer in model[1:]]

    assert run_ranks(2, one_rank) == [[0.0, 0.0], [0.0, 1.0]]


# What it takes and what it refuses.


def test_a_wrong_device_id_is_refused_with_torchs_words() -> None:
    with pytest.raises(RuntimeError, match="Expected device_id to be int or torch"):
        replicate(mlp(), device_id=[torch.device("cpu")])


def test_the_cpu_as_device_id_means_no_device_ids() -> None:
    def one_rank(group: Group) -> Any:
        model = replicate(mlp(), process_group=group, device_id=torch.device("cpu"))
        assert not replicate.state(model).has_initialized
        model(batch(0))
        assert replicate.state(model).has_initialized
        return replicate.state(model)._ddp_weakref().device_ids

    assert run_ranks(1, one_rank) == [None]


@pytest.mark.parametrize("what", [3, [nn.Linear(1, 1)], torch.jit.script(nn.Linear(1, 1))])
def test_what_is_no_module_is_refused(what: Any) -> None:
    with pytest.raises(ModuleTypeError, match="expected a module"):
        replicate(what)


def test_an_unknown_keyword_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_cap'"):
        replicate(mlp(), bucket_cap=1)


def test_a_module_that_is_fully_sharded_is_refused() -> None:
    from torch.distributed._composable.contract import REGISTRY_KEY

    model = mlp()
    model.__dict__[REGISTRY_KEY] = {"fully_shard": object()}
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(model)


def test_a_fully_sharded_part_is_left_to_its_shards() -> None:
    from torch.distributed._composable.contract import REGISTRY_KEY

    def one_rank(group: Group) -> list[str]:
        model = Net()
        model.fc2.__dict__[REGISTRY_KEY] = {"fully_shard": object()}
        replicate(model, process_group=group)
        return replicate.state(model)._param_names

    assert run_ranks(1, one_rank) == [["scale", "fc1.weight", "fc3.weight"]]


def test_torchs_registry_knows_of_it() -> None:
    from torch.distributed._composable.contract import _get_registry

    model = replicate(mlp())
    assert "replicate" in _get_registry(model)
    assert "replicate" not in _get_registry(copy.deepcopy(model))


def test_the_group_of_the_moment_counts_if_none_is_given() -> None:
    def one_rank(group: Group) -> bool:
        with paceline.process_group(group):
            model = replicate(seeded(mlp))
        backward(model, group.rank())
        return replicate.state(model).wrapper.process_group is group

    assert run_ranks(2, one_rank) == [True, True]


def test_a_hook_may_be_registered_before_or_after_the_ranks_have_met() -> None:
    def one_rank(group: Group) -> list[dict[str, Any]]:
        found = []
        for first in (True, False):
            model = replicate(seeded(mlp), process_group=group)
            if not first:
                assert replicate.state(model).wrapper.process_group is group
            model.register_comm_hook(group, hooks.fp16_compress_hook)
            backward(model, group.rank())
            found.append(grads_of(model))
        ddp = DistributedDataParallel(seeded(mlp), process_group=group)
        ddp.register_comm_hook(group, hooks.fp16_compress_hook)
        backward(ddp, group.rank())
        return [*found, grads_of(ddp.module)]

    for early, late, wrapped in run_ranks(2, one_rank):
        assert_close(early, wrapped, rtol=0, atol=0)
        assert_close(late, wrapped, rtol=0, atol=0)


def test_sync_is_taken_over_by_the_next_forward_as_in_torch() -> None:
    def one_rank(group: Group) -> list[int]:
        model = replicate(seeded(mlp), process_group=group)
        for step in range(2):  # ranks meet, and agree on buckets
            backward(model, group.rank(), step)
        seen, counts = watch(group), []
        for before, between in [(True, False), (False, True), (True, True)]:
            seen.clear()
            model.set_requires_gradient_sync(before)
            loss = model(batch(group.rank())).sum()
            model.set_requires_gradient_sync(between)
            loss.backward()
            counts.append(len(seen))
        return counts

    assert run_ranks(2, one_rank) == [[1, 0, 1]] * 2


# Beside torch's.


def _kinds() -> dict[str, Any]:
    from torch.distributed._composable import checkpoint as composable
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def parts(model: Net, make: Any) -> nn.Module:
        for name in PARTS:
            make(getattr(model, name))
        return model

    def hooked(model: Net, make: Any, hook: Any) -> nn.Module:
        make(model).register_comm_hook(None, hook)
        return model

    def nested(model: Net, make: Any) -> nn.Module:
        make(model.fc2)
        return make(model)

    return {
        "single": lambda model, make: make(model),
        "parts": parts,
        "nested": nested,
        "keywords": lambda model, make: make(model, bucket_cap_mb=1, gradient_as_bucket_view=True),
        "ignored": lambda model, make: make(model, ignored_modules=[model.fc1]),
        "fp16": lambda model, make: hooked(model, make, default_hooks.fp16_compress_hook),
        "composable checkpoint": lambda model, make: make(composable(model.fc2) and model),
        "checkpoint of all": lambda model, make: composable(make(model)),
    }


def _train(model: Any, rank: int, no_sync: bool) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    toggles = [m for m in model.modules() if hasattr(m, "set_requires_gradient_sync")]
    for step in range(4):
        for module in toggles:
            module.set_requires_gradient_sync(not no_sync or step % 2 == 1)
        model(inputs(rank, step)).square().mean().backward()
        if not no_sync or step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def _both(meeting: Meeting) -> dict[str, Any]:
    from torch.distributed._composable import replicate as torchs

    dist.init_process_group("gloo")
    found = {}
    for name, make in _kinds().items():
        for no_sync in (False, True):
            for checkpointed in (False, True) if name == "single" else (False,):
                ours, theirs = (
                    _train(make(seeded(lambda c=checkpointed: Net(c)), how), meeting.rank, no_sync)
                    for how in (replicate, torchs)
                )
                found[f"{name}, {no_sync=}, {checkpointed=}"] = ours, theirs
    dist.destroy_process_group()
    return found


def test_training_ends_where_torchs_replicate_ends() -> None:
    for found in spawn_ranks(2, _both):
        for case, (ours, theirs) in found.items():
            assert_close(ours, theirs, msg=lambda text, case=case: f"{case}: {text}")


def test_ranks_of_a_replicated_model_may_run_out_at_different_times() -> None:
    steps, count = (4, 2), 2

    def train(make: Any, group: Group) -> tuple[list[Tensor], int]:
        model, ddp = make(group)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        taken = 0
        with ddp.join():
            for step in range(steps[group.rank()]):
                with ddp.samples(1 + step):
                    backward(model, group.rank(), step)
                opt.step()
                opt.zero_grad()
                taken += 1
        return [p.detach().clone() for p in model.parameters()], taken

    def replicated(group: Group) -> tuple[nn.Module, DistributedDataParallel]:
        model = replicate(seeded(mlp), process_group=group)
        return model, replicate.state(model).wrapper

    def wrapped(group: Group) -> tuple[nn.Module, DistributedDataParallel]:
        ddp = DistributedDataParallel(seeded(mlp), process_group=group)
        return ddp, ddp

    ours = run_ranks(count, lambda group: train(replicated, group))
    theirs = run_ranks(count, lambda group: train(wrapped, group))
    assert [taken for _, taken in ours] == list(steps)
    for params, _ in ours:
        for mine, expected in zip(params, theirs[0][0], strict=True):
            assert torch.equal(mine, expected)
