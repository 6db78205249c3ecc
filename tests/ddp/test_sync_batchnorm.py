"""SyncBatchNorm against one process that has all ranks' batches."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from paceline.ddp.sync_batchnorm import Statistics, SyncBatchNorm, adopt
from paceline.errors import RanksFailedError
from paceline.groups import Call, Group
from paceline.testing import Meeting, run_ranks, spawn_ranks

CHANNELS = 3


@dataclass(frozen=True)
class Passed:
    """What one pass leaves behind; ``parameters`` are the gradients of weight and bias."""

    output: Tensor
    grad: Tensor
    parameters: list[Tensor]
    buffers: dict[str, Tensor]


def train(layer: nn.Module, batches: list[Tensor], grads: list[Tensor]) -> Passed:
    """Forward and backward over several batches; returns the last output and input gradient."""
    for batch, grad in zip(batches, grads, strict=True):
        x = batch.clone(memory_format=torch.preserve_format).requires_grad_()
        output = layer(x)
        output.backward(grad)
    return Passed(
        output.detach(),
        x.grad,
        [p.grad for p in layer.parameters()],
        {name: b.clone() for name, b in layer.named_buffers()},
    )


def check(layer: SyncBatchNorm, batches: list[list[Tensor]], **close: Any) -> list[Passed]:
    """Compare ranks that have ``batches[rank][step]`` with one process that has them all."""
    steps = range(len(batches[0]))
    grads = [[torch.randn_like(x) for x in own] for own in batches]
    joined = [torch.cat([own[s] for own in batches]) for s in steps]
    joined_grads = [torch.cat([own[s] for own in grads]) for s in steps]
    alone = train(copy.deepcopy(layer), joined, joined_grads)  # no group: plain batch norm

    def one_rank(group: Group) -> Passed:
        mine = copy.deepcopy(layer)
        adopt(mine, group)
        return train(mine, batches[group.rank()], grads[group.rank()])

    ranks = run_ranks(len(batches), one_rank)
    assert_close(torch.cat([r.output for r in ranks]), alone.output, **close)
    assert_close(torch.cat([r.grad for r in ranks]), alone.grad, **close)
    for i, whole in enumerate(alone.parameters):
        assert_close(sum(r.parameters[i] for r in ranks), whole, **close)
    for rank in ranks:
        assert_close(rank.buffers, alone.buffers, **close)
    return ranks


def make(**options: Any) -> SyncBatchNorm:
    layer = SyncBatchNorm(CHANNELS, **{"dtype": torch.float64, **options})
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p))
    return layer


# One process on the union of the batches.


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=1, max_size=4
    ).filter(lambda sizes: all(sum(step) > 1 for step in zip(*sizes, strict=True))),
    space=st.sampled_from([(), (5,), (2, 3), (2, 1, 2)]),
    momentum=st.sampled_from([None, 0.1, 1.0]),
    affine=st.booleans(),
    track=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_ranks_with_any_batch_sizes_do_what_one_process_does_with_all_of_them(
    sizes: list[list[int]],
    space: tuple[int, ...],
    momentum: float | None,
    affine: bool,
    track: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    layer = make(momentum=momentum, affine=affine, track_running_stats=track)
    batches = [
        [torch.randn(n, CHANNELS, *space, dtype=torch.float64) * 3 + 5 for n in own]
        for own in sizes
    ]
    check(layer, batches, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "parameters", "error"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 2**-8),
        (torch.bfloat16, torch.bfloat16, 2**-8),
    ],
)
def test_low_precision_inputs_keep_their_type_and_have_precise_statistics(
    dtype: torch.dtype, parameters: torch.dtype, error: float
) -> None:
    torch.manual_seed(0)
    layer = make(dtype=torch.float32, momentum=1.0)
    layer.weight.data, layer.bias.data = (p.data.to(parameters) for p in layer.parameters())
    x, grads = (torch.randn(2, 64, CHANNELS, 4).to(dtype) + 2 for _ in range(2))

    def one_rank(group: Group) -> Passed:
        mine = copy.deepcopy(layer)
        adopt(mine, group)
        return train(mine, [x[group.rank()]], [grads[group.rank()]])

    ranks = run_ranks(2, one_rank)
    exact = train(layer.double(), [x.double().flatten(0, 1)], [grads.double().flatten(0, 1)])
    close = {"rtol": error, "atol": error, "check_dtype": False}
    assert {r.output.dtype for r in ranks} == {r.grad.dtype for r in ranks} == {dtype}
    assert {p.dtype for r in ranks for p in r.parameters} == {parameters}
    assert_close(torch.cat([r.output for r in ranks]), exact.output, **close)
    assert_close(torch.cat([r.grad for r in ranks]), exact.grad, **close)
    for name in ("running_mean", "running_var"):
        found = ranks[1].buffers[name]
        assert_close(found, exact.buffers[name], rtol=1e-6, atol=1e-6, check_dtype=False)


def test_a_large_mean_does_not_cost_the_variance() -> None:
    torch.manual_seed(0)
    x = [torch.randn(50, CHANNELS) + 4096 * (r + 1) for r in range(2)]

    def one_rank(group: Group) -> Tensor:
        layer = SyncBatchNorm(CHANNELS, momentum=1.0, process_group=group)
        layer(x[group.rank()])
        return layer.running_var

    exact = torch.cat(x).double().var(0).float()
    for var in run_ranks(2, one_rank):
        assert_close(var, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("space", [(4, 5), (2, 4, 5)])
def test_channels_last_inputs_give_channels_last_outputs_and_gradients(
    space: tuple[int, ...],
) -> None:
    layout = torch.channels_last if len(space) == 2 else torch.channels_last_3d
    batches = [
        [torch.randn(n, CHANNELS, *space, dtype=torch.float64).to(memory_format=layout)]
        for n in (2, 3)
    ]
    for rank in check(make(), batches):
        assert rank.output.is_contiguous(memory_format=layout)
        assert rank.grad.is_contiguous(memory_format=layout)


def test_inputs_may_be_views_in_any_order() -> None:
    batches = [[torch.randn(5, CHANNELS, n, dtype=torch.float64).transpose(0, 2)] for n in (2, 3)]
    check(make(), batches)


def test_a_layer_without_a_bias_still_learns_its_weight() -> None:
    layer = make()
    layer.bias = None
    check(layer, [[torch.randn(n, CHANNELS, 2, dtype=torch.float64)] for n in (1, 4)])


def test_the_gradient_is_that_of_finite_differences_over_all_ranks() -> None:
    torch.manual_seed(0)
    x, target = (torch.randn(2, 2, CHANNELS, dtype=torch.float64) for _ in range(2))
    layer = make()

    def loss(group: Group, inputs: Tensor) -> Tensor:
        mine = copy.deepcopy(layer)
        adopt(mine, group)
        return (mine(inputs[group.rank()]).sin() * target[group.rank()]).sum()

    def gradient(group: Group) -> Tensor:
        inputs = x.clone().requires_grad_()
        loss(group, inputs).backward()
        return inputs.grad[group.rank()]

    found = torch.stack(run_ranks(2, gradient))
    step = 1e-6
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(CHANNELS)):
        nudge = torch.zeros_like(x)
        nudge[tuple(index)] = step
        up, down = (
            sum(run_ranks(2, lambda group, x=inputs: loss(group, x).item()))
            for inputs in (x + nudge, x - nudge)
        )
        assert_close(found[tuple(index)].item(), (up - down) / (2 * step), rtol=1e-6, atol=1e-7)


# Edges.


def test_when_no_rank_has_anything_the_statistics_stay() -> None:
    def one_rank(group: Group) -> Passed:
        layer = SyncBatchNorm(CHANNELS, process_group=group)
        empty = torch.empty(0, CHANNELS, 2)
        return train(layer, [empty], [empty])

    for rank in run_ranks(2, one_rank):
        assert rank.output.shape == rank.grad.shape == (0, CHANNELS, 2)
        assert rank.parameters[0].eq(0).all()
        assert rank.buffers["running_mean"].eq(0).all()
        assert rank.buffers["running_var"].eq(1).all()


def test_one_value_per_channel_on_all_ranks_together_is_refused_on_every_rank() -> None:
    def one_rank(group: Group) -> str:
        layer = SyncBatchNorm(CHANNELS, process_group=group)
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            layer(torch.randn(1 - group.rank(), CHANNELS))
        return str(caught.value)

    assert "rank 1 got an input of size (0, 3)" in run_ranks(2, one_rank)[1]


def test_inputs_without_channels_are_refused() -> None:
    def one_rank(group: Group) -> None:
        layer = SyncBatchNorm(CHANNELS, process_group=group)
        with pytest.raises(ValueError, match="at least 2D"):
            layer(torch.randn(CHANNELS))
        with pytest.raises(ValueError, match="non-zero"):
            layer(torch.randn(2, 0))

    run_ranks(2, one_rank)


def collectives(group: Group) -> list[str]:
    """The names of the collectives of ``group`` from now on."""
    kinds: list[str] = []

    def before(call: Call) -> None:
        kinds.append(call.kind)

    group.register_hooks(before)
    return kinds


def test_a_pass_takes_one_collective_each_way() -> None:
    def one_rank(group: Group) -> tuple[list[str], list[str]]:
        layer = SyncBatchNorm(CHANNELS, process_group=group)
        kinds = collectives(group)
        x = torch.randn(2, CHANNELS, requires_grad=True)
        layer(x).sum().backward()
        first = kinds.copy()
        kinds.clear()
        layer(x.detach()).sum().backward()
        return first, kinds

    for whole, inputless in run_ranks(2, one_rank):
        assert len(whole) == 2
        assert inputless == whole[:1]  # nobody needs the gradient of the input


def test_eval_mode_uses_the_running_statistics_and_no_collective() -> None:
    def one_rank(group: Group) -> list[str]:
        layer = SyncBatchNorm(CHANNELS, process_group=group).eval()
        kinds = collectives(group)
        x = torch.randn(4, CHANNELS)
        assert_close(layer(x), x / (1 + layer.eps) ** 0.5)
        layer.running_mean = layer.running_var = None  # then by this rank's batch, as in torch
        assert_close(layer(x), nn.BatchNorm1d(CHANNELS)(x))
        return kinds

    assert run_ranks(2, one_rank) == [[], []]


def test_without_any_group_it_is_plain_batch_normalization() -> None:
    x = torch.randn(4, CHANNELS)
    assert_close(SyncBatchNorm(CHANNELS)(x), nn.BatchNorm1d(CHANNELS)(x))


def test_two_forwards_before_one_backward_are_two_separate_batches() -> None:
    batches = [torch.randn(2, 2, n, CHANNELS, dtype=torch.float64) for n in (1, 3)]

    def one_rank(group: Group) -> list[Tensor]:
        layer = SyncBatchNorm(CHANNELS, process_group=group, dtype=torch.float64)
        x = batches[group.rank()][0].clone().requires_grad_()
        sum((layer(half) ** 3).sum() for half in x).backward()
        return x.grad

    layer = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)
    x = torch.cat([b[0] for b in batches], dim=1).requires_grad_()
    sum((layer(half) ** 3).sum() for half in x).backward()
    assert_close(torch.cat(run_ranks(2, one_rank), dim=1), x.grad)


# Layers and groups.


def test_adopting_a_model_keeps_its_layers_and_their_state() -> None:
    def one_rank(group: Group) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3), nn.BatchNorm1d(3))
        layer, state = model[1], {k: v.clone() for k, v in model.state_dict().items()}
        adopt(model, group)
        assert model[1] is layer
        assert type(layer) is SyncBatchNorm
        assert type(model[2]) is nn.BatchNorm1d
        assert_close(dict(model.state_dict()), state)
        model(torch.randn(2, 2))

    run_ranks(2, one_rank)


class Special(nn.SyncBatchNorm):
    """Somebody's own."""


