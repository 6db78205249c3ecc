"""Graphs that change, leave parameters out or are walked in odd ways, with no flag set."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel as DDP
from paceline import ddp as paceline_ddp
from paceline.errors import (
    GraphChangedError,
    LateGradientError,
    PeerError,
    UnfinishedReductionError,
)
from paceline.groups import Group
from paceline.testing import run_ranks
from tests.ddp.toys import (
    TINY,
    Branches,
    Grads,
    assert_same,
    count_calls,
    data,
    fill,
    grads,
    mean_grads,
    stack,
)

CAPS = pytest.mark.parametrize("cap", [None, TINY])


def batch(step: int, rank: int) -> Tensor:
    return data(4, 3, seed=10 * step + rank)


def check_steps(
    make: Any,
    loss: Any,
    *,
    ranks: int = 2,
    steps: int = 4,
    cap: float | None = None,
    **options: Any,
) -> None:
    """``loss(model, step, rank)`` has the same gradients as in one process, in every step."""

    def one_rank(group: Group) -> list[Grads]:
        ddp = DDP(make(), process_group=group, bucket_cap_mb=cap, **options)
        found = []
        for step in range(steps):
            ddp.zero_grad()
            loss(ddp, step, group.rank()).backward()
            found.append(grads(ddp))
        return found

    results = run_ranks(ranks, one_rank)
    for step in range(steps):
        expected = mean_grads(make(), ranks, lambda m, rank, step=step: loss(m, step, rank))
        for found in results:
            assert_same(found[step], expected)


# Branches.


@CAPS
@pytest.mark.parametrize("find_unused", [False, True])
def test_branches_may_differ_by_rank_and_step(cap: float | None, find_unused: bool) -> None:
    chosen = [[(0,), (1,)], [(2, 1), (0,)], [(), (0, 1, 2)], [(1,), (1,)], [(2, 0), (0, 2)]]

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return model(batch(step, rank), chosen[step][rank]).square().sum()

    check_steps(Branches, loss, steps=5, cap=cap, find_unused_parameters=find_unused)


@CAPS
def test_a_layer_may_move_to_the_front_of_the_graph(cap: float | None) -> None:
    orders = [(0, 1, 2), (2, 1, 0), (1, 0), (1, 2, 0), (0, 1, 2)]

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return model(batch(step, rank), orders[(step + rank) % 5]).square().sum()

    check_steps(Branches, loss, ranks=3, steps=6, cap=cap)


@CAPS
def test_a_parameter_nobody_uses_keeps_no_gradient(cap: float | None) -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=cap)
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step, group.rank()), (0,)).sum().backward()
            assert ddp.module.others[1].weight.grad is None
            assert ddp.module.others[0].weight.grad is not None

    run_ranks(2, one_rank)


@CAPS
def test_a_gradient_nobody_adds_to_stays_as_it_was(cap: float | None) -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=cap)
        for _ in range(2):
            ddp(batch(0, group.rank())).sum().backward()
        before = grads(ddp)
        ddp(batch(1, group.rank()), (0,)).sum().backward()
        after = grads(ddp)
        for name in before:
            kept = name.startswith(("others.1", "others.2"))
            assert torch.equal(before[name], after[name]) == kept

    run_ranks(3, one_rank)


@CAPS
def test_a_parameter_unused_on_one_rank_gets_the_average_with_zeros(cap: float | None) -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=cap)
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step, 0), (0,) if group.rank() == 1 else (0, 1)).sum().backward()
            single = mean_grads(
                Branches(), 1, lambda m, _, step=step: m(batch(step, 0), (0, 1)).sum()
            )
            assert_close(ddp.module.others[1].weight.grad, single["others.1.weight"] * 2 / 3)

    run_ranks(3, one_rank)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = stack(3, 3), stack(3, 2), stack(3, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.trunk(x)
        return {"left": self.left(x), "more": [self.right(x)]}


@CAPS
def test_an_output_need_not_reach_the_loss(cap: float | None) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        output = model(batch(step, rank))
        return (output["left"] if (step + rank) % 2 else output["more"][0]).square().sum()

    check_steps(TwoOutputs, loss, cap=cap)


# The same weight more than once.


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = stack(3, 3), stack(3, 3, seed=1), stack(3, 3)
        self.last[0].weight = self.first[0].weight

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(times):
            x = torch.tanh(self.middle(x))
        return self.last(x)


@CAPS
def test_shared_weights_have_the_sum_of_their_gradients(cap: float | None) -> None:
    check_steps(
        Shared,
        lambda model, step, rank: model(batch(step, rank), 1 + (step + rank) % 3).square().sum(),
        cap=cap,
    )


@CAPS
def test_several_forwards_may_come_before_one_backward(cap: float | None) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        outputs = [model(batch(step, rank + 7 * i), (i % 3,)) for i in range(3)]
        return (outputs[0] * outputs[2] + outputs[1]).sum()

    check_steps(Branches, loss, cap=cap)


def test_two_backwards_through_one_forward_add_up() -> None:
    def one_rank(group: Group) -> Grads:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        for _ in range(3):
            ddp.zero_grad()
            loss = ddp(batch(0, group.rank())).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return grads(ddp)

    expected = mean_grads(Branches(), 2, lambda m, rank: 2 * m(batch(0, rank)).sum())
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


def test_each_of_several_forwards_may_have_its_own_backward() -> None:
    def one_rank(group: Group) -> Grads:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        for _ in range(3):
            ddp.zero_grad()
            first, second = ddp(batch(0, group.rank()), (0,)), ddp(batch(1, group.rank()), (1,))
            second.sum().backward()
            first.square().sum().backward()
        return grads(ddp)

    expected = mean_grads(
        Branches(),
        2,
        lambda m, rank: m(batch(1, rank), (1,)).sum() + m(batch(0, rank), (0,)).square().sum(),
    )
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


# Checkpoints.


class Checkpointed(nn.Module):
    """``plan`` says which layers run, each alone ("0") or in a checkpointed segment ("c0")."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(stack(3, 3, seed=i) for i in range(3))

    def forward(self, x: Tensor, plan: Sequence[str], reentrant: bool) -> Tensor:
        for entry in plan:
            layer = self.layers[int(entry[-1])]
            if entry[0] == "c":
                x = checkpoint(layer, x, use_reentrant=reentrant)
            else:
                x = layer(x)
            x = torch.tanh(x)
        return x


