"""A sharded optimizer paired with DistributedDataParallel: gradients come in stretches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline import Join
from paceline.ddp import _MixedPrecision
from paceline.errors import OptimizerArgumentError, OptimizerStateError
from paceline.groups import Group
from paceline.optim import ZeroRedundancyOptimizer as Zero
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import batch, mlp, seeded
from tests.ddp.toys import TINY, count_calls, data
from tests.optim.zero.ranks import OPTIMIZERS, group_of, model, weights

CUT = [name for name in OPTIMIZERS if name != "Adafactor"]
CAPS = pytest.mark.parametrize("cap", [None, TINY])


def paired(group: Any, cap: float | None = None, kind: Any = torch.optim.AdamW, **more: Any) -> Any:
    """A wrapped model and its optimizer."""
    ddp = DDP(model(), process_group=group, bucket_cap_mb=cap)
    return ddp, Zero(ddp.parameters(), kind, ddp=ddp, **{"lr": 0.1, **more})


def loss(net: Any, step: int, rank: int) -> Tensor:
    return net(data(4, 5, seed=10 * step + rank)).square().sum()


def train(ddp: Any, zero: Any, rank: int, steps: range) -> None:
    for step in steps:
        zero.zero_grad()
        loss(ddp, step, rank).backward()
        zero.step()


def train_alone(net: nn.Module, optimizer: Any, ranks: int, steps: range) -> None:
    """One process on the mean over the ranks' losses."""
    for step in steps:
        optimizer.zero_grad()
        (sum(loss(net, step, rank) for rank in range(ranks)) / ranks).backward()  # type: ignore[union-attr]
        optimizer.step()


def assert_close_weights(found: list[Tensor], net: nn.Module) -> None:
    for a, b in zip(found, weights(net), strict=True):
        assert_close(a, b)


# Steps.


@CAPS
@pytest.mark.parametrize("name", CUT)
def test_ranks_step_as_one_process_does_on_the_mean(name: str, cap: float | None) -> None:
    kind, settings = OPTIMIZERS[name]

    def one_rank(group: Group) -> list[Tensor]:
        ddp, zero = paired(group, cap, kind, **settings)
        train(ddp, zero, group.rank(), range(4))
        return weights(ddp)

    net = model()
    train_alone(net, kind(net.parameters(), **settings), 3, range(4))
    results = run_ranks(3, one_rank)
    for found in results:
        assert_close_weights(found, net)
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def train_in_process(meeting: Meeting, backend: str) -> list[Tensor]:
    with group_of(meeting, backend) as group:
        ddp, zero = paired(group, TINY)
        train(ddp, zero, meeting.rank, range(4))
        return weights(ddp)


@pytest.mark.parametrize("backend", ["shm", "gloo", "torch"])
def test_processes_step_as_one_process_does_on_the_mean(backend: str) -> None:
    net = model()
    train_alone(net, torch.optim.AdamW(net.parameters(), lr=0.1), 2, range(4))
    for found in spawn_ranks(2, train_in_process, backend):
        assert_close_weights(found, net)


def test_gradients_cost_half_of_what_an_average_for_all_costs() -> None:
    def one_rank(group: Group) -> tuple[float, float, dict[str, float]]:
        ddp = DDP(model(), process_group=group)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
        train(ddp, optimizer, group.rank(), range(2))
        group.traffic.reset()
        train(ddp, optimizer, group.rank(), range(2))
        plain = group.traffic.bytes_sent
        ddp, zero = paired(group)
        train(ddp, zero, group.rank(), range(2))
        group.traffic.reset()
        train(ddp, zero, group.rank(), range(2))
        return plain, group.traffic.bytes_sent, group.traffic.by_kind

    for plain, ours, kinds in run_ranks(2, one_rank):
        payload = 2 * 66 * 8  # steps, elements, bytes
        assert kinds["reduce_scatter_single"] == payload / 2
        assert kinds["all_gather_single"] == payload / 2
        assert ours <= plain * 1.1  # and the headers


def test_a_step_gathers_once_for_each_bucket() -> None:
    def one_rank(group: Group) -> tuple[list[str], int]:
        ddp, zero = paired(group, TINY)
        train(ddp, zero, group.rank(), range(2))
        loss(ddp, 0, group.rank()).backward()
        calls = count_calls(group)
        zero.step()
        return calls, len(ddp.scatter_gradients().stretches)

    for calls, buckets in run_ranks(2, one_rank):
        assert calls == ["all_gather_single"] * buckets


