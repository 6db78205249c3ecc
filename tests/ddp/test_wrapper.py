"""DistributedDataParallel: its face, its construction, and what it passes in and out."""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close

from paceline import DistributedDataParallel
from paceline.errors import (
    ModelMismatchError,
    ModuleArgumentError,
    ModuleStateError,
    PeerError,
    WrapperMismatchError,
)
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import batch, mean_grads, mlp, seeded

# Its face.

# Methods of torch's class that stay torch's, and why nobody is led astray by them.
INHERITED_ON_PURPOSE = {
    "_ddp_init_helper": "builds torch's reducer; our constructor does not call it",
    "_register_accum_grad_hook": "for torch's python reducer, of which there is none here",
    "_fire_reducer_autograd_hook": "steps torch's reducer; only its mixed precision calls it",
    "_root_copy_hook": "a step of torch's mixed precision; ours is in mixed_precision.py",
    "_module_wait_for_copy_hook": "likewise",
    "_setup_in_backward_optimizers": "a step of torch's _lazy_init; ours is in in_backward.py",
    "_register_delay_all_reduce_hook": "a step of torch's constructor; ours is in delayed.py",
    "_delayed_all_reduce_hook": "the hook that it registers",
    "_clear_grad_buffer": "a step of torch's forward with delayed parameters",
    "_passing_sync_batchnorm_handle": "torch's SyncBatchNorm check; ours is in sync_batchnorm.py",
}


def methods(kind: type) -> set[str]:
    sorts = (property, cached_property, staticmethod, classmethod)
    found = {n for n, v in vars(kind).items() if inspect.isroutine(v) or isinstance(v, sorts)}
    return found - {"__annotate_func__"}  # Python 3.14 has it in every class with annotations


def own_names() -> set[str]:
    kinds = DistributedDataParallel.__mro__
    return {n for kind in kinds[: kinds.index(TorchDDP)] for n in vars(kind)}


def test_no_method_of_torchs_class_is_inherited_silently() -> None:
    inherited = methods(TorchDDP) - own_names()
    assert inherited - set(INHERITED_ON_PURPOSE) == set()


def test_every_method_on_the_list_is_still_torchs() -> None:
    if torch.__version__.startswith("2.13"):
        assert set(INHERITED_ON_PURPOSE) <= methods(TorchDDP)
    assert not set(INHERITED_ON_PURPOSE) & own_names()


def test_it_takes_every_keyword_of_torchs_in_the_same_order() -> None:
    theirs = list(inspect.signature(TorchDDP).parameters)
    assert list(inspect.signature(DistributedDataParallel).parameters)[: len(theirs)] == theirs


def test_defaults_are_torchs_except_that_gradients_are_views() -> None:
    theirs = inspect.signature(TorchDDP).parameters
    ours = inspect.signature(DistributedDataParallel).parameters
    differ = {name for name in theirs if theirs[name].default != ours[name].default}
    if "forward_sync_buffers" not in theirs:  # before 2.13 the old keyword had a value of its own
        differ.discard("broadcast_buffers")
    assert differ == {"gradient_as_bucket_view"}


def test_it_is_an_instance_of_torchs_class_and_has_the_model_as_module() -> None:
    def one_rank(group: Group) -> None:
        model = mlp()
        ddp = DistributedDataParallel(model, process_group=group)
        assert isinstance(ddp, TorchDDP)
        assert ddp.module is model
        assert dict(ddp.named_modules())["module.0"] is model[0]

    run_ranks(1, one_rank)


# Ranks become alike.


def test_every_rank_begins_with_the_parameters_and_buffers_of_rank_0() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), group.rank())
        model[1].running_mean.fill_(group.rank())
        model[1].num_batches_tracked.fill_(group.rank())
        DistributedDataParallel(model, process_group=group)
        return model.state_dict()

    expected = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 0).state_dict()
    for state in run_ranks(3, one_rank):
        assert_close(state, expected, rtol=0, atol=0)


def test_without_init_sync_ranks_keep_what_they_have_and_nothing_is_checked() -> None:
    def one_rank(group: Group) -> tuple[float, int]:
        model = nn.Linear(2, 2 + group.rank())
        nn.init.constant_(model.weight, group.rank())
        before = group._get_sequence_number_for_group()
        DistributedDataParallel(model, process_group=group, init_sync=False)
        calls = group._get_sequence_number_for_group() - before
        return model.weight.mean().item(), calls

    assert run_ranks(2, one_rank) == [(0.0, 0), (1.0, 0)]


