"""What a step does beside the usual, on ranks that are threads and with the graph's code untraced.

The functions that are compiled are plain ones: without a compiler they do the same. What the
compiler makes of them is seen in ``test_step_processes.py``.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.compiled import Step, train_step
from paceline.errors import ModuleArgumentError, PeerError, RanksFailedError
from paceline.groups import Group
from paceline.testing import run_ranks

from .steps import Pair, assert_alike, batch, loss_of, seeded


@pytest.fixture(autouse=True)
def _untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "_compile", lambda self, function: function)


def two(group: Group) -> list[Group]:
    second = group.split([0, 1])
    assert second is not None
    return [group, second]


def train(pair: Pair, steps: int = 5, *, weights: Any = None, **eager: Any) -> None:
    for number in range(steps):
        inputs = batch(pair.rank, number)
        loss = pair.step(*inputs)
        torch.testing.assert_close(loss, pair.eager_step(*inputs, **eager), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("model", ["mlp", "transformer", "conv"])
def test_a_step_is_what_eager_mode_does(model: str, optimizer: str) -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), model, optimizer)
        train(pair)
        assert pair.step.reason == ""
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        # Adam divides by what is almost nothing where BatchNorm cancels a gradient
        assert_alike(found, expected, 1e-5 if "adam" in optimizer else 1e-6)


@pytest.mark.parametrize("shared", [False, True], ids=["a GPU each", "a part of one"])
def test_buckets_leave_at_the_end_where_mps_gives_a_rank_some_of_a_gpu(shared: bool) -> None:
    """There is no GPU here, so the reducer is told; which variable it reads: test_replay.py."""

    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), "mlp", "sgd")
        handed, running = pair.ddp.replica.reducer.handed, []
        handed._at_end = shared
        take, average = handed.take, handed.average

        def takes(*given: Any) -> None:
            take(*given)
            running.append(handed.reducer.runner.running.next)  # buckets that have left

        def averages() -> Any:
            running.append(-1)
            return average()

        handed.take, handed.average = takes, averages
        train(pair)
        return pair.states, running

    for (found, expected), left in run_ranks(2, one_rank):
        assert_alike(found, expected, 1e-6)
        assert left.count(-1) == 5
        assert (max(left) > 0) != shared


def test_gradients_are_clipped_by_the_norm_of_the_averages() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), optimizer="sgd", max_norm=0.05)
        train(pair, max_norm=0.05)
        assert pair.step.grad_norm is not None
        assert pair.step.grad_norm > 0.05
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected)


def test_averages_stay_in_grad_when_they_are_wanted() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), optimizer="sgd", keep_grads=True)
        inputs = batch(pair.rank, 0)
        pair.step(*inputs)
        pair.eager_step(*inputs)
        own, other = pair.ddp.module.parameters(), pair.eager.module.parameters()
        return [p.grad.clone() for p in own], [p.grad.clone() for p in other]  # type: ignore[union-attr]

    for found, expected in run_ranks(2, one_rank):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_gradients_are_gone_after_a_step_otherwise() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group))
        pair.step(*batch(pair.rank, 0))
        return [p.grad for p in pair.ddp.parameters()]

    assert run_ranks(2, one_rank) == [[None] * 6] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_last_of_several_calls_steps(ranks: int) -> None:
    def one_rank(group: Group) -> Any:
        groups = two(group) if ranks == 2 else [group, group]
        pair = Pair(groups, optimizer="momentum", accumulate=3)
        moved = []
        for number in range(6):
            before = pair.states[0]["0.weight"]
            inputs = batch(pair.rank, number)
            pair.step(*inputs)
            moved.append(not torch.equal(before, pair.states[0]["0.weight"]))
            with pair.eager.accumulate(3) as last:
                loss_of(pair.eager, *inputs).backward()
            if last:
                pair.eager_optimizer.step()
                pair.eager_optimizer.zero_grad()
        return moved, pair.states

    for moved, (found, expected) in run_ranks(ranks, one_rank):
        assert moved == [False, False, True] * 2
        assert_alike(found, expected)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_weight_makes_it_the_mean_over_all_samples(accumulate: int) -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), optimizer="sgd", accumulate=accumulate)
        for number in range(4):
            rows = 2 + 3 * pair.rank + number
            inputs = batch(pair.rank, number, rows)
            pair.step(*inputs, samples=rows)
            with pair.eager.accumulate(accumulate) as last, pair.eager.samples(rows):
                loss_of(pair.eager, *inputs).backward()
            if last:
                pair.eager_optimizer.step()
                pair.eager_optimizer.zero_grad()
        return pair.states

    results = run_ranks(2, one_rank)
    for found, expected in results:
        assert_alike(found, expected)
    assert_alike(results[0][0], results[1][0])


def test_the_context_of_a_weight_counts_as_well() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), optimizer="sgd")
        for number in range(3):
            rows = 2 + 4 * pair.rank
            inputs = batch(pair.rank, number, rows)
            with pair.ddp.samples(rows):
                pair.step(*inputs)
            with pair.eager.samples(rows):
                pair.eager_step(*inputs)
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected)


@pytest.mark.parametrize("hook", ["fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook"])
def test_communication_hooks_average_the_buckets(hook: str) -> None:
    def one_rank(group: Group) -> Any:
        groups = two(group)
        pair = Pair(groups, optimizer="sgd")
        for ddp, own in zip((pair.ddp, pair.eager), groups, strict=True):
            given: Any = own
            if hook == "powerSGD_hook":
                given = paceline.hooks.PowerSGDState(own, 1, start_powerSGD_iter=2)
            ddp.register_comm_hook(given, getattr(paceline.hooks, hook))
        train(pair, 1)
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        # eager mode has one bucket in its first pass and the step several: other sums in 16 bits
        assert_alike(found, expected, 1e-3)


def test_parameters_that_nobody_used_are_left_alone() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), "branches", "momentum")
        train(pair)
        empty = [not pair.optimizer.state.get(p) for p in pair.ddp.module.never.parameters()]
        return pair.states, empty

    for (found, expected), empty in run_ranks(2, one_rank):
        assert_alike(found, expected)
        assert empty == [True, True]


def test_layers_that_are_frozen_and_thawed_leave_the_step_compiled() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), optimizer="momentum")
        for trained in (True, False, True):
            for ddp in (pair.ddp, pair.eager):
                ddp.module[2].requires_grad_(trained)
            train(pair, 3)
        return pair.step.reason, pair.states

    for reason, (found, expected) in run_ranks(2, one_rank):
        assert reason == ""
        assert_alike(found, expected)


@pytest.mark.parametrize("optimizer", ["momentum", "dampened", "adam", "adamw"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_is_not_used_in_a_step_keeps_its_state(ranks: int, optimizer: str) -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group) if ranks == 2 else [group, group], "branches", optimizer)
        for number in range(6):
            inputs = (*batch(pair.rank, number), number % 3 != 1)
            pair.step(*inputs)
            pair.eager_step(*inputs)
        return pair.states

    for found, expected in run_ranks(ranks, one_rank):
        assert_alike(found, expected, 1e-5 if "adam" in optimizer else 1e-6)


@pytest.mark.parametrize("optimizer", ["dampened", "adamw"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_parameters_that_another_rank_used_are_stepped_here_too(
    max_norm: float | None, optimizer: str
) -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), "branches", optimizer, max_norm=max_norm)
        for number in range(4):
            inputs = (*batch(pair.rank, number), (number + pair.rank) % 2 == 0)
            pair.step(*inputs)
            pair.eager_step(*inputs, max_norm=max_norm)
        return pair.states

    results = run_ranks(2, one_rank)
    for found, expected in results:
        assert_alike(found, expected)
    assert_alike(results[0][0], results[1][0])


def test_ranks_may_have_unequal_numbers_of_batches_inside_join() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), "conv", "sgd")
        counts = 3 + 2 * pair.rank
        step = pair.step
        with pair.ddp.join():
            for number in range(counts):
                step(*batch(pair.rank, number))
        with pair.eager.join():
            for number in range(counts):
                pair.eager_step(*batch(pair.rank, number))
        return pair.states

    results = run_ranks(2, one_rank)
    for found, expected in results:
        assert_alike(found, expected)
    assert_alike(results[0][0], results[1][0])


def test_a_compiled_rank_and_an_eager_rank_train_together() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), "conv", "sgd")
        if pair.rank == 1:
            pair.step.reason = "this rank cannot"
        train(pair)
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected)


def test_eager_and_compiled_steps_may_take_turns() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), "mlp", "adamw")
        for number in range(6):
            inputs = batch(pair.rank, number)
            if number % 2:
                pair.optimizer.zero_grad()
                loss_of(pair.ddp, *inputs).backward()
                pair.optimizer.step()
            else:
                pair.step(*inputs)
            pair.eager_step(*inputs)
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected)


def test_a_checkpoint_is_taken_and_loaded_as_in_eager_mode() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group))
        train(pair, 2)
        kept = pair.states[0], pair.optimizer.state_dict()
        kept = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, kept)
        train(pair, 3)
        pair.ddp.module.load_state_dict(kept[0])
        pair.optimizer.load_state_dict(kept[1])
        for number in range(3):
            pair.step(*batch(pair.rank, number))
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected)


def test_an_optimizer_that_a_graph_cannot_hold_steps_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def one_rank(group: Group) -> Any:
        groups = two(group)
        pair = Pair(groups, max_norm=0.5)
        pair.optimizer = torch.optim.RMSprop(pair.ddp.parameters(), 0.01)
        pair.eager_optimizer = torch.optim.RMSprop(pair.eager.parameters(), 0.01)
        train(pair, max_norm=0.5)
        assert pair.step.reason == ""
        return pair.states

    with caplog.at_level(logging.WARNING, "paceline.compiled"):
        for found, expected in run_ranks(2, one_rank):
            assert_alike(found, expected)
    assert "RMSprop" in caplog.text


def test_a_hook_of_a_parameter_is_a_reason_for_eager_mode() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group))
        called = []
        train(pair, 1)
        for ddp in (pair.ddp, pair.eager):
            ddp.module[0].weight.register_hook(lambda grad: called.append(1))
        train(pair, 2)
        return pair.step.reason, len(called), pair.states

    for reason, called, (found, expected) in run_ranks(2, one_rank):
        assert "0.weight has a hook" in reason
        assert called == 4
        assert_alike(found, expected)


@pytest.mark.parametrize("hooked", [{0}, {0, 1}])
def test_with_fullgraph_such_a_reason_is_an_error_on_every_rank(hooked: set[int]) -> None:
    def one_rank(group: Group) -> None:
        pair = Pair(two(group), fullgraph=True)
        pair.step(*batch(pair.rank, 0))
        if pair.rank in hooked:
            pair.ddp.module[0].weight.register_hook(lambda grad: None)
        error = ModuleArgumentError if pair.rank in hooked else PeerError
        with pytest.raises(error, match=r"0\.weight has a hook"):
            pair.step(*batch(pair.rank, 1))

    run_ranks(2, one_rank)


def test_a_rank_that_fails_tells_the_others() -> None:
    def one_rank(group: Group) -> str:
        pair = Pair(two(group))
        pair.step(*batch(pair.rank, 0))
        x, y = batch(pair.rank, 1)
        with pytest.raises(Exception) as caught:
            pair.step(x[:, : 6 - pair.rank], y)
        return f"{type(caught.value).__name__}: {caught.value}"

    first, second = run_ranks(2, one_rank)
    assert "shapes cannot be multiplied" in second
    assert first.startswith(PeerError.__name__)
    assert "shapes cannot be multiplied" in first


def test_freezing_a_layer_makes_another_program() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), optimizer="momentum")
        train(pair, 2)
        for ddp in (pair.ddp, pair.eager):
            ddp.module[0].requires_grad_(False)
        train(pair, 2)
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected)


def test_a_group_of_one_needs_no_exchange() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair([group, group], "conv", "momentum")
        calls: list[str] = []
        group.register_hooks(lambda call: calls.append(call.kind))
        train(pair)
        return calls, pair.states

    ((calls, (found, expected)),) = run_ranks(1, one_rank)
    assert calls == []
    assert_alike(found, expected)


def test_callbacks_after_backward_see_the_averages_before_the_update() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), optimizer="sgd")
        for ddp in (pair.ddp, pair.eager):

            def double(ddp: Any = ddp) -> None:
                for param in ddp.parameters():
                    param.grad.mul_(2)

            ddp.after_backward(double)
        train(pair, 3)
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected)


def test_schedulers_of_the_learning_rate_see_that_steps_are_taken() -> None:
    def one_rank(group: Group) -> Any:
        pair = Pair(two(group), optimizer="sgd")
        schedulers = [
            torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
            for o in (pair.optimizer, pair.eager_optimizer)
        ]
        for number in range(3):
            train(pair, 1)
            for scheduler in schedulers:
                scheduler.step()  # warns if the optimizer has not stepped, and warnings are errors
            assert number >= 0
        return pair.states

    for found, expected in run_ranks(2, one_rank):
        assert_alike(found, expected)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_optimizer_may_have_parameters_that_are_not_the_models(accumulate: int) -> None:
    def one_rank(group: Group) -> Any:
        found = []
        for own, compiled in zip(two(group), (True, False), strict=True):
            ddp = paceline.DistributedDataParallel(seeded("mlp"), process_group=own)
            scale = nn.Parameter(torch.tensor(2.0))
            optimizer = torch.optim.SGD([*ddp.parameters(), scale], 0.1)

            def loss(model: Any, x: Any, y: Any, scale: Any = scale) -> Any:
                return (model(x) * scale - y).square().mean()

            step = train_step(ddp, optimizer, loss, backend="aot_eager", accumulate=accumulate)
            step.reason = "" if compiled else "to compare"
            for number in range(4):
                step(*batch(own.rank(), number))
            found.append([p.detach().clone() for p in (*ddp.parameters(), scale)])
        return found

    for found, expected in run_ranks(2, one_rank):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_ranks_compile_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    order: list[int] = []

    def compile_(step: Step, function: Any) -> Any:
        order.append(step.ddp.replica.group.rank())
        return function

    monkeypatch.setattr(Step, "_compile", compile_)

    def one_rank(group: Group) -> None:
        train(Pair(two(group)), 2)

    run_ranks(2, one_rank)
    assert order == [0, 1]


def test_no_turns_are_taken_behind_the_first_step() -> None:
    def one_rank(group: Group) -> list[str]:
        pair = Pair(two(group))
        train(pair, 1)
        calls: list[str] = []
        group.register_hooks(lambda call: calls.append(call.kind))
        train(pair, 2)
        return calls

    for calls in run_ranks(2, one_rank):
        assert "barrier" not in calls


@pytest.mark.parametrize(
    "options", [{"accumulate": 0}, {"max_norm": 0.0}, {"max_norm": float("nan")}]
)
def test_bad_options_are_refused_at_once(options: dict[str, Any]) -> None:
    def one_rank(group: Group) -> None:
        pair = Pair([group, group], **options)
        with pytest.raises(ModuleArgumentError, match=next(iter(options))):
            assert pair.step

    run_ranks(1, one_rank)


def test_only_our_wrapper_is_taken() -> None:
    model = seeded("mlp")
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        train_step(model, torch.optim.SGD(model.parameters(), 0.1), loss_of)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True)), "sparse"),
    ],
)
def test_what_can_never_be_traced_is_said_when_the_step_is_made(make: Any, word: str) -> None:
    def one_rank(group: Group) -> str:
        ddp = paceline.DistributedDataParallel(make(), process_group=group)
        step = train_step(ddp, torch.optim.SGD(ddp.parameters(), 0.1), lambda m, x: m(x).mean())
        before = ddp.module[0].weight.detach().clone()
        step(torch.tensor([1, 2 + group.rank()]))
        assert not torch.equal(before, ddp.module[0].weight)
        return step.reason

    assert all(word in reason for reason in run_ranks(2, one_rank))


def test_failures_of_other_kinds_are_not_taken_for_a_reason() -> None:
    def one_rank(group: Group) -> None:
        pair = Pair(two(group))
        pair.step(torch.zeros(2, 5), torch.zeros(2, 3))

    with pytest.raises(RanksFailedError, match="shapes cannot be multiplied"):
        run_ranks(2, one_rank)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_where_headers_are_read_late_a_failed_step_changes_nothing_and_ranks_stay_alike(
    name: str,
) -> None:
    def one_rank(group: Group) -> list[torch.Tensor]:
        ddp = paceline.DistributedDataParallel(seeded("mlp"), process_group=group)
        ddp.replica.read_late()
        params = ddp.parameters()
        optimizer = torch.optim.AdamW(params) if name == "adamw" else torch.optim.SGD(params, 0.1)
        failing = [False]

        def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if failing[0]:
                raise ArithmeticError("no luck")
            return loss_of(model, x, y)

        step = train_step(ddp, optimizer, loss)
        for number in range(4):
            step(*batch(group.rank(), number))
        before = [p.detach().clone() for p in ddp.parameters()]
        failing[0] = group.rank() == 1
        if failing[0]:
            with pytest.raises(ArithmeticError):
                step(*batch(1, 4))
        else:
            step(*batch(0, 4))
        assert all(torch.equal(p, q) for p, q in zip(before, ddp.parameters(), strict=True))
        failing[0] = False
        if group.rank() == 0:
            with pytest.raises(PeerError, match="no luck"):
                step(*batch(0, 5))
        else:
            step(*batch(1, 5))
        for number in range(6, 9):
            step(*batch(group.rank(), number))
        return [p.detach().clone() for p in ddp.parameters()]

    first, second = run_ranks(2, one_rank)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