@CAPS
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "plans",
    [
        ["0 c1 2"],
        ["0 c1 c2"],
        ["0 c1 2 c1"],  # one weight in two segments
        ["0 c1 c2 1"],  # inside and outside
        ["0 1 c2 c1 c1"],
        ["0 c1 2", "0 c1 2 c1", "0 2 1 c2 1", "0 c2 c2"],  # another one in every step
    ],
)
def test_checkpointed_layers_have_their_gradients(
    plans: Sequence[str], reentrant: bool, cap: float | None
) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        plan = plans[(step + rank) % len(plans)].split()
        return model(batch(step, rank), plan, reentrant).square().sum()

    check_steps(Checkpointed, loss, cap=cap)


@CAPS
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_wrapper_may_be_checkpointed(reentrant: bool, cap: float | None) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        x = batch(step, rank).requires_grad_()
        return checkpoint(model, x, use_reentrant=reentrant).square().sum()

    check_steps(Branches, loss, cap=cap)


# autograd.grad, and gradients of gradients.


def test_autograd_grad_calls_no_collective_and_leaves_grad_alone() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        for _ in range(3):
            x = batch(0, group.rank()).requires_grad_()
            loss = ddp(x).square().sum()
            calls, before = count_calls(group), grads(ddp)
            mine = torch.autograd.grad(loss, [x, *ddp.parameters()], retain_graph=True)
            torch.autograd.grad(loss, x, retain_graph=True)
            torch.autograd.grad(loss, ddp.module.others[1].weight, retain_graph=True)
            assert calls == []
            assert_same(grads(ddp), before)
            ddp.zero_grad()
            loss.backward()
            assert calls != []
        single = mean_grads(Branches(), 1, lambda m, _: m(batch(0, group.rank())).square().sum())
        assert_close(mine[1:], tuple(single.values()))

    run_ranks(2, one_rank)


@CAPS
def test_a_gradient_penalty_is_averaged(cap: float | None) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        x = batch(step, rank).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.square().sum() + slope.square().sum()

    check_steps(lambda: stack(3, 5, 1), loss, cap=cap)


