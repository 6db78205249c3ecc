"""How a step of shards goes, and what is refused."""

from __future__ import annotations

from logging import LogRecord
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import paceline
from paceline import DistributedDataParallel as DDP
from paceline.data import Shard
from paceline.errors import (
    ModuleArgumentError,
    ModuleStateError,
    ModuleTypeError,
    PeerError,
    RanksFailedError,
    ShardAccountError,
    StepMismatchError,
)
from paceline.groups import Group
from paceline.testing import run_ranks


def shard(index: int, count: int = 3, step: int = 0) -> Shard:
    return Shard(0, step, index, count)


def linear(group: Group, shards: int = 3, **options: Any) -> DDP:
    layer = nn.Linear(2, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    return DDP(layer, process_group=group, shards=shards, **options)


def compute(ddp: DDP, index: int, value: float = 1.0, **numbers: int) -> None:
    with ddp.shard(shard(index, ddp.shards or 1, **numbers)):
        ddp(torch.full((1, 2), value)).sum().backward()


def grad(ddp: DDP) -> Any:
    (param,) = ddp.parameters()
    return None if param.grad is None else param.grad.flatten().tolist()


def test_gradients_are_the_mean_over_the_shards_of_all_ranks() -> None:
    def one_rank(group: Group) -> list[Any]:
        ddp, found = linear(group), []
        for step in range(2):
            mine = [0, 2] if group.rank() == step else [1] if group.rank() == 1 - step else []
            for index in ddp.shards_of(mine):
                compute(ddp, index, float(index + 1), step=step)
                assert grad(ddp) is None, "a step that has not ended leaves nothing"
            found.append(grad(ddp))
            ddp.zero_grad()
        return found

    assert run_ranks(3, one_rank) == [[[2.0, 2.0]] * 2] * 3


def test_samples_are_what_a_shard_counts_as() -> None:
    def one_rank(group: Group) -> Any:
        ddp = linear(group)
        for index in ddp.shards_of([0, 1, 2]):
            with ddp.shard(Shard(0, 0, index, 3, samples=5)):
                if index:
                    ddp.samples([0, 1, 0][index])
                ddp(torch.full((1, 2), float(index))).sum().backward()
        return grad(ddp)

    ((first, second),) = run_ranks(1, one_rank)
    assert first == second == pytest.approx(1 / 6)


def test_a_shard_that_counts_nothing_may_have_nan_gradients() -> None:
    def one_rank(group: Group) -> Any:
        ddp = linear(group, 2)
        for index in ddp.shards_of([0, 1]):
            with ddp.shard(shard(index, 2)), ddp.samples(index):
                ddp(torch.full((1, 2), 1.0 if index else float("nan"))).sum().backward()
        return grad(ddp)

    assert run_ranks(1, one_rank) == [[1.0, 1.0]]


def test_a_step_in_which_nothing_counts_leaves_no_gradients() -> None:
    def one_rank(group: Group) -> Any:
        ddp = linear(group, 1)
        for index in ddp.shards_of([0]):
            with ddp.shard(shard(index, 1)), ddp.samples(0):
                ddp(torch.ones(1, 2)).sum().backward()
        return grad(ddp)

    assert run_ranks(1, one_rank) == [None]


def test_gradients_from_before_are_added_to() -> None:
    def one_rank(group: Group) -> Any:
        ddp = linear(group, 1)
        for step in range(3):
            for index in ddp.shards_of([0] if group.rank() == step % 2 else []):
                compute(ddp, index, 2.0, step=step)
        return grad(ddp)

    assert run_ranks(2, one_rank) == [[6.0, 6.0]] * 2


def test_parameters_that_no_shard_used_have_no_gradient() -> None:
    def one_rank(group: Group) -> Any:
        model = nn.ModuleDict({"used": nn.Linear(2, 1), "not": nn.Linear(2, 1)})
        model.forward = lambda x: model["used"](x)  # type: ignore[assignment]
        ddp = DDP(model, process_group=group, shards=1)
        for index in ddp.shards_of([0][group.rank() :]):
            compute(ddp, index)
        return [p.grad is None for p in ddp.parameters()]

    assert run_ranks(2, one_rank) == [[False, False, True, True]] * 2


def test_frozen_parameters_may_change_from_step_to_step() -> None:
    def one_rank(group: Group) -> Any:
        model, found = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), []
        ddp = DDP(model, process_group=group, shards=2)
        for step in range(3):
            for param in model[0].parameters():
                param.requires_grad = step != 1
            for index in ddp.shards_of([group.rank()]):
                compute(ddp, index, step=step)
            found.append([p.grad is None for p in ddp.parameters()])
            ddp.zero_grad()
        return found

    trained, frozen = [False] * 4, [True, True, False, False]
    assert run_ranks(2, one_rank) == [[trained, frozen, trained]] * 2


