"""One rank fails: what the others see, and that they can go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline import replicate
from paceline.errors import (
    GroupError,
    ModelMismatchError,
    ModuleArgumentError,
    ModuleStateError,
    PeerDiedError,
    PeerError,
)
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import TINY, Branches, data, fill, grads, mean_grads, stack, weights


class Fallible(nn.Module):
    """Raises in its forward when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack(3, 5, 2)
        self.norm = nn.BatchNorm1d(2, dtype=torch.float64)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        x = self.layers(x)
        if fail:
            raise ValueError("bad batch")
        return self.norm(x)


Outcome = tuple[list[str], dict[str, Tensor]]


def train(ddp: nn.Module, rank: int, failing: int, at: int, steps: int = 4) -> Outcome:
    """Rank ``failing`` raises in its forward at step ``at``; all others leave that step out."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        try:
            x = data(4, 3, seed=10 * step + rank)
            ddp(x, fail=(rank == failing and step == at)).square().sum().backward()
        except (ValueError, PeerError) as error:
            seen.append(f"{type(error).__name__}: {error}")
        else:
            optimizer.step()
    return seen, weights(ddp)


def check_outcomes(outcomes: list[Outcome], failing: int) -> None:
    for rank, (seen, found) in enumerate(outcomes):
        assert len(seen) == 1
        if rank == failing:
            assert seen == ["ValueError: bad batch"]
        else:
            assert seen[0].startswith("PeerError")
            assert f"rank {failing}: ValueError in forward: bad batch" in seen[0]
        for name, value in found.items():
            assert_close(value, outcomes[0][1][name], rtol=0, atol=0)


# In the forward.


@pytest.mark.parametrize("cap", [None, TINY])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize(("ranks", "failing"), [(2, 0), (2, 1), (3, 2)])
def test_after_one_rank_raised_in_forward_all_go_on(
    ranks: int, failing: int, at: int, cap: float | None
) -> None:
    def one_rank(group: Group) -> Outcome:
        ddp = DDP(Fallible(), process_group=group, bucket_cap_mb=cap)
        return train(ddp, group.rank(), failing, at)

    check_outcomes(run_ranks(ranks, one_rank), failing)


def test_the_wrapper_free_form_tells_the_others_too() -> None:
    def one_rank(group: Group) -> Outcome:
        return train(replicate(Fallible(), process_group=group), group.rank(), 1, 2)

    check_outcomes(run_ranks(2, one_rank), 1)


def test_a_failed_forward_is_told_by_its_fields() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Fallible(), process_group=group)
        with pytest.raises((ValueError, PeerError)) as caught:
            ddp(data(4, 3), fail=group.rank() == 1).sum().backward()
        if group.rank() != 1:
            assert caught.value.messages == {1: "ValueError in forward: bad batch"}
            assert caught.value.rank == group.rank()

    run_ranks(3, one_rank)


def test_two_ranks_that_fail_are_both_named() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Fallible(), process_group=group)
        with pytest.raises((ValueError, PeerError)) as caught:
            ddp(data(4, 3), fail=group.rank() > 0).sum().backward()
        if group.rank() == 0:
            assert sorted(caught.value.messages) == [1, 2]

    run_ranks(3, one_rank)


def test_all_ranks_may_fail_in_forward() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Fallible(), process_group=group)
        with pytest.raises(ValueError, match="bad batch"):
            ddp(data(4, 3), fail=True)
        ddp(data(4, 3)).sum().backward()

    run_ranks(2, one_rank)


def test_a_forward_that_fails_where_no_backward_follows_tells_nobody() -> None:
    def one_rank(group: Group) -> dict[str, Tensor | None]:
        ddp = DDP(Fallible(), process_group=group, forward_sync_buffers=False)
        if group.rank() == 1:
            with torch.no_grad(), pytest.raises(ValueError, match="bad batch"):
                ddp(data(4, 3), fail=True)
            with ddp.no_sync(), pytest.raises(ValueError, match="bad batch"):
                ddp(data(4, 3), fail=True)
        ddp(data(4, 3, seed=group.rank())).square().sum().backward()
        return grads(ddp)

    first, second = run_ranks(2, one_rank)
    assert_close(first, second)


def test_a_failed_forward_with_a_communication_hook_is_told() -> None:
    def hook(group, bucket):  # annotations would be checked
        work = group.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0] / group.size())

    def one_rank(group: Group) -> Outcome:
        ddp = DDP(Fallible(), process_group=group, bucket_cap_mb=TINY)
        ddp.register_comm_hook(group, hook)
        return train(ddp, group.rank(), 1, 1)

    check_outcomes(run_ranks(2, one_rank), 1)


def test_a_failed_forward_with_delayed_parameters_is_told() -> None:
    def one_rank(group: Group) -> Outcome:
        model = Fallible()
        late = [(n, p) for n, p in model.named_parameters() if n.startswith("layers.0")]
        ddp = DDP(
            model,
            process_group=group,
            delay_all_reduce_named_params=late,
            param_to_hook_all_reduce=model.layers[0].weight,
        )
        return train(ddp, group.rank(), 1, 1)

    check_outcomes(run_ranks(2, one_rank), 1)


def _train_in_process(meeting: Meeting, backend: str, at: int) -> Outcome:
    if backend == "stock gloo":
        dist.init_process_group("gloo")
        outcome = train(DDP(Fallible()), meeting.rank, 1, at)
        dist.destroy_process_group()
        return outcome
    group = meeting.new_group(backend)
    outcome = train(DDP(Fallible(), process_group=group), meeting.rank, 1, at)
    group.shutdown()
    return outcome


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("backend", ["shm", "gloo", "stock gloo"])
def test_processes_go_on_after_one_raised_in_forward(backend: str, at: int) -> None:
    check_outcomes(spawn_ranks(2, _train_in_process, backend, at), 1)


# In the backward.


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("no gradient")


class FailsHalfway(nn.Module):
    """Two layers; the backward may raise between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = stack(3, 3), stack(3, 2)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        x = self.first(x)
        return self.second(RaisesInBackward.apply(x) if fail else x)