@CAPS
def test_a_gradient_penalty_alone_is_averaged(cap: float | None) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        x = batch(step, rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    check_steps(lambda: stack(3, 5, 1), loss, cap=cap)


@CAPS
def test_a_penalty_on_parameter_gradients_is_averaged(cap: float | None) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        output = model(batch(step, rank))
        slopes = torch.autograd.grad(
            output.square().sum(), [*model.parameters()], create_graph=True
        )
        return output.sum() + sum(slope.square().sum() for slope in slopes)

    check_steps(lambda: stack(3, 5, 1), loss, cap=cap)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@CAPS
@pytest.mark.parametrize("views", [None, False])
def test_backward_with_create_graph_leaves_averages(cap: float | None, views: bool | None) -> None:
    def one_rank(group: Group) -> list[Grads]:
        ddp = DDP(
            stack(3, 5, 1), process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=views
        )
        found = []
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step, group.rank())).square().sum().backward(create_graph=True)
            assert all(p.grad.requires_grad for p in ddp.parameters())
            found.append(grads(ddp))
            ddp.zero_grad()  # else a cycle stays
        return found

    results = run_ranks(2, one_rank)
    for step in range(3):
        expected = mean_grads(
            stack(3, 5, 1), 2, lambda m, rank, step=step: m(batch(step, rank)).square().sum()
        )
        for found in results:
            assert_same(found[step], expected)


@CAPS
def test_backward_with_inputs_averages_those_and_leaves_the_rest(cap: float | None) -> None:
    def one_rank(group: Group) -> Grads:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=cap)
        for _ in range(3):
            ddp.zero_grad()
            loss = ddp(batch(0, group.rank())).square().sum()
            loss.backward(inputs=[ddp.module.others[0].weight, ddp.module.first.bias])
        return grads(ddp)

    full = mean_grads(Branches(), 2, lambda m, rank: m(batch(0, rank)).square().sum())
    wanted = ("others.0.weight", "first.bias")
    for found in run_ranks(2, one_rank):
        assert_same(found, {n: g if n in wanted else None for n, g in full.items()})


def test_backward_to_the_input_alone_calls_no_collective() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        ddp(batch(0, 0)).sum().backward()
        ddp.zero_grad()
        x = batch(0, group.rank()).requires_grad_()
        loss = ddp(x).sum()
        calls = count_calls(group)
        loss.backward(inputs=[x])
        assert calls == []
        assert x.grad is not None
        assert all(g is None for g in grads(ddp).values())

    run_ranks(2, one_rank)


# Losses that do not come from the output.