def test_buffers_change_by_the_mean_over_the_shards() -> None:
    def one_rank(group: Group) -> Any:
        torch.manual_seed(0)
        ddp = DDP(nn.BatchNorm1d(1), process_group=group, shards=4)
        for index in ddp.shards_of(range(group.rank(), 4, 2)):
            with ddp.shard(shard(index, 4)):
                assert ddp.module.num_batches_tracked == 0
                ddp(torch.tensor([[float(index)], [index + 2.0]])).sum().backward()
            assert ddp.module.running_mean == 0
        return ddp.module.running_mean, ddp.module.running_var, ddp.module.num_batches_tracked

    for mean, variance, batches in run_ranks(2, one_rank):
        assert_close(mean, torch.tensor([0.25]))
        assert_close(variance, torch.tensor([1.1]))
        assert batches == 1


def test_buffers_that_no_shard_changes_are_left_alone_and_do_not_travel() -> None:
    def one_rank(group: Group) -> Any:
        layer = nn.Linear(2, 1, bias=False)
        layer.register_buffer("mask", torch.ones(1000, dtype=torch.bool))
        layer.register_buffer("scale", torch.tensor([0.1, 1e30, 3e-40]))
        mask, scale = layer.mask, layer.scale
        ddp = DDP(layer, process_group=group, shards=2)
        sent: list[int] = []
        handle = group.register_hooks(before=lambda call: sent.append(call.inputs[0].numel()))
        for index in ddp.shards_of([group.rank()]):
            compute(ddp, index)
        handle.remove()
        assert sent[1:] == [8], "the weight's two elements, in room for eight"
        assert layer.mask is mask
        assert layer.scale is scale
        return mask.all().item(), scale.tolist()

    kept = True, torch.tensor([0.1, 1e30, 3e-40]).tolist()
    assert run_ranks(2, one_rank) == [kept] * 2


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    def one_rank(group: Group) -> None:
        layer = nn.Linear(2, 1, bias=False)
        layer.register_buffer("seen", torch.zeros(1))
        ddp = DDP(layer, process_group=group, shards=2)
        with pytest.raises(ModuleStateError, match="buffer seen"), ddp.shard(shard(0, 2)):
            layer.seen = torch.zeros(2)

    run_ranks(1, one_rank)


def test_a_rank_that_cannot_begin_a_step_which_it_ends_is_named_on_the_others() -> None:
    def one_rank(group: Group) -> Any:
        layer = nn.Linear(2, 1, bias=False)
        layer.register_buffer("seen", torch.zeros(1))
        ddp = DDP(layer, process_group=group, shards=1)
        if group.rank() == 0:
            with pytest.raises(PeerError, match="buffer seen") as caught:
                for _ in ddp.shards_of([0]):
                    compute(ddp, 0)
            return list(caught.value.messages)
        layer.weight.grad = torch.ones(1, 2)
        layer.seen = torch.zeros(2)
        with pytest.raises(ModuleStateError, match="buffer seen"):
            ddp.sync_grads()  # it had no shard
        assert grad(ddp) == [1.0, 1.0], "as it was before the step"
        layer.seen = torch.zeros(1)
        return None

    assert run_ranks(2, one_rank)[0] == [1]