def test_subclasses_of_torchs_layer_are_left_alone() -> None:
    def one_rank(group: Group) -> None:
        layer = Special(3)
        adopt(layer, group)
        assert type(layer) is Special

    run_ranks(1, one_rank)


def test_a_layers_own_group_counts_for_more_than_the_one_it_is_lent() -> None:
    def one_rank(group: Group) -> list[str]:
        pair = group.split([[0, 1], [2, 3]])
        layer = nn.SyncBatchNorm(CHANNELS, process_group=pair)
        adopt(layer, group)
        kinds = collectives(group)
        layer(torch.randn(group.rank() % 2, CHANNELS, 2))  # each pair has something
        return kinds

    assert run_ranks(4, one_rank) == [[]] * 4


def test_a_copy_shares_the_lent_group_and_a_pickle_goes_without() -> None:
    x = torch.randn(2, 4, CHANNELS)

    def one_rank(group: Group) -> tuple[Tensor, Tensor]:
        layer = SyncBatchNorm(CHANNELS)
        adopt(layer, group)
        unpickled = pickle.loads(pickle.dumps(layer))
        mine = x[group.rank()]
        return copy.deepcopy(layer)(mine), unpickled(mine)

    plain = nn.BatchNorm1d(CHANNELS)
    (copied, alone), _ = run_ranks(2, one_rank)
    assert_close(copied, plain(x.flatten(0, 1))[:4])
    assert_close(alone, plain(x[0]))