class Remembers(nn.Module):
    """Keeps what the loss is made of in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = stack(3, 3), stack(3, 2)
        self.hidden = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.layer(x)
        return self.head(self.hidden)


@CAPS
def test_a_loss_from_attributes_and_output_is_averaged(cap: float | None) -> None:
    def loss(model: Any, step: int, rank: int) -> Tensor:
        output = model(batch(step, rank))
        return output.sum() + getattr(model, "module", model).hidden.square().sum()

    check_steps(Remembers, loss, cap=cap)


@CAPS
def test_a_loss_from_an_attribute_alone_is_averaged(cap: float | None) -> None:
    def loss(model: Any, step: int, rank: int) -> Tensor:
        model(batch(step, rank))
        return getattr(model, "module", model).hidden.square().sum()

    check_steps(Remembers, loss, cap=cap)


@CAPS
def test_a_loss_of_the_parameters_themselves_is_averaged(cap: float | None) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        output = model(batch(step, rank)).sum()
        penalty = sum(p.square().sum() for p in model.parameters()) * (rank + 1)
        return output + penalty if step == 0 else penalty

    check_steps(Branches, loss, cap=cap)


class ReturnsObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = stack(3, 3)

    def forward(self, x: Tensor) -> Normal:
        return Normal(self.layer(x), torch.ones(3, dtype=torch.float64), validate_args=False)


@CAPS
def test_outputs_inside_any_object_are_averaged(cap: float | None) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return -model(batch(step, rank)).log_prob(batch(step, rank + 5)).sum()

    check_steps(ReturnsObject, loss, cap=cap)


class ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(data(3))

    def forward(self) -> Tensor:
        return self.prompt


def test_a_parameter_that_is_the_output_is_averaged() -> None:
    check_steps(
        ReturnsParameter, lambda model, step, rank: (model() * batch(step, rank)).square().sum()
    )


# Two models.


def test_a_gan_of_two_wrapped_models_is_averaged() -> None:
    def train(maker: nn.Module, judge: nn.Module, ranks: Sequence[int]) -> tuple[Grads, Grads]:
        both = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, judge)]
        for step in range(4):
            both[1].zero_grad()
            for rank in ranks:
                fake = maker(batch(step, rank)).detach()
                loss = judge(fake).square().sum() - judge(batch(step, rank + 5)).sum()
                (loss / len(ranks)).backward()
            both[1].step()
            both[0].zero_grad()
            for rank in ranks:
                (judge(maker(batch(step, rank))).square().sum() / len(ranks)).backward()
            both[0].step()
        return grads(maker), grads(judge)

    def one_rank(group: Group) -> tuple[Grads, Grads]:
        maker = DDP(stack(3, 4, 3), process_group=group, bucket_cap_mb=TINY)
        judge = DDP(stack(3, 4, 1, seed=1), process_group=group, bucket_cap_mb=TINY)
        return train(maker, judge, [group.rank()])

    expected = train(stack(3, 4, 3), stack(3, 4, 1, seed=1), [0, 1])
    for maker, judge in run_ranks(2, one_rank):
        assert_same(maker, expected[0])
        assert_same(judge, expected[1])


# Freezing.


@CAPS
def test_layers_may_be_frozen_and_thawed_in_training(cap: float | None) -> None:
    def train(model: nn.Module, ranks: Sequence[int]) -> list[Grads]:
        found = []
        layer = getattr(model, "module", model).others[1]
        for step in range(6):
            if step in (2, 4):
                layer.requires_grad_(step == 4)
            model.zero_grad()
            for rank in ranks:
                (model(batch(step, rank)).square().sum() / len(ranks)).backward()
            found.append(grads(model))
        return found

    def one_rank(group: Group) -> list[Grads]:
        return train(DDP(Branches(), process_group=group, bucket_cap_mb=cap), [group.rank()])

    expected = train(Branches(), [0, 1])
    assert expected[2]["others.1.weight"] is None
    for found in run_ranks(2, one_rank):
        for mine, single in zip(found, expected, strict=True):
            assert_same(mine, single)


@CAPS
def test_a_judge_may_be_frozen_as_a_whole_while_the_generator_trains(cap: float | None) -> None:
    """As GANs do it: then the judge's wrapper has nothing to average."""

    def train(makes: nn.Module, judges: nn.Module, ranks: Sequence[int]) -> list[Grads]:
        found = []
        for step in range(4):
            for trained, frozen in ((makes, judges), (judges, makes)):
                trained.requires_grad_(True)
                frozen.requires_grad_(False)
                trained.zero_grad()
                for rank in ranks:
                    (judges(makes(batch(step, rank))).square().sum() / len(ranks)).backward()
                found.append(grads(trained))
        return found

    def one_rank(group: Group) -> list[Grads]:
        models = (stack(3, 4, 3), stack(3, 4, 1, seed=1))
        makes, judges = (DDP(m, process_group=group, bucket_cap_mb=cap) for m in models)
        return train(makes, judges, [group.rank()])

    expected = train(stack(3, 4, 3), stack(3, 4, 1, seed=1), [0, 1])
    for found in run_ranks(2, one_rank):
        for mine, single in zip(found, expected, strict=True):
            assert_same(mine, single)


@CAPS
def test_a_layer_frozen_at_construction_may_be_thawed(cap: float | None) -> None:
    def one_rank(group: Group) -> Grads:
        model = Branches()
        model.first.requires_grad_(False)
        ddp = DDP(model, process_group=group, bucket_cap_mb=cap)
        for step in range(3):
            if step == 1:
                model.first.requires_grad_(True)
            ddp.zero_grad()
            ddp(batch(step, group.rank())).square().sum().backward()
        return grads(ddp)

    expected = mean_grads(Branches(), 2, lambda m, rank: m(batch(2, rank)).square().sum())
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


