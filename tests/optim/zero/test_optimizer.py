"""ZeroRedundancyOptimizer: the same steps as one process, with the state dealt out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.errors import OptimizerArgumentError, OptimizerStateError
from paceline.groups import Group
from paceline.join import Join, Joinable, JoinHook
from paceline.optim import ZeroRedundancyOptimizer as Zero
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import count_calls, data
from tests.optim.zero.ranks import (
    OPTIMIZERS,
    alone,
    assert_equal_weights,
    group_of,
    model,
    train,
    weights,
)

# Steps.


@pytest.mark.parametrize("cut", ["auto", "whole"])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_step_as_one_process_does_bit_for_bit(name: str, views: bool, cut: Any) -> None:
    kind, settings = OPTIMIZERS[name]

    def one_rank(group: Group) -> list[Tensor]:
        net = model()
        zero = Zero(net.parameters(), kind, group, views, cut=cut, **settings)
        train(net, zero, range(4))
        return weights(net)

    expected, _ = alone(name)
    for found in run_ranks(3, one_rank):
        assert_equal_weights(found, expected)


def train_in_process(meeting: Meeting, backend: str, views: bool) -> list[Tensor]:
    with group_of(meeting, backend) as group:
        net = model()
        zero = Zero(net.parameters(), torch.optim.AdamW, group, views, lr=0.1)
        train(net, zero, range(4))
        return weights(net)


@pytest.mark.parametrize("backend", ["shm", "gloo", "torch"])
def test_processes_step_as_one_process_does(backend: str) -> None:
    expected, _ = alone("AdamW")
    for views in (False, True):
        for found in spawn_ranks(2, train_in_process, backend, views):
            assert_equal_weights(found, expected)


def with_default_group(meeting: Meeting) -> tuple[int, int, int]:
    with group_of(meeting, "torch"):
        zero = Zero(model().parameters(), torch.optim.SGD, lr=0.1)
        return zero.rank, zero.world_size, zero.global_rank


def test_the_default_group_is_torchs() -> None:
    assert spawn_ranks(2, with_default_group) == [(0, 2, 0), (1, 2, 1)]


def test_the_current_group_is_the_default() -> None:
    def one_rank(group: Group) -> bool:
        with paceline.process_group(group):
            zero = Zero(model().parameters(), torch.optim.SGD, lr=0.1)
        return zero.process_group is group

    assert run_ranks(2, one_rank) == [True, True]


def test_a_step_costs_one_gather() -> None:
    def one_rank(group: Group, views: bool) -> list[str]:
        net = model()
        zero = Zero(net.parameters(), torch.optim.AdamW, group, views, lr=0.1)
        calls = count_calls(group)
        train(net, zero, range(2))
        return calls

    for views in (False, True):
        for calls in run_ranks(2, lambda group, views=views: one_rank(group, views)):
            assert calls == ["all_gather_single"] * 2


def test_large_parameters_travel_through_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.optim.zero.rows._WINDOW", 7)

    def one_rank(group: Group) -> tuple[list[Tensor], int]:
        net = model()
        zero = Zero(net.parameters(), torch.optim.AdamW, group, lr=0.1)
        calls = count_calls(group)
        train(net, zero, range(4))
        return weights(net), len(calls)

    expected, _ = alone("AdamW")
    for found, calls in run_ranks(3, one_rank):
        assert_equal_weights(found, expected)
        assert calls == 4 * 4  # 66 elements, 22 for each rank, 7 at once


def test_each_rank_keeps_its_share_of_the_state() -> None:
    def one_rank(group: Group) -> int:
        net = model()
        zero = Zero(net.parameters(), torch.optim.AdamW, group, lr=0.1)
        train(net, zero, range(1))
        return sum(own["exp_avg"].numel() for own in zero.optim.state.values())

    assert run_ranks(4, one_rank) == [17, 17, 17, 15]


def test_a_closure_is_called_once_and_its_loss_is_returned() -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], float, int]:
        net, called = model(), []
        zero = Zero(net.parameters(), torch.optim.SGD, group, lr=0.1)

        def closure() -> Tensor:
            called.append(1)
            zero.zero_grad()
            loss: Tensor = net(data(4, 5)).square().sum()
            loss.backward()
            return loss

        loss = zero.step(closure)
        return weights(net), float(loss.detach()), len(called)  # type: ignore[union-attr]

    net = model()
    loss = net(data(4, 5)).square().sum()
    loss.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for found, their_loss, calls in run_ranks(2, one_rank):
        assert_equal_weights(found, weights(net))
        assert their_loss == float(loss.detach())
        assert calls == 1


def test_an_optimizer_that_calls_its_closure_itself_gets_it() -> None:
    def one_rank(group: Group) -> list[Tensor]:
        net = model()
        zero = Zero(net.parameters(), torch.optim.LBFGS, group, lr=0.1, max_iter=3)

        def closure() -> Tensor:
            zero.zero_grad()
            loss: Tensor = net(data(4, 5)).square().sum()
            loss.backward()
            return loss

        before = float(closure().detach())
        for _ in range(3):
            zero.step(closure)
        assert float(closure().detach()) < before
        return weights(net)

    first, second = run_ranks(2, one_rank)
    assert_equal_weights(first, second)


class StepsOddly(torch.optim.SGD):
    """Takes an argument of its own and leaves a key behind."""

    def step(self, closure: Any = None, notes: list[int] | None = None) -> Any:
        self.param_groups[0]["new_key"] = 0.1
        if notes is not None:
            notes.append(len(self.param_groups[0]["params"]))
        return super().step(closure if callable(closure) else None)


def test_an_optimizer_with_a_step_of_its_own_gets_whole_parameters_and_its_arguments() -> None:
    def one_rank(group: Group) -> tuple[list[int], Any]:
        net, notes = model(), []
        zero = Zero(net.parameters(), StepsOddly, group, lr=0.1)
        net(data(4, 5)).square().sum().backward()
        zero.step(0, notes=notes)  # type: ignore[arg-type]
        whole = {id(param) for param in net.parameters()}
        assert all(id(param) in whole for param in zero.optim.param_groups[0]["params"])
        return notes, zero.param_groups[0]["new_key"]

    assert run_ranks(2, one_rank) == [([1], 0.1), ([3], 0.1)]


class JustNamed(torch.optim.AdamW):
    """Steps as its base does."""


def test_a_subclass_without_a_step_of_its_own_is_cut() -> None:
    def one_rank(group: Group) -> int:
        zero = Zero(model().parameters(), JustNamed, group, lr=0.1)
        return sum(param.numel() for param in zero.optim.param_groups[0]["params"])

    assert run_ranks(2, one_rank) == [33, 33]


def test_a_scheduler_reaches_the_inner_optimizer() -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], float]:
        net = model()
        zero = Zero(net.parameters(), torch.optim.SGD, group, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(zero, 1, gamma=0.5)
        for step in range(3):
            train(net, zero, range(step, step + 1))
            scheduler.step()
        return weights(net), zero.optim.param_groups[0]["lr"]

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        train(net, optimizer, range(step, step + 1))
        scheduler.step()
    for found, rate in run_ranks(2, one_rank):
        assert_equal_weights(found, weights(net))
        assert rate == 0.025  # as of the last step


# Parameters of every kind.


def test_parameters_without_gradients_stay_as_they_are() -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], int]:
        net = model()
        net[0].weight.requires_grad_(False)
        zero = Zero(net.parameters(), torch.optim.AdamW, group, lr=0.1)
        calls = count_calls(group)
        train(net, zero, range(2))
        net[0].weight.requires_grad_(True)
        train(net, zero, range(2, 4))
        return weights(net), len(calls)

    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optimizer, range(2))
    net[0].weight.requires_grad_(True)
    train(net, optimizer, range(2, 4))
    for found, calls in run_ranks(2, one_rank):
        assert_equal_weights(found, weights(net))
        assert calls == 2 + 2 * 2  # what is frozen does not travel


@pytest.mark.parametrize("views", [False, True])
def test_a_parameter_that_lies_otherwise_in_memory_keeps_its_order(views: bool) -> None:
    def make() -> nn.Module:
        net = nn.Conv2d(3, 4, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
        for number, param in enumerate(net.parameters()):
            param.data.copy_(data(*param.shape, seed=number))
        return net

    def step(net: nn.Module, optimizer: Any) -> None:
        for seed in range(2):
            optimizer.zero_grad()
            net(data(2, 3, 5, 5, seed=seed)).square().sum().backward()
            optimizer.step()

    def one_rank(group: Group) -> tuple[list[Tensor], dict[str, Any] | None]:
        net = make()
        zero = Zero(net.parameters(), torch.optim.Adam, group, views, lr=0.1)
        step(net, zero)
        zero.consolidate_state_dict(0)
        return weights(net), zero.state_dict() if group.rank() == 0 else None

    net = make()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    step(net, optimizer)
    results = run_ranks(3, one_rank)
    for found, _ in results:
        for a, b in zip(found, weights(net), strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
    assert results[0][1] is not None
    state = results[0][1]["state"][0]["exp_avg"]
    torch.testing.assert_close(state, optimizer.state[net.weight]["exp_avg"])


def test_gradients_in_another_order_than_their_parameter_are_put_in_its_order() -> None:
    def one_rank(group: Group) -> Tensor:
        param = nn.Parameter(torch.arange(6.0).view(2, 3))
        zero = Zero([param], torch.optim.SGD, group, lr=1.0)
        param.grad = torch.arange(6.0).view(3, 2).t()
        zero.step()
        return param.detach()

    expected = torch.arange(6.0).view(2, 3) - torch.arange(6.0).view(3, 2).t()
    for found in run_ranks(2, one_rank):
        assert torch.equal(found, expected)


def test_parameters_that_were_given_other_memory_are_found_again() -> None:
    def one_rank(group: Group, views: bool) -> list[Tensor]:
        net = model()
        zero = Zero(net.parameters(), torch.optim.AdamW, group, views, lr=0.1)
        train(net, zero, range(2))
        for param in net.parameters():
            param.data = param.data.clone()
        train(net, zero, range(2, 4))
        return weights(net)

    expected, _ = alone("AdamW")
    for views in (False, True):
        for found in run_ranks(3, lambda group, views=views: one_rank(group, views)):
            assert_equal_weights(found, expected)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_are_stepped_as_one_process_does(kind: Any) -> None:
    def step(net: nn.Embedding, optimizer: Any) -> None:
        for rows in ([0, 3], [3, 4]):
            optimizer.zero_grad()
            net(torch.tensor(rows)).square().sum().backward()
            optimizer.step()

    def make(sparse: bool = True) -> nn.Embedding:
        return nn.Embedding.from_pretrained(data(5, 3), freeze=False, sparse=sparse)

    def one_rank(group: Group) -> Tensor:
        net = make()
        step(net, Zero(net.parameters(), kind, group, lr=0.1))
        return net.weight.detach()

    net = make(sparse=False)  # torch's own sparse step warns
    step(net, kind(net.parameters(), lr=0.1))
    for found in run_ranks(2, one_rank):
        torch.testing.assert_close(found, net.weight.detach())


def test_an_optimizer_that_cannot_have_sparse_gradients_says_so() -> None:
    def one_rank(group: Group) -> None:
        net = nn.Embedding.from_pretrained(data(5, 3), freeze=False, sparse=True)
        zero = Zero(net.parameters(), torch.optim.Adam, group, lr=0.1)
        net(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match="sparse gradients"):
            zero.step()

    run_ranks(2, one_rank)


def test_parameters_of_several_types_are_dealt_out_when_that_is_said() -> None:
    def params() -> list[nn.Parameter]:
        return [nn.Parameter(data(5).float()), nn.Parameter(data(4)), nn.Parameter(data(3).float())]

    def one_rank(group: Group) -> list[Tensor]:
        mine = params()
        with pytest.raises(ValueError, match="same dense type"):
            Zero(mine, torch.optim.SGD, group, lr=0.1)
        zero = Zero(mine, torch.optim.SGD, group, lr=0.1, cut="flat")
        for param in mine:
            param.grad = torch.ones_like(param)
        zero.step()
        return [param.detach() for param in mine]

    for found in run_ranks(2, one_rank):
        for a, b in zip(found, params(), strict=True):
            torch.testing.assert_close(a, b.detach() - 0.1)


# Groups of parameters.


@pytest.mark.parametrize("views", [False, True])
def test_a_group_that_is_added_later_is_like_one_that_was_there(views: bool) -> None:
    def one_rank(group: Group) -> list[Tensor]:
        net = model()
        weights_, biases = list(net.parameters())[::2], list(net.parameters())[1::2]
        zero = Zero(weights_, torch.optim.AdamW, group, views, lr=0.1, weight_decay=0.0)
        zero.add_param_group({"params": biases, "weight_decay": 0.1})
        assert len(zero.optim.param_groups) == 2
        train(net, zero, range(4))
        return weights(net)

    net = model()
    both = [
        {"params": list(net.parameters())[::2], "weight_decay": 0.0},
        {"params": list(net.parameters())[1::2], "weight_decay": 0.1},
    ]
    train(net, torch.optim.AdamW(both, lr=0.1), range(4))
    for found in run_ranks(3, one_rank):
        assert_equal_weights(found, weights(net))


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_added_later_evens_the_shares_out(ranks: int) -> None:
    def one_rank(group: Group) -> tuple[int, int]:
        params = [torch.rand(size, 1) for size in ([9, 7, 5, 3] * ranks)[:-1]]
        zero = Zero(params, torch.optim.SGD, group, lr=0.1)
        zero.add_param_group({"params": [torch.rand(3, 1)]})
        own = [param for one in zero.optim.param_groups for param in one["params"]]
        return len(zero.param_groups), sum(param.numel() for param in own)

    assert run_ranks(ranks, one_rank) == [(2, 24)] * ranks


def test_torchs_names_for_what_is_where_are_there() -> None:
    def one_rank(group: Group) -> None:
        params = list(model().parameters())
        zero = Zero(params, torch.optim.SGD, group, lr=0.1)
        assert zero._all_params == params
        assert [zero._param_to_index[param] for param in zero._index_to_param] == [0, 1, 2, 3]
        assert zero._param_to_rank == {params[0]: 0, params[1]: 1, params[2]: 1, params[3]: 1}
        parts = zero._partition_parameters()
        assert [sum(p.numel() for p in one[0]["params"]) for one in parts] == [33, 33]
        mine = parts[group.rank()][0]["params"]
        assert [id(p) for p in mine] == [id(p) for p in zero.optim.param_groups[0]["params"]]

    run_ranks(2, one_rank)


# What is refused.


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ([], ValueError),
        (torch.randn(1), TypeError),
        (1.2, TypeError),
        ([torch.randn(1), 42], TypeError),
        ([{"parameters": []}], ValueError),
        ([torch.eye(2).to_sparse()], ValueError),
        ([torch.FloatTensor(1), torch.DoubleTensor(1)], ValueError),
    ],
)
def test_what_are_no_parameters_is_refused(params: Any, error: type[Exception]) -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(error):
            Zero(params, torch.optim.SGD, group, lr=0.1)

    run_ranks(1, one_rank)


def test_a_cut_of_an_unknown_kind_and_parameters_that_cannot_be_cut_are_refused() -> None:
    def one_rank(group: Group) -> None:
        gaps = [nn.Parameter(torch.zeros(4, 4)[:, ::2])]
        with pytest.raises(OptimizerArgumentError, match="half"):
            Zero(gaps, torch.optim.SGD, group, lr=0.1, cut="half")  # type: ignore[arg-type]
        with pytest.raises(OptimizerArgumentError, match="not contiguous in memory"):
            Zero(gaps, torch.optim.SGD, group, lr=0.1, cut="flat")
        zero = Zero(gaps, torch.optim.SGD, group, lr=1.0)
        gaps[0].grad = torch.ones_like(gaps[0])
        zero.step()
        assert torch.equal(gaps[0].detach(), -torch.ones(4, 2))

    run_ranks(2, one_rank)


def test_a_wrapper_that_cannot_shard_gradients_is_refused() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(OptimizerArgumentError, match="cannot divide gradients"):
            Zero(model().parameters(), torch.optim.SGD, group, lr=0.1, ddp=model())

    run_ranks(1, one_rank)


# Join.


class Setter(Joinable):
    """Sets the gradients that a rank which has run out has to step with."""

    def __init__(self, group: Group, params: list[Tensor]) -> None:
        super().__init__()
        self.group, self.params, self.step = group, params, 0

    def set(self) -> None:
        for number, param in enumerate(self.params):
            param.grad = data(*param.shape, seed=100 * self.step + number)
        self.step += 1

    def join_hook(self, **kwargs: Any) -> JoinHook:
        setter = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                setter.set()

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Group:
        return self.group


def test_a_rank_that_has_run_out_still_steps_its_part() -> None:
    def one_rank(group: Group) -> list[Tensor]:
        net = model()
        zero = Zero(net.parameters(), torch.optim.Adam, group, lr=0.1)
        setter = Setter(group, list(net.parameters()))
        with Join([setter, zero]):
            for _ in range(2 + group.rank()):
                Join.notify_join_context(setter)
                setter.set()
                zero.step()
        return weights(net)

    net = model()
    optimizer, step = torch.optim.Adam(net.parameters(), lr=0.1), Setter(None, [])  # type: ignore[arg-type]
    step.params = list(net.parameters())
    for _ in range(4):
        step.set()
        optimizer.step()
    for found in run_ranks(3, one_rank):
        assert_equal_weights(found, weights(net))


# Inside a backward pass.


def test_buckets_are_stepped_as_they_come_and_shared_after_the_last() -> None:
    def one_rank(group: Group) -> tuple[list[Tensor], list[str]]:
        net = model()
        params = list(net.parameters())
        zero = Zero(params, torch.optim.SGD, group, overlap_with_ddp=True, lr=0.1, momentum=0.9)
        zero.overlap_begin(net)
        calls = count_calls(group)
        for number in range(2 + 3):
            step = max(number - 2, 0)
            net.zero_grad()
            net(data(4, 5, seed=step)).square().sum().backward()
            if number == 1:
                with pytest.raises(RuntimeError, match="fully initialized"):
                    zero.consolidate_state_dict()
            for bucket, some in enumerate((params[2:], params[:2])):
                grads = [param.grad for param in some]
                zero.overlap_bucket(bucket, some, grads, is_last=bucket == 1)
        assert zero.step() is None
        zero.consolidate_state_dict()
        if group.rank() == 0:
            assert len(zero.state_dict()["state"]) == 4
        return weights(net), calls

    net = model()
    train(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), range(3))
    for found, calls in run_ranks(2, one_rank):
        assert_equal_weights(found, weights(net))
        assert calls[:3] == ["all_gather_single"] * 3  # two passes went by


def test_overlapping_takes_one_group_and_an_optimizer_that_can() -> None:
    def one_rank(group: Group) -> None:
        params = list(model().parameters())
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        with pytest.raises(RuntimeError, match="single parameter group"):
            Zero(groups, torch.optim.SGD, group, overlap_with_ddp=True, lr=0.1)
        with pytest.raises(ValueError, match="no supported functional optimizer"):
            Zero(params, torch.optim.LBFGS, group, overlap_with_ddp=True, lr=0.1)
        zero = Zero(params, torch.optim.SGD, group, overlap_with_ddp=True, lr=0.1)
        with pytest.raises(RuntimeError, match="single parameter group"):
            zero.add_param_group({"params": [torch.zeros(1)]})
        plain = Zero(params, torch.optim.SGD, group, lr=0.1)
        with pytest.raises(ValueError, match="overlap_with_ddp=True"):
            plain.overlap_begin(None)

    run_ranks(1, one_rank)


def test_torchs_functional_optimizers_stand_for_the_ordinary_ones_only_when_overlapping() -> None:
    from torch.distributed.optim.utils import functional_optim_map

    functional: Any = functional_optim_map[torch.optim.SGD]

    def one_rank(group: Group) -> Any:
        params = list(model().parameters())
        with pytest.raises(ValueError, match="functional optimizer"):
            Zero(params, functional, group, lr=0.1)
        return type(Zero(params, functional, group, overlap_with_ddp=True, lr=0.1).optim)

    assert run_ranks(1, one_rank) == [torch.optim.SGD]


def test_errors_survive_a_copy() -> None:
    error = OptimizerStateError("what", "do that.")
    assert str(copy.copy(error)) == "what do that."
    assert isinstance(error, RuntimeError)
    assert isinstance(error, ValueError)