def test_more_ranks_than_shards_are_told_once_and_give_the_same_results(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def one_rank(group: Group) -> Any:
        ddp = linear(group, shards=2)
        for index in ddp.shards_of([group.rank()] if group.rank() < 2 else []):
            compute(ddp, index, 1.0 + index)
        return grad(ddp)

    assert run_ranks(3, one_rank) == [[1.5, 1.5]] * 3
    (said,) = [text for text in map(LogRecord.getMessage, caplog.records) if "shards=2" in text]
    assert "shards=2 on 3 ranks: at least 1 of them" in said


def test_an_evaluation_between_steps_is_as_ever() -> None:
    def one_rank(group: Group) -> Any:
        ddp = linear(group).eval()
        return ddp(torch.ones(1, 2)).item()

    assert run_ranks(1, one_rank) == [2.0]


def failures(ranks: int, one_rank: Any) -> dict[int, BaseException]:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(ranks, one_rank)
    return caught.value.errors  # type: ignore[no-any-return]


@pytest.mark.parametrize("left_out", [[1], [0, 2]])
def test_a_shard_that_nobody_computed_is_named_on_all_ranks(left_out: list[int]) -> None:
    def one_rank(group: Group) -> None:
        ddp = linear(group)
        with pytest.raises(ShardAccountError, match=f"shard {left_out[0]} by no rank") as caught:
            for index in ddp.shards_of(
                [i for i in range(3) if i not in left_out and i % 2 == group.rank()]
            ):
                compute(ddp, index)
        assert list(caught.value.missing) == left_out
        assert grad(ddp) is None

    run_ranks(2, one_rank)


def test_a_shard_that_two_ranks_computed_is_named_on_all_ranks() -> None:
    def one_rank(group: Group) -> None:
        ddp = linear(group)
        with pytest.raises(ShardAccountError, match="shard 1 by ranks 0, 2") as caught:
            for index in ddp.shards_of([[0, 1], [2], [1]][group.rank()]):
                compute(ddp, index)
        assert dict(caught.value.twice) == {1: [0, 2]}

    run_ranks(3, one_rank)


def test_ranks_in_different_steps_are_told_apart() -> None:
    def one_rank(group: Group) -> None:
        ddp = linear(group, 2)
        with pytest.raises(StepMismatchError, match="rank 1 has step 1"):
            for index in ddp.shards_of([group.rank()]):
                compute(ddp, index, step=group.rank())

    run_ranks(2, one_rank)


def test_a_rank_that_fails_in_a_shard_is_named_on_the_others_and_all_can_go_on() -> None:
    def one_rank(group: Group) -> Any:
        ddp = linear(group, 2)
        kind: Any = ZeroDivisionError if group.rank() else PeerError
        with pytest.raises(kind, match="division" if group.rank() else "rank 1 failed"):
            for index in ddp.shards_of([group.rank()]):
                with ddp.shard(shard(index, 2)):
                    ddp(torch.ones(1, 2)).sum().backward()
                    if group.rank():
                        1 / 0  # noqa: B018
        assert grad(ddp) is None
        for index in ddp.shards_of([group.rank()]):
            compute(ddp, index)
        return grad(ddp)

    assert run_ranks(2, one_rank) == [[1.0, 1.0]] * 2


def test_a_source_of_shards_that_fails_is_told_to_the_others() -> None:
    def broken() -> Any:
        yield 0
        raise OSError("no more data")

    def one_rank(group: Group) -> None:
        ddp = linear(group, 2)
        kind: Any = OSError if group.rank() == 0 else PeerError
        with pytest.raises(kind, match="no more data"):
            for index in ddp.shards_of(broken() if group.rank() == 0 else [1]):
                compute(ddp, index)

    run_ranks(2, one_rank)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda ddp: compute(ddp, 0), "a second time"),
        (lambda ddp: compute(ddp, 1, step=1), "among those of step 0"),
        (lambda ddp: torch.optim.SGD(ddp.parameters(), lr=1.0).step(), "not averaged"),
        (lambda ddp: next(iter(ddp.shards_of([1]))), "left early"),
        (lambda ddp: ddp(torch.ones(1, 2)), "outside of any shard"),
        (lambda ddp: ddp.samples(3), "outside of a shard"),
        (lambda ddp: ddp.no_sync(), "no_sync"),
        (lambda ddp: ddp.accumulate(2), "accumulate"),
    ],
)
def test_what_has_no_place_in_a_step_is_refused(wrong: Any, message: str) -> None:
    def one_rank(group: Group) -> None:
        ddp = linear(group)
        compute(ddp, 0)
        with pytest.raises(ModuleStateError, match=message):
            wrong(ddp)

    run_ranks(1, one_rank)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda ddp: ddp.shard(0).__enter__(), ModuleTypeError, "expected a paceline.data.Shard"),
        (lambda ddp: ddp.shard(shard(0, 4)).__enter__(), ModuleArgumentError, "a shard of 4"),
        (lambda ddp: ddp.register_comm_hook(None, hook), ModuleArgumentError, "hook hook works"),
        (lambda ddp: ddp.join().__enter__(), ModuleArgumentError, "a Join"),
        (lambda ddp: ddp.scatter_gradients(), ModuleArgumentError, "summed whole"),
        (lambda ddp: ddp._register_fused_optim(torch.optim.SGD, lr=1), ValueError, "in backward"),
    ],
)
def test_what_cannot_be_the_same_is_refused(wrong: Any, error: Any, message: str) -> None:
    run_ranks(1, lambda group: refused(group, wrong, error, message))