@pytest.mark.parametrize("transposed", [False, True])
def test_parameters_in_any_layout_of_memory_get_the_values_of_rank_0(transposed: bool) -> None:
    def one_rank(group: Group) -> Tensor:
        model = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
        if transposed:
            model.weight = nn.Parameter(torch.zeros(2, 3, 2, 2).transpose(2, 3))
        with torch.no_grad():
            model.weight.copy_(torch.arange(24.0).view(2, 3, 2, 2) * (1 - group.rank()))
        DistributedDataParallel(model, process_group=group)
        return model.weight.detach()

    for weight in run_ranks(2, one_rank):
        assert torch.equal(weight, torch.arange(24.0).view(2, 3, 2, 2))


def test_parameters_without_elements_and_scalars_are_no_obstacle() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * self.scale + self.empty.sum()

    def one_rank(group: Group) -> tuple[float, int]:
        ddp = DistributedDataParallel(Odd(), process_group=group)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.full((2,), float(group.rank()))).backward()
        return ddp.module.scale.grad.item(), ddp.module.empty.grad.numel()

    assert run_ranks(2, one_rank) == [(1.0, 0)] * 2


# Models that differ.


class Two(nn.Module):
    """Two parameters of any shapes, in any order."""

    def __init__(self, **params: Tensor) -> None:
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))


def frozen(model: nn.Module, name: str) -> nn.Module:
    model.get_parameter(name).requires_grad_(False)
    return model


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "shape": (lambda: Two(a=torch.zeros(2), b=torch.zeros(4)), ["b float32[3]", "b float32[4]"]),
    "dtype": (
        lambda: Two(a=torch.zeros(2), b=torch.zeros(3).double()),
        ["b float32[3]", "b float64[3]"],
    ),
    "name": (lambda: Two(a=torch.zeros(2), c=torch.zeros(3)), ["b float32[3]", "c float32[3]"]),
    "order": (lambda: Two(b=torch.zeros(3), a=torch.zeros(2)), ["a float32[2]", "b float32[3]"]),
    "one more": (
        lambda: Two(a=torch.zeros(2), b=torch.zeros(3), c=torch.zeros(1)),
        ["2 parameters against 3", "c float32[1]"],
    ),
    "one less": (lambda: Two(a=torch.zeros(2)), ["2 parameters against 1", "b float32[3]"]),
    "requires_grad": (
        lambda: frozen(Two(a=torch.zeros(2), b=torch.zeros(3)), "b"),
        ["b float32[3]", "frozen"],
    ),
}


@pytest.mark.parametrize("what", list(DIFFERENT))
def test_a_model_that_differs_is_an_error_on_every_rank_that_names_the_parameter(what: str) -> None:
    other, words = DIFFERENT[what]

    def one_rank(group: Group) -> ModelMismatchError:
        model = other() if group.rank() == 1 else Two(a=torch.zeros(2), b=torch.zeros(3))
        with pytest.raises(ModelMismatchError) as caught:
            DistributedDataParallel(model, process_group=group)
        return caught.value

    for rank, error in enumerate(run_ranks(3, one_rank)):
        assert (error.rank, error.other) == (rank, 1)
        assert all(word in error.differences[0] for word in words)
        assert all(word in str(error) for word in words)


def test_equal_shapes_in_another_order_are_noticed() -> None:
    def one_rank(group: Group) -> list[str]:
        names = ["a", "b"] if group.rank() == 0 else ["b", "a"]
        model = Two(**{name: torch.zeros(2) for name in names})
        with pytest.raises(ModelMismatchError) as caught:
            DistributedDataParallel(model, process_group=group)
        return list(caught.value.differences)

    for found in run_ranks(2, one_rank):
        assert found == [
            "parameter 0 is a float32[2] against b float32[2]",
            "parameter 1 is b float32[2] against a float32[2]",
        ]


def test_after_a_mismatch_the_group_still_works() -> None:
    def one_rank(group: Group) -> float:
        with pytest.raises(RuntimeError):  # torch raises it too
            DistributedDataParallel(nn.Linear(2, 1 + group.rank()), process_group=group)
        total = torch.ones(1)
        group.all_reduce(total)
        return total.item()

    assert run_ranks(2, one_rank) == [2.0, 2.0]


# What is refused.


def refusal(make: Callable[[Group], object]) -> BaseException:
    def one_rank(group: Group) -> BaseException:
        with pytest.raises(ModuleArgumentError) as caught:
            make(group)
        return caught.value

    return run_ranks(1, one_rank)[0]