def test_a_frozen_layer_keeps_the_gradient_it_had() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        for _ in range(2):
            ddp(batch(0, group.rank())).sum().backward()
        had = ddp.module.first.weight.grad.clone()
        ddp.module.first.requires_grad_(False)
        for _ in range(2):
            ddp(batch(1, group.rank())).sum().backward()
        assert torch.equal(ddp.module.first.weight.grad, had)

    run_ranks(2, one_rank)


def test_freezing_between_two_forwards_of_one_backward_is_noticed() -> None:
    def train(model: nn.Module, rank: int) -> Tensor:
        first = model(batch(0, rank), (0,))
        getattr(model, "module", model).others[0].requires_grad_(False)
        return (first * model(batch(1, rank), (0, 1))).sum()

    def one_rank(group: Group) -> Grads:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        ddp(batch(0, group.rank())).sum().backward()
        ddp.zero_grad()
        train(ddp, group.rank()).backward()
        return grads(ddp)

    total: Grads = {}
    for rank in range(2):
        model = Branches()
        train(model, rank).backward()
        for name, grad in grads(model).items():
            if name.startswith("others.0"):
                continue  # frozen, and with a gradient of before: averaged or not, as one likes
            total[name] = grad if total.get(name) is None else total[name] + grad  # type: ignore[operator]
    for found in run_ranks(2, one_rank):
        mine = {n: g for n, g in found.items() if n in total}
        assert_same(mine, {n: None if g is None else g / 2 for n, g in total.items()})


def test_freezing_keeps_the_communication_hook() -> None:
    def one_rank(group: Group) -> tuple[int, Grads]:
        calls = []

        def hook(state, bucket):
            calls.append(bucket.index())
            work = group.all_reduce(bucket.buffer().div_(group.size()), async_op=True)
            return work.get_future().then(lambda f: f.value()[0])

        ddp = DDP(Branches(), process_group=group)
        ddp.register_comm_hook(None, hook)
        for step in range(4):
            ddp.module.others[2].requires_grad_(step != 2)
            ddp.zero_grad()
            ddp(batch(3, group.rank())).sum().backward()
        return len(calls), grads(ddp)

    expected = mean_grads(Branches(), 2, lambda m, rank: m(batch(3, rank)).sum())
    for calls, found in run_ranks(2, one_rank):
        assert calls == 4
        assert_same(found, expected)


# Promises.


@CAPS
@pytest.mark.parametrize("changes", [(0, 1), (1,)])
def test_a_static_graph_that_changes_raises_on_every_rank(
    changes: Sequence[int], cap: float | None
) -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group, static_graph=True, bucket_cap_mb=cap)
        for _ in range(2):
            ddp(batch(0, group.rank())).sum().backward()
            ddp.zero_grad()
        changed = group.rank() in changes
        with pytest.raises(GraphChangedError if changed else PeerError, match="static_graph"):
            ddp(batch(1, group.rank()), (0,) if changed else (0, 1, 2)).sum().backward()

    run_ranks(2, one_rank)


def test_a_graph_that_changed_on_one_rank_does_not_hang_the_next_step() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group, static_graph=True)
        for step in range(3):
            chosen = (0,) if step == 1 and group.rank() == 1 else (0, 1, 2)
            ddp.zero_grad()
            if step == 1:
                with pytest.raises((GraphChangedError, PeerError)):
                    ddp(batch(step, group.rank()), chosen).sum().backward()
            else:
                ddp(batch(step, group.rank()), chosen).sum().backward()

    run_ranks(2, one_rank)


@CAPS
def test_a_static_graph_that_does_not_change_is_averaged(cap: float | None) -> None:
    check_steps(
        Branches,
        lambda model, step, rank: model(batch(step, rank), (rank,)).square().sum(),
        cap=cap,
        static_graph=True,
    )