def refused(group: Group, wrong: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        wrong(linear(group))


def hook(_state, bucket):  # type: ignore[no-untyped-def]
    raise AssertionError("never called")


@pytest.mark.parametrize("shards", [0, -1, 2.0, True, "2"])
def test_a_number_of_shards_that_is_none_is_refused(shards: Any) -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(ModuleArgumentError, match="whole number of shards"):
            linear(group, shards)

    run_ranks(1, one_rank)


def test_samples_that_do_not_add_up_are_refused() -> None:
    def one_rank(group: Group) -> None:
        ddp = linear(group)
        for count in (0.5, -1, 1 << 53, float("nan")):
            with pytest.raises((ModuleArgumentError, ValueError)), ddp.shard(shard(0)):
                ddp.samples(count)
        with pytest.raises(ModuleStateError, match="second time"), ddp.shard(shard(0)):
            ddp.samples(1)
            ddp.samples(1)

    run_ranks(1, one_rank)


def test_a_sync_batch_norm_is_refused() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(ModuleArgumentError, match="SyncBatchNorm"):
            DDP(nn.SyncBatchNorm(3), process_group=group, shards=2)

    run_ranks(1, one_rank)


def test_sparse_gradients_are_refused() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(ModuleArgumentError, match="weight is sparse"):
            DDP(nn.Embedding(3, 3, sparse=True), process_group=group, shards=2)

    run_ranks(1, one_rank)


def test_a_backward_pass_of_a_forward_outside_of_shards_is_refused() -> None:
    def one_rank(group: Group) -> None:
        ddp = linear(group).eval()
        loss = ddp(torch.ones(1, 2)).sum()
        with pytest.raises(ModuleStateError, match="backward pass of a forward that was not"):
            loss.backward()
        assert grad(ddp) is None

    run_ranks(1, one_rank)


def test_numbers_of_shards_that_differ_are_named() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(paceline.errors.WrapperMismatchError, match="shards"):
            linear(group, 2 + group.rank())

    run_ranks(2, one_rank)


def test_conditions_that_have_changed_are_named() -> None:
    def one_rank(group: Group) -> None:
        ddp = linear(group)
        saved = ddp.conditions()
        ddp.require_conditions(saved)
        with pytest.raises(ModuleStateError, match="threads: 77 then"):
            ddp.require_conditions({**saved, "number of threads": "77"})

    run_ranks(1, one_rank)


def test_operations_that_are_not_deterministic_are_refused_inside_only() -> None:
    def one_rank(group: Group) -> None:
        ddp, before = linear(group), torch.are_deterministic_algorithms_enabled()
        with ddp.shard(shard(0)):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.are_deterministic_algorithms_enabled() == before
        assert torch.utils.deterministic.fill_uninitialized_memory

    run_ranks(1, one_rank)


def test_an_operation_that_is_not_deterministic_is_named_on_all_ranks() -> None:
    def one_rank(group: Group) -> None:
        ddp = linear(group, 2)
        kind: Any = RuntimeError if group.rank() else PeerError
        with pytest.raises(kind, match="put_"):
            for index in ddp.shards_of([group.rank()]):
                with ddp.shard(shard(index, 2)):
                    if group.rank():
                        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
                    ddp(torch.ones(1, 2)).sum().backward()

    run_ranks(2, one_rank)


def test_a_copy_has_shards_of_its_own() -> None:
    import copy

    def one_rank(group: Group) -> Any:
        ddp = linear(group, 1)
        twin = copy.deepcopy(ddp)
        for index in twin.shards_of([0]):
            compute(twin, index)
        return grad(twin), grad(ddp)

    assert run_ranks(1, one_rank) == [([1.0, 1.0], None)]


def test_a_replicated_module_has_shards_too() -> None:
    def one_rank(group: Group) -> Any:
        layer = nn.Linear(2, 1, bias=False)
        model = paceline.replicate(layer, process_group=group, shards=2)
        state = paceline.replicate.state(model)
        assert state is not None
        ddp = state.wrapper
        for index in ddp.shards_of([group.rank()]):
            with ddp.shard(shard(index, 2)):
                model(torch.full((1, 2), float(index))).sum().backward()
        return layer.weight.grad.flatten().tolist()

    assert run_ranks(2, one_rank) == [[0.5, 0.5]] * 2


def test_averages_are_told_to_whoever_waits_for_them() -> None:
    def one_rank(group: Group) -> Any:
        ddp, seen = linear(group, 2), []
        ddp.after_backward(lambda: seen.append(grad(ddp)))
        for index in ddp.shards_of([group.rank()]):
            compute(ddp, index)
        return seen

    assert run_ranks(2, one_rank) == [[[1.0, 1.0]]] * 2