def test_a_lazy_module_is_refused_until_it_knows_its_shapes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: lazy modules are a new feature
        lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    error = refusal(lambda group: DistributedDataParallel(lazy, process_group=group))
    assert isinstance(error, RuntimeError)
    assert "dummy forward" in str(error)
    lazy(torch.ones(1, 2))
    run_ranks(1, lambda group: DistributedDataParallel(lazy, process_group=group))


@pytest.mark.parametrize("model", [nn.ReLU(), frozen(nn.Linear(2, 2, bias=False), "weight")])
def test_a_module_with_nothing_to_train_is_refused(model: nn.Module) -> None:
    error = refusal(lambda group: DistributedDataParallel(model, process_group=group))
    assert isinstance(error, RuntimeError)
    assert "requires a gradient" in str(error)


@pytest.mark.parametrize(
    "options", [{"device_ids": [0]}, {"device_ids": [0, 1]}, {"output_device": 1}]
)
def test_devices_for_a_module_on_the_cpu_are_refused(options: dict[str, Any]) -> None:
    error = refusal(lambda group: DistributedDataParallel(mlp(), process_group=group, **options))
    assert isinstance(error, ValueError)


def test_no_devices_are_as_good_as_none() -> None:
    def one_rank(group: Group) -> object:
        return DistributedDataParallel(mlp(), device_ids=[], process_group=group).device_ids

    assert run_ranks(1, one_rank) == [None]


def test_a_delayed_parameter_without_one_that_sets_it_off_is_refused() -> None:
    model = mlp()
    named = [("0.weight", model[0].weight)]
    for options in (
        {"delay_all_reduce_named_params": named},
        {"param_to_hook_all_reduce": model[0].weight},
    ):
        assert isinstance(
            refusal(lambda g, o=options: DistributedDataParallel(model, process_group=g, **o)),
            ValueError,
        )


def meshes(meeting: Meeting) -> tuple[str, str, bool, float]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    flat = init_device_mesh("cpu", (2, 1))
    with pytest.raises(ModuleStateError) as both:
        DistributedDataParallel(mlp(), process_group=dist.group.WORLD, device_mesh=mesh)
    with pytest.raises(RuntimeError) as two:
        DistributedDataParallel(mlp(), device_mesh=flat)
    model = nn.Linear(1, 1)
    ddp = DistributedDataParallel(model, device_mesh=mesh)
    ddp(torch.full((1, 1), float(meeting.rank))).backward()
    grad = model.weight.grad.item()
    dist.destroy_process_group()
    return str(both.value), str(two.value), ddp.device_mesh is mesh, grad


def test_a_mesh_is_taken_if_it_has_one_dimension_and_no_group_is_given_with_it() -> None:
    for both, two, kept, grad in spawn_ranks(2, meshes):
        assert "both process_group and device_mesh" in both
        assert "1D device mesh" in two
        assert kept
        assert grad == 0.5


def test_no_group_at_all_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises((RuntimeError, ValueError), match="init_process_group"):
        DistributedDataParallel(mlp())


# Parameters of every sort.