def test_the_model_lives_in_memory_that_all_ranks_of_a_host_read() -> None:
    def one_rank(group: Group) -> bool:
        ddp, zero = paired(group)
        storage = zero._rows[0].buffer.untyped_storage().data_ptr()  # type: ignore[attr-defined]
        return all(p.untyped_storage().data_ptr() == storage for p in ddp.parameters())

    assert all(run_ranks(2, one_rank))


def test_each_rank_keeps_its_share_of_the_state_as_few_tensors() -> None:
    def one_rank(group: Group) -> tuple[int, int]:
        ddp, zero = paired(group)
        train(ddp, zero, group.rank(), range(1))
        state = zero.optim.state.values()
        return len(state), sum(own["exp_avg"].numel() for own in state)

    assert run_ranks(2, one_rank) == [(1, 33), (1, 33)]


def test_passes_that_are_not_averaged_gather_and_weights_count() -> None:
    def one_rank(group: Group) -> list[Tensor]:
        ddp, zero = paired(group)
        rank = group.rank()
        for step in (0, 2):
            with ddp.no_sync(), ddp.samples(1 + rank):
                loss(ddp, step, rank).backward()
            with ddp.samples(3):
                loss(ddp, step + 1, rank).backward()
            zero.step()  # without zero_grad: a step uses gradients up
        return weights(ddp)

    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in (0, 2):
        optimizer.zero_grad()
        for rank in range(2):
            part = (1 + rank) * loss(net, step, rank) + 3 * loss(net, step + 1, rank)
            (part / (1 + 2 + 3 + 3)).backward()
        optimizer.step()
    for found in run_ranks(2, one_rank):
        assert_close_weights(found, net)


def test_two_averaged_passes_add_up_until_the_step() -> None:
    def one_rank(group: Group) -> list[Tensor]:
        ddp, zero = paired(group)
        for step in range(2):
            loss(ddp, step, group.rank()).backward()
        zero.step()
        return weights(ddp)

    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    (sum(loss(net, step, rank) for step in range(2) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
    optimizer.step()
    for found in run_ranks(2, one_rank):
        assert_close_weights(found, net)


class Sometimes(nn.Module):
    """Three layers, of which the middle one is used in even steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(3))
        for number, param in enumerate(self.parameters()):
            param.data.copy_(data(*param.shape, seed=number) * 0.3)

    def forward(self, x: Tensor, step: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) if number != 1 or step % 2 == 0 else x
        return x


def train_sometimes(net: Any, optimizer: Any, ranks: Any, clears: str, mean_of: int = 1) -> None:
    """Steps on the mean of these ranks' losses; ``clears``: what clears gradients before each."""
    for step, clear in enumerate(clears):
        zero_grad = net.zero_grad if clear.isupper() else optimizer.zero_grad
        zero_grad(set_to_none=clear in "nN")
        parts = [net(data(4, 5, seed=10 * step + r), step).square().sum() for r in ranks]
        (sum(parts) / mean_of).backward()  # type: ignore[union-attr]
        optimizer.step()


@CAPS
@pytest.mark.parametrize(
    ("clears", "steps"),
    [
        ("nnnnn", 3),  # to None: a parameter without a gradient takes no step
        ("zzzzz", 5),  # in place: its gradient is zero from the first one on
        ("ZZZZZ", 5),  # by the module
        ("zzznn", 4),
        ("NznzZ", 5),
    ],
)
def test_a_parameter_that_no_rank_used_steps_as_with_an_ordinary_optimizer(
    cap: float | None, clears: str, steps: int
) -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], Any]:
        ddp = DDP(Sometimes(), process_group=group, bucket_cap_mb=cap)
        zero = Zero(ddp.parameters(), torch.optim.AdamW, ddp=ddp, lr=0.1, weight_decay=0.5)
        train_sometimes(ddp, zero, [group.rank()], clears)
        zero.consolidate_state_dict(0)
        return weights(ddp), zero.state_dict() if group.rank() == 0 else None

    net = Sometimes()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    train_sometimes(net, optimizer, range(2), clears, mean_of=2)
    results = run_ranks(2, one_rank)
    for found, _ in results:
        assert_close_weights(found, net)
    found = results[0][1]["state"]
    assert [int(found[n]["step"]) for n in range(6)] == [5, 5, steps, steps, 5, 5]
    for number, own in optimizer.state_dict()["state"].items():
        assert_close(found[number], own)