def train_halfway(ddp: nn.Module, rank: int, at: int, steps: int = 4) -> Outcome:
    seen = []
    for step in range(steps):
        ddp.zero_grad()
        try:
            x = data(4, 3, seed=10 * step + rank)
            ddp(x, fail=(rank == 1 and step == at)).square().sum().backward()
        except (ArithmeticError, PeerError) as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen, {n: g for n, g in grads(ddp).items() if g is not None}


def check_halfway(outcomes: list[Outcome]) -> None:
    for rank, (seen, _) in enumerate(outcomes):
        assert len(seen) == 1
        expected = "ArithmeticError: no gradient" if rank == 1 else "failed halfway"
        assert expected in seen[0]
    assert len(outcomes[0][1]) == 4
    for _, found in outcomes:
        assert_close(found, outcomes[0][1])


@pytest.mark.parametrize("cap", [None, TINY])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_after_a_backward_failed_halfway_all_go_on(at: int, cap: float | None) -> None:
    def one_rank(group: Group) -> Outcome:
        ddp = DDP(FailsHalfway(), process_group=group, bucket_cap_mb=cap)
        return train_halfway(ddp, group.rank(), at)

    check_halfway(run_ranks(3, one_rank))


def _halfway_in_process(meeting: Meeting) -> Outcome:
    group = meeting.new_group("shm")
    ddp = DDP(FailsHalfway(), process_group=group, bucket_cap_mb=TINY)
    outcome = train_halfway(ddp, meeting.rank, 1)
    group.shutdown()
    return outcome


def test_processes_go_on_after_a_backward_failed_halfway() -> None:
    check_halfway(spawn_ranks(2, _halfway_in_process))


def test_the_gradients_after_a_failed_step_are_right() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DDP(FailsHalfway(), process_group=group, bucket_cap_mb=TINY)
        return train_halfway(ddp, group.rank(), 1, steps=3)[1]

    expected = mean_grads(
        FailsHalfway(), 2, lambda m, rank: m(data(4, 3, seed=20 + rank)).square().sum()
    )
    for found in run_ranks(2, one_rank):
        assert_close(found, expected)


def test_all_ranks_may_fail_halfway() -> None:
    def one_rank(group: Group) -> dict[str, Tensor | None]:
        ddp = DDP(FailsHalfway(), process_group=group, bucket_cap_mb=TINY)
        for step in range(4):
            ddp.zero_grad()
            loss = ddp(data(4, 3, seed=group.rank()), fail=step in (0, 2)).square().sum()
            if step in (0, 2):
                with pytest.raises(ArithmeticError):
                    loss.backward()
            else:
                loss.backward()
        return grads(ddp)

    expected = mean_grads(
        FailsHalfway(), 2, lambda m, rank: m(data(4, 3, seed=rank)).square().sum()
    )
    for found in run_ranks(2, one_rank):
        assert_close(found, expected)