def test_a_static_graph_with_accumulation_is_not_taken_for_a_change() -> None:
    def one_rank(group: Group) -> Grads:
        ddp = DDP(Branches(), process_group=group, static_graph=True, bucket_cap_mb=TINY)
        for step in range(3):
            for micro in range(2):
                with ddp.accumulate(2):
                    ddp(batch(micro, group.rank()), (0,)).sum().backward()
            if step < 2:
                ddp.zero_grad(set_to_none=step == 0)
        return grads(ddp)

    expected = mean_grads(
        Branches(), 2, lambda m, rank: m(batch(0, rank), (0,)).sum() + m(batch(1, rank), (0,)).sum()
    )
    for found in run_ranks(2, one_rank):
        assert_same(
            {n: g for n, g in found.items() if g is not None and g.any()},
            {n: g for n, g in expected.items() if g is not None},
        )


@contextmanager
def strictness() -> Iterator[None]:
    paceline_ddp.set_strict(True)
    try:
        yield
    finally:
        paceline_ddp.set_strict(False)


def test_strict_wrappers_refuse_the_next_forward_with_torchs_words() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group)
        ddp(batch(0, group.rank()), (0,)).sum().backward()
        with pytest.raises(UnfinishedReductionError, match="Expected to have finished") as caught:
            ddp(batch(0, group.rank()), (0,))
        assert "find_unused_parameters=True" in str(caught.value)
        assert caught.value.indices == (4, 5, 6, 7)
        assert f"for rank {group.rank()}: 4 5 6 7" in str(caught.value)

    with strictness():
        run_ranks(2, one_rank)


def test_strict_wrappers_take_unused_parameters_when_told_to() -> None:
    with strictness():
        check_steps(
            Branches,
            lambda model, step, rank: model(batch(step, rank), (rank,)).sum(),
            find_unused_parameters=True,
        )


def test_strict_wrappers_take_what_is_fully_used() -> None:
    with strictness():
        check_steps(Branches, lambda model, step, rank: model(batch(step, rank)).sum())


# Odds and ends.


def test_an_output_changed_in_place_is_still_watched() -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        output = model(batch(step, rank))
        output *= 3
        return output.square().sum()

    check_steps(lambda: stack(3, 3), loss)


def test_a_copy_of_the_model_is_left_alone() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group)
        ddp(batch(0, group.rank())).sum().backward()
        own = copy.deepcopy(ddp.module)
        calls = count_calls(group)
        own(batch(0, group.rank())).sum().backward()
        assert calls == []

    run_ranks(2, one_rank)


def test_late_gradients_of_weighted_ranks_are_divided_as_the_others_are() -> None:
    orders = [(0, 1, 2), (0, 1, 2), (0,), (2, 1, 0), (1, 2)]

    def one_rank(group: Group) -> list[Grads]:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        found = []
        for step, order in enumerate(orders):
            ddp.zero_grad()
            with ddp.samples(1 + 2 * group.rank()):
                ddp(batch(step, group.rank()), order).square().sum().backward()
            found.append(grads(ddp))
        return found

    results = run_ranks(2, one_rank)
    for step, order in enumerate(orders):
        expected = mean_grads(
            Branches(),
            2,
            lambda m, rank, s=step, o=order: m(batch(s, rank), o).square().sum() * (0.5 + rank),
        )
        for found in results:
            assert_same(found[step], expected)


def test_embeddings_and_norms_are_averaged_with_the_rest() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(7, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()
        return fill(model)

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return model(torch.tensor([step, rank, 3])).square().sum()

    check_steps(make, loss, ranks=3, cap=TINY)


class Repeating(nn.Module):
    """A layer in one or two reentrant checkpoints."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.layer = stack(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize(("times", "finds"), [(2, False), (1, True), (2, True)])
def test_strict_wrappers_refuse_of_reentrant_checkpoints_what_torch_refuses(
    times: int, finds: bool
) -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Repeating(times), process_group=group, find_unused_parameters=finds)
        x = batch(0, group.rank()).requires_grad_()
        with pytest.raises(LateGradientError, match="mark a variable ready only once"):
            ddp(x).sum().backward()

    with strictness():
        run_ranks(2, one_rank)


@pytest.mark.parametrize(("times", "static"), [(1, False), (2, True)])
def test_strict_wrappers_take_what_torch_takes(times: int, static: bool) -> None:
    with strictness():
        check_steps(
            lambda: Repeating(times),
            lambda model, step, rank: model(batch(step, rank).requires_grad_()).sum(),
            static_graph=static,
        )