class Mixed(nn.Module):
    """Parameters of several types, one complex, one frozen, one shared, one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 4).double()
        self.narrow = nn.Linear(4, 4).bfloat16()
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.still = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.still(self.tied(self.first(x)))
        wide = self.wide(x.double()).float()
        narrow = self.narrow(x.bfloat16()).float()
        return wide.sum() + narrow.sum() + (x * self.turn).abs().sum()


def mixed_backward(model: nn.Module, rank: int) -> None:
    model(batch(rank)).backward()


def mixed_grads(group: Group | None, rank: int, **options: Any) -> dict[str, Tensor]:
    ddp = DistributedDataParallel(seeded(Mixed), process_group=group, **options)
    for _ in range(3):
        ddp.zero_grad()
        mixed_backward(ddp, rank)
    return {name: p.grad for name, p in ddp.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("cap", [None, 0.0001])
def test_parameters_of_several_types_are_averaged_each_in_its_own(
    views: bool, cap: float | None
) -> None:
    expected = mean_grads(seeded(Mixed), 2, mixed_backward)
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": cap}
    for grads in run_ranks(2, lambda group: mixed_grads(group, group.rank(), **options)):
        assert_close(grads, expected, rtol=1e-2, atol=1e-2)
        assert grads["turn"].dtype == torch.complex64
        assert grads["wide.weight"].dtype == torch.float64
        assert "still.weight" not in grads


def mixed_grads_over_gloo(meeting: Meeting) -> dict[str, Tensor]:
    dist.init_process_group("gloo")
    grads = mixed_grads(None, meeting.rank)
    dist.destroy_process_group()
    return grads


def test_parameters_of_several_types_are_averaged_over_torchs_gloo_too() -> None:
    expected = mean_grads(seeded(Mixed), 2, mixed_backward)
    for grads in spawn_ranks(2, mixed_grads_over_gloo):
        assert_close(grads, expected, rtol=1e-2, atol=1e-2)


def test_a_frozen_parameter_has_no_gradient_and_no_place_in_a_bucket() -> None:
    def one_rank(group: Group) -> dict[str, Any]:
        model = mlp()
        model[0].requires_grad_(False)
        ddp = DistributedDataParallel(model, process_group=group)
        ddp(batch(group.rank())).sum().backward()
        assert model[0].weight.grad is None
        return ddp._get_ddp_logging_data()

    assert run_ranks(2, one_rank)[0]["num_parameter_tensors"] == 2


def test_a_shared_parameter_is_averaged_once() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    def backward(model: nn.Module, rank: int) -> None:
        model(batch(rank)).sum().backward()

    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DistributedDataParallel(seeded(tied), process_group=group)
        for _ in range(3):
            ddp.zero_grad()
            backward(ddp, group.rank())
        return {name: p.grad for name, p in ddp.module.named_parameters()}

    expected = mean_grads(seeded(tied), 2, backward)
    for grads in run_ranks(2, one_rank):
        assert_close(grads, expected)


# What goes in and comes out.

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Both:
    """An output of the sort that Hugging Face's models have."""

    loss: Tensor
    rest: Any = None


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda t: (t, 1), lambda o: o[0]),
    "list of tuples": (lambda t: [("name", t)], lambda o: o[0][1]),
    "dict": (lambda t: {"a": {"b": t}}, lambda o: o["a"]["b"]),
    "dataclass": (lambda t: Both(t), lambda o: o.loss),
    "dataclass in a dict": (lambda t: {"a": Both(None, [t])}, lambda o: o["a"].rest[0]),
    "namedtuple": (lambda t: Pair(None, t), lambda o: o.right),
}