class Tied(nn.Module):
    """Two layers with one weight, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def conv_net() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    return layers.to(memory_format=torch.channels_last)


KINDS: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "tied": (Tied, (3, 4), {}),
    "channels last": (conv_net, (2, 3, 8, 8), {}),
    "bfloat16": (lambda: mlp().bfloat16(), (3, 4), {}),
    "mixed precision": (mlp, (3, 4), {"mixed_precision": _MixedPrecision(torch.bfloat16)}),
    "reduced in bfloat16": (
        mlp,
        (3, 4),
        {"mixed_precision": _MixedPrecision(reduce_dtype=torch.bfloat16)},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_kind_are_trained_as_with_an_ordinary_optimizer(kind: str) -> None:
    make, shape, settings = KINDS[kind]

    def one_rank(group: Group) -> list[list[Tensor]]:
        found = []
        for pairs in (False, True):
            ddp = DDP(seeded(make), process_group=group, **settings)
            optimizer: Any = torch.optim.AdamW(ddp.parameters(), lr=0.01)
            if pairs:
                optimizer = Zero(ddp.parameters(), torch.optim.AdamW, ddp=ddp, lr=0.01)
            for step in range(3):
                optimizer.zero_grad()
                x = batch(group.rank(), step, shape=shape)
                x = x.bfloat16() if kind == "bfloat16" else x
                ddp(x).float().square().mean().backward()
                optimizer.step()
            found.append(weights(ddp))
        return found

    for plain, ours in run_ranks(2, one_rank):
        for a, b in zip(plain, ours, strict=True):
            assert_close(b, a, rtol=2e-3, atol=2e-3)
            assert a.stride() == b.stride()


# Groups of parameters.


@CAPS
def test_groups_keep_their_settings_and_strangers_stay_as_they_are(cap: float | None) -> None:
    def one_rank(group: Group) -> list[Tensor]:
        ddp = DDP(model(), process_group=group, bucket_cap_mb=cap)
        a, b, c, _ = ddp.parameters()
        groups = [{"params": [a]}, {"params": [c], "lr": 0.2, "weight_decay": 0.5}]
        zero = Zero(groups, torch.optim.AdamW, ddp=ddp, lr=0.1)
        train(ddp, zero, group.rank(), range(2))
        zero.add_param_group({"params": [b], "lr": 0.3})
        train(ddp, zero, group.rank(), range(2, 4))
        return weights(ddp)

    net = model()
    a, b, c, _ = net.parameters()
    groups = [{"params": [a]}, {"params": [c], "lr": 0.2, "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    train_alone(net, optimizer, 2, range(2))
    optimizer.add_param_group({"params": [b], "lr": 0.3})
    net.zero_grad()
    train_alone(net, optimizer, 2, range(2, 4))
    for found in run_ranks(2, one_rank):
        assert_close_weights(found, net)


def test_parameters_outside_of_the_wrapper_are_dealt_out_with_their_own_gradients() -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], Tensor]:
        ddp = DDP(model(), process_group=group)
        extra = nn.Parameter(data(3))
        zero = Zero([*ddp.parameters(), extra], torch.optim.AdamW, ddp=ddp, lr=0.1)
        for step in range(2):
            zero.zero_grad()
            loss(ddp, step, group.rank()).backward()
            extra.grad = data(3, seed=step)
            zero.step()
        return weights(ddp), extra.detach()

    net, extra = model(), nn.Parameter(data(3))
    optimizer = torch.optim.AdamW([*net.parameters(), extra], lr=0.1)
    for step in range(2):
        extra.grad = data(3, seed=step)
        net.zero_grad()
        (sum(loss(net, step, rank) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    for found, other in run_ranks(2, one_rank):
        assert_close_weights(found, net)
        assert_close(other, extra.detach())


# State.


def save(group: Group, cap: float | None, steps: range = range(2)) -> Any:
    ddp, zero = paired(group, cap)
    train(ddp, zero, 0, steps)
    zero.consolidate_state_dict(0)
    return weights(ddp), zero.state_dict() if group.rank() == 0 else None


def resume(group: Group, start: list[Tensor], load: Any, cap: float | None = None) -> list[Tensor]:
    net = model()
    for param, value in zip(net.parameters(), start, strict=True):
        param.data.copy_(value)
    ddp = DDP(net, process_group=group, bucket_cap_mb=cap)
    zero = Zero(ddp.parameters(), torch.optim.AdamW, ddp=ddp, lr=0.1)
    load(zero)
    train(ddp, zero, 0, range(2, 4))
    return weights(ddp)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_state_of_three_ranks_goes_on_on_any_number_and_in_other_buckets(ranks: int) -> None:
    start, state = run_ranks(3, lambda group: save(group, TINY))[0]
    plain = torch.optim.AdamW(model().parameters(), lr=0.1)
    plain.load_state_dict(state)  # it is that of an ordinary optimizer
    net = model()
    train_alone(net, torch.optim.AdamW(net.parameters(), lr=0.1), 1, range(4))
    for found in run_ranks(
        ranks, lambda group: resume(group, start, lambda zero: zero.load_state_dict(state))
    ):
        assert_close_weights(found, net)


def test_resuming_on_as_many_ranks_is_bit_equal() -> None:
    start, state = run_ranks(2, lambda group: save(group, None))[0]
    whole, _ = run_ranks(2, lambda group: save(group, None, range(4)))[0]
    for found in run_ranks(
        2, lambda group: resume(group, start, lambda zero: zero.load_state_dict(state))
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def test_parameters_that_took_different_numbers_of_steps_keep_their_counts() -> None:
    net = model()
    params = list(net.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss(net, step, 0).backward()
        if step == 0:
            params[1].grad = params[2].grad = None
        if step < 2:
            params[3].grad = None
        optimizer.step()
    start, state = weights(net), copy.deepcopy(optimizer.state_dict())
    train_alone(net, optimizer, 1, range(2, 4))
    for found in run_ranks(
        2, lambda group: resume(group, start, lambda zero: zero.load_state_dict(state))
    ):
        assert_close_weights(found, net)


def save_sharded(meeting: Meeting, path: str) -> list[Tensor]:
    with group_of(meeting, "torch") as group:
        ddp, zero = paired(group, TINY)
        train(ddp, zero, 0, range(2))
        dcp.save({"optimizer": zero.sharded_state_dict()}, checkpoint_id=path)
        return weights(ddp)


def test_a_checkpoint_of_paired_ranks_goes_on_on_any_number(tmp_path: Path) -> None:
    start = spawn_ranks(2, save_sharded, str(tmp_path))[0]
    net = model()
    train_alone(net, torch.optim.AdamW(net.parameters(), lr=0.1), 1, range(4))
    for ranks in (1, 3):
        for found in run_ranks(
            ranks, lambda group: resume(group, start, lambda zero: zero.load_sharded(tmp_path))
        ):
            assert_close_weights(found, net)


# Join.


def test_a_rank_that_has_run_out_still_steps_its_part() -> None:
    def one_rank(group: Group) -> list[Tensor]:
        ddp, zero = paired(group)
        with Join([ddp, zero]):
            for step in range(2 + group.rank()):
                loss(ddp, step, group.rank()).backward()
                zero.step()
                zero.zero_grad()
        return weights(ddp)

    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        going = [rank for rank in range(3) if step < 2 + rank]
        (sum(loss(net, step, rank) for rank in going) / 3).backward()  # type: ignore[union-attr]
        optimizer.step()
    for found in run_ranks(3, one_rank):
        assert_close_weights(found, net)


def test_joining_the_model_alone_is_refused() -> None:
    def one_rank(group: Group) -> None:
        ddp, zero = paired(group)
        with pytest.raises(OptimizerStateError, match=r"Join\(\[ddp, optimizer\]\)"), ddp.join():
            loss(ddp, 0, group.rank()).backward()
            zero.step()

    run_ranks(2, one_rank)


# What is refused.


def test_an_optimizer_that_needs_whole_parameters_is_refused_before_anything_changes() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(model(), process_group=group)
        with pytest.raises(OptimizerArgumentError, match="Adafactor needs whole parameters"):
            Zero(ddp.parameters(), torch.optim.Adafactor, ddp=ddp)
        with pytest.raises(OptimizerArgumentError, match="Leave ddp= out"):
            Zero(ddp.parameters(), torch.optim.SGD, ddp=ddp, overlap_with_ddp=True, lr=0.1)
        loss(ddp, 0, group.rank()).backward()
        assert all(param.grad is not None for param in ddp.parameters())

    run_ranks(2, one_rank)
