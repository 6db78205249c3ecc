"""clip_grad_norm_: the norm of all gradients, wherever they lie."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline.errors import OptimizerArgumentError
from paceline.groups import Group
from paceline.optim import ZeroRedundancyOptimizer as Zero
from paceline.optim import clip_grad_norm_
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import TINY, count_calls, data
from tests.optim.zero.ranks import group_of, model

ORDERS = pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])


def gradients(net: nn.Module, rank: int) -> None:
    net(data(4, 5, seed=rank)).square().sum().backward()


def reference(ranks: int, order: float, most: float) -> tuple[Tensor, list[Tensor]]:
    """torch's own on the mean over ranks, in one process."""
    net = model()
    (sum(net(data(4, 5, seed=r)).square().sum() for r in range(ranks)) / ranks).backward()  # type: ignore[union-attr]
    norm = nn.utils.clip_grad_norm_(net.parameters(), most, order)
    return norm, [param.grad for param in net.parameters()]  # type: ignore[misc]


# Plain gradients.


@ORDERS
def test_plain_gradients_are_clipped_as_torch_does_without_a_collective(order: float) -> None:
    def one_rank(group: Group) -> tuple[Tensor, list[Any], list[str]]:
        ddp = DDP(model(), process_group=group)
        gradients(ddp, group.rank())
        calls = count_calls(group)
        norm = clip_grad_norm_(ddp.parameters(), 0.5, order)
        return norm, [param.grad.clone() for param in ddp.parameters()], calls

    norm, grads = reference(2, order, 0.5)
    for found, clipped, calls in run_ranks(2, one_rank):
        assert_close(found, norm)
        assert_close(clipped, grads)
        assert calls == []


def test_parameters_models_and_optimizers_are_the_same_to_it() -> None:
    norms = []
    for target in (
        lambda net: net.parameters(),
        lambda net: net,
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        lambda net: list(net.parameters()),
    ):
        net = model()
        gradients(net, 0)
        norms.append(clip_grad_norm_(target(net), 1.0))
        assert float(clip_grad_norm_(net, 9.0)) == pytest.approx(1.0, abs=1e-5)
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    one = nn.Parameter(torch.zeros(2))
    assert clip_grad_norm_(one, 1.0) == 0
    one.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(one, 1.0) == 5


# Stretches.


@ORDERS
@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_gradients_in_stretches_are_clipped_with_one_all_reduce(order: float, by: str) -> None:
    def one_rank(group: Group) -> tuple[Tensor, list[Tensor], list[str]]:
        ddp = DDP(model(), process_group=group, bucket_cap_mb=TINY)
        zero = Zero(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=1.0)
        before = [param.detach().clone() for param in ddp.parameters()]
        gradients(ddp, group.rank())
        calls = count_calls(group)
        norm = clip_grad_norm_(zero if by == "optimizer" else ddp, 0.5, order)
        seen = list(calls)
        zero.step()  # with a rate of one, what is taken off is the gradient
        taken = [a - b.detach() for a, b in zip(before, ddp.parameters(), strict=True)]
        return norm, taken, seen

    norm, grads = reference(3, order, 0.5)
    results = run_ranks(3, one_rank)
    for found, clipped, calls in results:
        assert_close(found, norm)
        assert torch.equal(found, results[0][0])
        assert_close(clipped, grads)
        assert calls == ["all_reduce"]


def test_a_norm_below_the_limit_changes_nothing() -> None:
    def one_rank(group: Group) -> bool:
        ddp = DDP(model(), process_group=group)
        zero = Zero(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=1.0)
        gradients(ddp, group.rank())
        before = [part.clone() for part in zero.gradients().parts]
        clip_grad_norm_(zero, 1e9)
        after = zero.gradients().parts
        return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    assert run_ranks(2, one_rank) == [True, True]


def test_stretches_of_ones_own_are_counted_over_the_group() -> None:
    def one_rank(group: Group) -> Tensor:
        mine = nn.Parameter(torch.zeros(2))
        if group.rank() < 2:  # the last one has nothing to give
            mine.grad = torch.full((2,), float(group.rank() + 1))
        return clip_grad_norm_([mine], 100.0, group=group)

    for norm in run_ranks(3, one_rank):
        assert_close(norm, torch.tensor(math.sqrt(10.0)))


def test_large_numbers_do_not_overflow_on_their_way() -> None:
    def one_rank(group: Group) -> Tensor:
        mine = nn.Parameter(torch.zeros(1))
        mine.grad = torch.full((1,), 1e30)
        return clip_grad_norm_([mine], 1.0, group=group)

    for norm in run_ranks(2, one_rank):
        assert_close(norm, torch.tensor(math.sqrt(2.0) * 1e30))


def test_a_norm_that_is_not_finite_raises_on_every_rank_if_that_is_asked_for() -> None:
    def one_rank(group: Group) -> None:
        mine = nn.Parameter(torch.zeros(1))
        mine.grad = torch.full((1,), math.inf if group.rank() == 0 else 1.0)
        with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
            clip_grad_norm_([mine], 1.0, error_if_nonfinite=True, group=group)
        assert math.isinf(clip_grad_norm_([mine], 1.0, group=group))

    run_ranks(2, one_rank)


def test_an_order_that_does_not_add_up_is_refused_for_stretches() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(OptimizerArgumentError, match="norm_type is 0"):
            clip_grad_norm_([nn.Parameter(torch.zeros(1))], 1.0, 0, group=group)

    run_ranks(1, one_rank)


# DTensors.


def clip_dtensors(meeting: Meeting, order: float) -> tuple[float, list[str], list[Tensor]]:
    with group_of(meeting, "torch"):
        mesh = init_device_mesh("cpu", (meeting.size,))
        plain = nn.Parameter(data(3))
        params: list[nn.Parameter] = [plain]
        for number, place in enumerate((Shard(0), Shard(1), Replicate())):
            whole = distribute_tensor(data(5, 3, seed=number), mesh, [place])
            params.append(nn.Parameter(whole))
        for number, param in enumerate(params):
            value = data(*param.shape, seed=10 + number)
            places = getattr(param, "placements", None)
            param.grad = value if places is None else distribute_tensor(value, mesh, places)
        calls = []
        original = Group.make_call

        def counted(self: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
            calls.append(kind)
            return original(self, kind, *args, **kwargs)  # type: ignore[arg-type]

        Group.make_call = counted  # type: ignore[method-assign]
        try:
            norm = clip_grad_norm_(params, 0.5, order)
        finally:
            Group.make_call = original  # type: ignore[method-assign]
        full = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in params]
        return float(norm), calls, full  # type: ignore[return-value]


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_dtensors_are_clipped_with_one_collective(order: float) -> None:
    whole = [nn.Parameter(data(3)), *(nn.Parameter(data(5, 3)) for _ in range(3))]
    for number, param in enumerate(whole):
        param.grad = data(*param.shape, seed=10 + number)
    norm = nn.utils.clip_grad_norm_(whole, 0.5, order)
    for found, calls, grads in spawn_ranks(2, clip_dtensors, order):
        assert found == pytest.approx(float(norm))
        assert calls == ["all_reduce"]
        assert_close(grads, [param.grad for param in whole])