class Shaped(nn.Module):
    """Takes a nest of tensors and returns one."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.wrap = wrap

    def forward(self, nest: dict[str, Any], *, scale: Both) -> Any:
        return self.wrap(self.linear(nest["x"][0]).sum() * scale.loss)


@pytest.mark.parametrize("shape", list(OUTPUTS))
def test_nested_inputs_and_outputs_pass_through_as_they_are(shape: str) -> None:
    wrap, read = OUTPUTS[shape]

    def one_rank(group: Group) -> Tensor:
        model = Shaped(wrap)
        ddp = DistributedDataParallel(model, process_group=group)
        for _ in range(2):
            ddp.zero_grad()
            nest = {"x": (batch(group.rank()), None)}
            output = ddp(nest, scale=Both(torch.tensor(2.0)))
            assert type(output) is type(wrap(torch.zeros(1)))
            read(output).backward()
        return model.linear.weight.grad

    expected = (batch(0).sum(0) + batch(1).sum(0)).view(1, 4)
    for grad in run_ranks(2, one_rank):
        assert_close(grad, expected)


def test_outputs_are_the_models_own_objects() -> None:
    def one_rank(group: Group) -> None:
        kept = []
        model = Shaped(lambda t: kept.append(Both(t)) or kept[-1])
        ddp = DistributedDataParallel(model, process_group=group)
        output = ddp({"x": (batch(0),)}, scale=Both(torch.tensor(1.0)))
        assert output is kept[-1]
        output.loss.backward()

    run_ranks(2, one_rank)


def test_an_output_without_grad_leaves_nothing_behind() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None, str]:
            return self.linear(x).detach(), self.linear(x).sum(), None, "text"

    def one_rank(group: Group) -> Tensor:
        ddp = DistributedDataParallel(Half(), process_group=group)
        with torch.no_grad():
            assert not ddp(batch(0))[1].requires_grad
        ddp(batch(0))  # forward without a backward
        ddp(batch(group.rank()))[1].backward()
        return ddp.module.linear.weight.grad

    first, second = run_ranks(2, one_rank)
    assert torch.equal(first, second)


def test_a_forward_that_raises_is_told_to_the_other_ranks() -> None:
    def one_rank(group: Group) -> str:
        ddp = DistributedDataParallel(mlp(), process_group=group)
        with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
            ddp(torch.ones(3, 5 if group.rank() == 1 else 4)).sum().backward()
        return type(caught.value).__name__

    assert run_ranks(2, one_rank) == ["PeerError", "RuntimeError"]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_after_a_forward_that_raised_all_ranks_can_go_on(step: int, static: bool) -> None:
    def backward(model: nn.Module, rank: int) -> None:
        model(batch(rank)).square().sum().backward()

    def one_rank(group: Group) -> None:
        ddp = DistributedDataParallel(
            seeded(mlp), process_group=group, bucket_cap_mb=0.00003, static_graph=static
        )
        for now in range(5):
            ddp.zero_grad()
            if now != step:
                backward(ddp, group.rank())
                assert_close({n: p.grad for n, p in ddp.module.named_parameters()}, expected)
            elif group.rank() == 1:
                with pytest.raises(RuntimeError, match="mat1 and mat2"):
                    ddp(torch.ones(3, 5))
            else:
                with pytest.raises(PeerError) as caught:
                    backward(ddp, group.rank())
                assert list(caught.value.messages) == [1]

    expected = mean_grads(seeded(mlp), 3, backward)
    run_ranks(3, one_rank)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_after_a_backward_that_raised_all_ranks_can_go_on(step: int) -> None:
    def backward(model: nn.Module, rank: int, stop: bool = False) -> None:
        x = batch(rank).requires_grad_()
        output = model(x)
        if stop:
            model.module[0].weight.register_hook(refuse)
        output.square().sum().backward()

    def refuse(_grad: Tensor) -> None:
        raise KeyError("halfway")

    def one_rank(group: Group) -> None:
        ddp = DistributedDataParallel(seeded(mlp), process_group=group, bucket_cap_mb=0.00003)
        for now in range(5):
            ddp.zero_grad()
            if now != step:
                backward(ddp, group.rank())
                assert_close({n: p.grad for n, p in ddp.module.named_parameters()}, expected)
            elif group.rank() == 1:
                with pytest.raises(KeyError, match="halfway"):
                    backward(ddp, 1, stop=True)
                ddp.module[0].weight._backward_hooks.clear()
            else:
                with pytest.raises(PeerError) as caught:
                    backward(ddp, group.rank())
                assert list(caught.value.messages) == [1]

    expected = mean_grads(seeded(mlp), 3, backward)
    run_ranks(3, one_rank)


def test_a_wrapper_that_is_no_longer_used_leaves_nothing_behind() -> None:
    def one_rank(group: Group) -> list[weakref.ref[object]]:
        model = mlp()
        ddp = DistributedDataParallel(model, process_group=group)
        for _ in range(2):
            ddp(batch(group.rank())).sum().backward()
        return [weakref.ref(ddp), weakref.ref(model), weakref.ref(ddp.replica.reducer)]

    held = [reference for rank in run_ranks(2, one_rank) for reference in rank]
    gc.collect()
    assert [reference() for reference in held] == [None] * 6


# -- arguments that differ by rank ----------------------------------------------------------------

DIFFERING: dict[str, dict[str, Any]] = {
    "bucket_cap_mb": {"bucket_cap_mb": 25},
    "bucket_cap_mb_list": {"bucket_cap_mb_list": [1, 2]},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "skip_all_reduce_unused_params": {"skip_all_reduce_unused_params": True},
    "forward_sync_buffers": {"forward_sync_buffers": False},
}


@pytest.mark.parametrize("name", DIFFERING)
def test_arguments_that_differ_are_an_error_on_every_rank_that_names_them(name: str) -> None:
    def one_rank(group: Group) -> WrapperMismatchError:
        given = DIFFERING[name] if group.rank() == 1 else {}
        with pytest.raises(WrapperMismatchError) as caught:
            DistributedDataParallel(nn.BatchNorm1d(2), process_group=group, **given)
        return caught.value

    for rank, error in enumerate(run_ranks(3, one_rank)):
        assert (error.rank, error.other) == (rank, 1)
        assert f"{name} is {error.arguments[name]}" in str(error)
        assert f"{DIFFERING[name][name]} on rank 1" in error.arguments[name]


def test_views_of_buckets_may_differ_by_rank() -> None:
    def one_rank(group: Group) -> list[float]:
        given = {"gradient_as_bucket_view": False} if group.rank() else {}
        model = DistributedDataParallel(nn.Linear(2, 1), process_group=group, **given)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 2), group.rank() + 1.0)).sum().backward()
        return model.module.weight.grad.flatten().tolist()

    assert run_ranks(2, one_rank) == [[1.5, 1.5]] * 2