def test_every_batchnorm_of_a_model_can_be_converted() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm2d(4, momentum=None)), nn.SyncBatchNorm(5)
    )
    names, weight = list(model.state_dict()), model[0].weight
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    layers = [converted[0], converted[1][0], converted[2]]
    assert [type(layer) for layer in layers] == [SyncBatchNorm] * 3
    assert layers[0].weight is weight
    assert layers[1].momentum is None
    assert list(converted.state_dict()) == names
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))) is SyncBatchNorm


def test_a_rank_that_fails_frees_the_others() -> None:
    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            raise KeyError("no batch")
        SyncBatchNorm(CHANNELS, process_group=group)(torch.randn(2, CHANNELS))

    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, one_rank)
    assert isinstance(caught.value.__cause__, KeyError)


# The pure part.


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.integers(0, 999))
def test_parts_combine_to_the_statistics_of_the_whole(counts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    pieces = [torch.randn(n, CHANNELS, dtype=torch.float64) + n for n in counts]
    parts = torch.zeros(len(pieces), 2 * CHANNELS + 1, dtype=torch.float64)
    for part, piece in zip(parts, pieces, strict=True):
        if len(piece):
            part[:CHANNELS] = piece.mean(0)
            part[CHANNELS:-1] = piece.var(0, correction=0)
            part[-1] = len(piece)
    whole, found = torch.cat(pieces), Statistics.combine(parts, torch.float64)
    assert found.count == len(whole)
    assert_close(found.mean, whole.mean(0))
    assert_close(found.var, whole.var(0, correction=0))


# Processes.


def batch_of(rank: int) -> Tensor:
    return torch.arange(2.0 * (rank + 1) * CHANNELS).sin().view(-1, CHANNELS)


def cubes(layer: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (layer(x) ** 3).sum().backward()
    return x.grad


def over_our_group(meeting: Meeting, backend: str) -> Tensor:
    with meeting.new_group(backend) as group:
        layer = nn.SyncBatchNorm(CHANNELS)
        adopt(layer, group)
        return cubes(layer, batch_of(meeting.rank))


def over_torchs_group(meeting: Meeting, handed: bool) -> Tensor:
    dist.init_process_group("gloo")
    layer = SyncBatchNorm(CHANNELS)
    if handed:
        adopt(layer, dist.group.WORLD)
    grad = cubes(layer, batch_of(meeting.rank))
    del layer
    dist.destroy_process_group()
    return grad


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (over_our_group, "shm"),
        (over_our_group, "gloo"),
        (over_torchs_group, False),
        (over_torchs_group, True),
    ],
)
def test_processes_do_what_one_process_does_over_any_group(function: Any, argument: Any) -> None:
    grads = spawn_ranks(3, function, argument)
    whole = cubes(nn.BatchNorm1d(CHANNELS), torch.cat([batch_of(r) for r in range(3)]))
    assert_close(torch.cat(grads), whole, rtol=1e-4, atol=1e-5)