def test_after_a_failed_backward_the_next_may_come_without_a_forward() -> None:
    def one_rank(group: Group) -> dict[str, Tensor | None]:
        ddp = DDP(FailsHalfway(), process_group=group)
        bad = ddp(data(4, 3), fail=True).sum()
        good = ddp(data(4, 3, seed=group.rank())).square().sum()
        with pytest.raises(ArithmeticError):
            bad.backward()
        ddp.zero_grad()
        good.backward()
        return grads(ddp)

    expected = mean_grads(
        FailsHalfway(), 2, lambda m, rank: m(data(4, 3, seed=rank)).square().sum()
    )
    for found in run_ranks(2, one_rank):
        assert_close(found, expected)


# A rank that is gone.


def _die_in_training(meeting: Meeting, backend: str) -> str:
    group = meeting.new_group(backend)
    ddp = DDP(fill(Branches()), process_group=group, bucket_cap_mb=TINY)
    for step in range(5):
        if meeting.rank == 1 and step == 2:
            os._exit(7)
        try:
            ddp(data(2, 3)).sum().backward()
        except GroupError as error:
            assert step == 2
            return f"{type(error).__name__} {getattr(error, 'ranks', None)}"
    return "nothing"


def test_a_rank_that_dies_is_named_by_the_others_in_their_backward() -> None:
    found = spawn_ranks(3, _die_in_training, "shm", may_die=[1])
    assert [found[0].split()[0], found[2].split()[0]] == [PeerDiedError.__name__] * 2


# What cannot be wrapped.


def test_models_that_differ_are_named_on_every_rank() -> None:
    def one_rank(group: Group) -> str:
        sizes = (3, 5) if group.rank() == 1 else (3, 4)
        with pytest.raises(ModelMismatchError, match=r"0\.weight float64\[4, 3\]") as caught:
            DDP(stack(*sizes), process_group=group)
        return str(caught.value)

    assert all("rank 1 differs from rank 0" in text for text in run_ranks(3, one_rank))


def test_parameters_in_another_order_are_noticed() -> None:
    def one_rank(group: Group) -> None:
        names = ("a", "b") if group.rank() else ("b", "a")
        model = nn.ModuleDict({name: stack(3, 3) for name in names})
        with pytest.raises(ModelMismatchError):
            DDP(model, process_group=group)

    run_ranks(2, one_rank)


def frozen() -> nn.Module:
    return stack(2, 2).requires_grad_(False)


BAD: list[tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = [
    (lambda: nn.Tanh(), {}, ModuleStateError, "doesn't have any parameter that requires"),
    (frozen, {}, ModuleStateError, "doesn't have any parameter that requires"),
    (lambda: nn.LazyLinear(2), {}, ModuleStateError, "uninitialized parameters"),
    (lambda: stack(2, 2), {"device_ids": [0]}, ModuleArgumentError, "device_ids"),
    (lambda: stack(2, 2), {"device_ids": [0, 1]}, ModuleArgumentError, "single element"),
    (lambda: stack(2, 2), {"output_device": 1}, ModuleArgumentError, "output_device"),
    (lambda: stack(2, 2), {"param_to_hook_all_reduce": 1}, ModuleArgumentError, "same time"),
    (lambda: stack(2, 2), {"device_mesh": 1}, ModuleStateError, "both process_group and"),
]


@pytest.mark.parametrize(("make", "options", "kind", "text"), BAD)
def test_bad_modules_and_arguments_are_refused_with_torchs_words(
    make: Callable[[], nn.Module], options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(kind, match=text):
            DDP(make(), process_group=group, **options)

    run_ranks(1, one_rank)


def test_without_any_group_torchs_error_comes() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        DDP(stack(2, 2))


class Synced(nn.Module):
    """Raises, when it is told to, before a layer in which all ranks meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = stack(3, 2)
        self.norm = nn.SyncBatchNorm(2, dtype=torch.float64)

    def forward(self, x: Tensor, fail: bool) -> Tensor:
        x = self.first(x)
        if fail:
            raise ValueError("bad batch")
        return self.norm(x)


def test_a_failure_before_a_sync_batchnorm_layer_is_told() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Synced(), process_group=group)
        ddp(data(4, 3), False).sum().backward()
        failing = group.rank() == 1
        with pytest.raises(ValueError if failing else PeerError, match="bad batch"):
            ddp(data(4, 3), failing).sum().backward()

    run_ranks(3, one_rank)
