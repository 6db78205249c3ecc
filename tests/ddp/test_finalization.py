"""Averages that the program waits for itself: ``finalize_backward()``."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel as DDP
from paceline.errors import LateGradientError, UnfinalizedError
from paceline.groups import Group
from paceline.testing import run_ranks
from tests.ddp.by_hand import backward, batch, expected, in_two, loss, manual, model, slow_average
from tests.ddp.toys import TINY, Branches, assert_same, data, grads, mean_grads, weights

EARLY = "Expected to have finalized the prior backward pass before starting a new one"
NOTHING = "finalize_backward\\(\\) called but no gradient reduction requires finalization"
NOT_READY = "finalize_backward\\(\\) called before all DDP buckets were ready"
NAME = "require_manual_backward_finalization"
NOT_REQUIRED = "finalize_backward\\(\\) called but manual backward finalization is not required"


# The averages come when they are asked for.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": False},
        {"bucket_cap_mb": TINY},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"batched_grad_copy": True},
    ],
    ids=str,
)
def test_grad_is_none_until_finalize_backward_and_then_the_mean(options: dict[str, Any]) -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group, **options)
        for step in range(4):
            ddp.zero_grad()
            backward(ddp, group, step)
            assert all(p.grad is None for p in ddp.parameters())
            ddp.finalize_backward()
            assert_same(grads(ddp), expected(step))

    in_two(one_rank)


def test_training_ends_with_the_weights_of_one_that_waits_in_backward() -> None:
    def train(ddp: Any, group: Group) -> dict[str, Tensor]:
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
        for step in range(5):
            backward(ddp, group, step)
            if ddp.require_manual_backward_finalization:
                ddp.finalize_backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(ddp)

    def one_rank(group: Group) -> None:
        plain = train(DDP(model(), process_group=group), group)
        assert_same(train(manual(group), group), plain, rtol=0, atol=0)

    in_two(one_rank)


def test_backward_returns_before_another_rank_has_come_to_its_own() -> None:
    gone = threading.Event()

    def one_rank(group: Group) -> None:
        ddp = manual(group)
        if group.rank() == 1:
            assert gone.wait(120)  # rank 0 is through with its backward pass by then
        backward(ddp, group)
        if group.rank() == 0:
            gone.set()
        ddp.finalize_backward()
        assert_same(grads(ddp), expected())

    in_two(one_rank)


def test_all_is_sent_by_the_time_backward_returns() -> None:
    sent = [threading.Event(), threading.Event()]

    def one_rank(group: Group) -> None:
        ddp = manual(group)
        for step in range(3):
            backward(ddp, group, step)
            if step == 2 and group.rank() == 0:
                assert sent[1].wait(120)  # rank 1 has its averages, and this one did not wait
            ddp.finalize_backward()
            ddp.zero_grad()
            if step == 2:
                sent[group.rank()].set()

    in_two(one_rank)


def test_gradients_that_were_held_before_are_averaged_with_the_pass() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        for step in range(3):
            with ddp.no_sync():
                backward(ddp, group, 2 * step)
            backward(ddp, group, 2 * step + 1)
            ddp.finalize_backward()
            both = zip(expected(2 * step).items(), expected(2 * step + 1).values(), strict=True)
            assert_same(grads(ddp), {name: one + two for (name, one), two in both})
            ddp.zero_grad(set_to_none=step == 1)
            if step != 1:
                ddp.zero_grad()

    in_two(one_rank)


def test_what_comes_to_grad_meanwhile_is_added_to_the_average() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        backward(ddp, group)
        first = next(iter(ddp.parameters()))
        first.grad = torch.ones_like(first)
        ddp.finalize_backward()
        wanted = expected()
        wanted["0.weight"] = wanted["0.weight"] + 1
        assert_same(grads(ddp), wanted)

    in_two(one_rank)


def test_unused_parameters_get_what_other_ranks_have() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group, Branches())
        for _ in range(4):
            ddp.zero_grad()
            ddp(batch(group.rank()), (group.rank(),)).square().sum().backward()
            ddp.finalize_backward()
            found = grads(ddp)
            assert found["others.2.weight"] is None
            assert found["others.0.weight"] is not None
            assert found["others.1.weight"] is not None

    in_two(one_rank)


def test_weights_of_a_pass_count_though_their_context_is_over() -> None:
    counts = (1.0, 3.0)
    shares = [count / sum(counts) for count in counts]

    def one_rank(group: Group) -> None:
        ddp = manual(group)
        for step in range(3):
            ddp.zero_grad()
            with ddp.samples(counts[group.rank()]):
                backward(ddp, group, step)
            with pytest.raises(UnfinalizedError, match="the weight of the next pass"):
                ddp.samples(5)
            ddp.finalize_backward()
            wanted = mean_grads(
                model(), 2, lambda m, rank, s=step: loss(m, rank, s) * 2 * shares[rank]
            )
            assert_same(grads(ddp), wanted)

    in_two(one_rank)


@pytest.mark.parametrize("weight", [None, 3.0])
def test_communication_hooks_are_waited_for_in_finalize_backward(weight: float | None) -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        ddp.register_comm_hook(group, slow_average)
        for step in range(3):
            ddp.zero_grad()
            with ddp.samples(weight) if weight else contextlib.nullcontext():
                backward(ddp, group, step)
            ddp.finalize_backward()
            assert_same(grads(ddp), expected(step))

    in_two(one_rank)


def test_a_hook_is_not_registered_while_averages_are_awaited() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        backward(ddp, group)
        with pytest.raises(UnfinalizedError):
            ddp.register_comm_hook(group, slow_average)
        ddp.finalize_backward()
        assert_same(grads(ddp), expected())

    in_two(one_rank)


def test_mixed_precision_is_finalized_after_backward() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    precision = _MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)

    def one_rank(group: Group) -> None:
        ddp = manual(group, mixed_precision=precision)
        for step in range(3):
            ddp.zero_grad()
            out = loss(ddp, group.rank(), step)
            assert ddp.should_finalize_after_backward
            out.backward()
            ddp.finalize_backward()
            assert_same(grads(ddp), expected(step), rtol=1e-4, atol=1e-4)

    in_two(one_rank)


def test_one_rank_alone_finalizes_too() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        for step in range(3):
            ddp.zero_grad()
            backward(ddp, group, step)
            with pytest.raises(UnfinalizedError):
                torch.optim.SGD(ddp.parameters(), lr=1).step()
            ddp.finalize_backward()
            assert_same(grads(ddp), expected(step, ranks=1))
        ddp.require_manual_backward_finalization = False
        ddp.zero_grad()
        backward(ddp, group)
        assert_same(grads(ddp), expected(ranks=1))

    run_ranks(1, one_rank)


def test_ranks_may_differ_in_who_waits_by_hand() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(model(), process_group=group)
        for step in range(4):
            ddp.require_manual_backward_finalization = by_hand = (step + group.rank()) % 2 == 0
            ddp.zero_grad()
            backward(ddp, group, step)
            if by_hand:
                ddp.finalize_backward()
            assert_same(grads(ddp), expected(step))

    in_two(one_rank)


# Inside a backward pass.


class Sparse(nn.Module):
    """A table that the wrapper leaves alone, in front of what it averages."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(data(4, 3, seed=99))
        self.dense = model()

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x * self.table)


def test_a_hook_may_finalize_inside_backward_once_all_gradients_have_come() -> None:
    def one_rank(group: Group) -> None:
        module, inside = Sparse(), []
        DDP._set_params_and_buffers_to_ignore_for_model(module, ["table"])
        ddp = manual(group, module, bucket_cap_mb=TINY)
        optimizer = torch.optim.SGD(module.dense.parameters(), lr=0.1)

        def finalize(_table: Tensor) -> None:
            inside.append(not ddp.should_finalize_after_backward)
            if inside[-1]:
                ddp.finalize_backward()
                optimizer.step()

        module.table.register_post_accumulate_grad_hook(finalize)
        for step in range(4):
            ddp.zero_grad()
            before = copy.deepcopy(module)
            backward(ddp, group, step)
            if not inside[-1]:
                ddp.finalize_backward()
                optimizer.step()
            mean = mean_grads(before, 2, lambda m, rank, s=step: loss(m, rank, s))
            for name, param in before.dense.named_parameters():
                param.data -= 0.1 * mean[f"dense.{name}"]
            assert_same(weights(module.dense), weights(before.dense))
        assert inside == [False, True, True, True]  # the first pass learns

    in_two(one_rank)


def test_finalizing_inside_backward_before_all_gradients_have_come_is_refused() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        last = ddp.module[-1].weight
        for step in range(4):
            ddp.zero_grad()
            out = loss(ddp, group.rank(), step)
            if step % 2:
                handle = last.register_post_accumulate_grad_hook(lambda _: ddp.finalize_backward())
                with pytest.raises(RuntimeError, match=NOT_READY):
                    out.backward()
                handle.remove()
            else:  # the next step is as if the one that failed had not been
                out.backward()
                ddp.finalize_backward()
                assert_same(grads(ddp), expected(step))

    in_two(one_rank)


class Twice(nn.Module):
    """A layer that is used once, or twice in checkpoints that run backward passes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = model()
        self.between: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.between is None:
            return self.layer(x)
        x = checkpoint(self.layer, x, use_reentrant=True)
        x.register_hook(self.between)
        return checkpoint(self.layer, torch.cat([x, x[:, :1]], 1), use_reentrant=True)


def test_a_gradient_that_comes_after_finalizing_inside_backward_is_an_error() -> None:
    def one_rank(group: Group) -> None:
        module = Twice()
        ddp = manual(group, module)
        for step in range(2):
            ddp.zero_grad()
            backward(ddp, group, step)
            ddp.finalize_backward()
        ddp.zero_grad()
        module.between = lambda _grad: ddp.finalize_backward()
        with pytest.raises(LateGradientError, match=r"layer\."):
            ddp(batch(group.rank()).requires_grad_()).square().sum().backward()

    in_two(one_rank)


# What comes too early, or for nothing.


def test_an_optimizer_that_steps_before_finalize_backward_is_refused_by_name() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        elsewhere = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        before = weights(ddp)
        backward(ddp, group)
        elsewhere.step()
        with pytest.raises(UnfinalizedError, match=r"SGD.step\(\) came before finalize") as error:
            optimizer.step()
        assert list(error.value.names) == [n for n, _ in ddp.module.named_parameters()]
        assert_same(weights(ddp), before, rtol=0, atol=0)
        ddp.finalize_backward()
        optimizer.step()

    in_two(one_rank)


def test_a_forward_before_finalize_backward_is_refused_with_torchs_sentence() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        backward(ddp, group)
        for context in (contextlib.nullcontext(), ddp.no_sync()):
            with context, pytest.raises(RuntimeError, match=EARLY):
                ddp(batch(0))
        with torch.no_grad():
            ddp(batch(0))  # to look at it is no new pass
        ddp.finalize_backward()
        assert_same(grads(ddp), expected())
        ddp.zero_grad()
        backward(ddp, group, 1)
        ddp.finalize_backward()
        assert_same(grads(ddp), expected(1))

    in_two(one_rank)


def test_a_second_backward_pass_before_finalize_backward_is_refused_and_spoils_nothing() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        out = loss(ddp, group.rank())
        out.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=EARLY):
            out.backward()
        with pytest.raises(RuntimeError, match=EARLY):
            ddp.sync_grads()
        ddp.finalize_backward()
        assert_same(grads(ddp), expected())

    in_two(one_rank)


def test_finalize_backward_is_refused_where_there_is_nothing_to_wait_for() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(model(), process_group=group)
        with pytest.raises(RuntimeError, match=NOT_REQUIRED):
            ddp.finalize_backward()
        ddp.require_manual_backward_finalization = True
        with pytest.raises(RuntimeError, match=NOTHING):
            ddp.finalize_backward()
        with ddp.no_sync():
            backward(ddp, group)
            with pytest.raises(RuntimeError, match=NOTHING):
                ddp.finalize_backward()
        backward(ddp, group, 1)
        ddp.finalize_backward()
        with pytest.raises(RuntimeError, match=NOTHING):
            ddp.finalize_backward()

    in_two(one_rank)


def test_who_waits_is_not_changed_between_a_forward_and_its_averages() -> None:
    def one_rank(group: Group) -> None:
        ddp = manual(group)
        for _ in range(2):
            out = loss(ddp, group.rank())
            with pytest.raises(RuntimeError, match="cannot be called after forward while"):
                ddp.require_manual_backward_finalization = False
            ddp.require_manual_backward_finalization = True  # as it is
            out.backward()
            with pytest.raises(RuntimeError, match="cannot be called after forward while"):
                ddp.require_manual_backward_finalization = False
            ddp.finalize_backward()
        ddp.require_manual_backward_finalization = False
        ddp.zero_grad()
        backward(ddp, group)
        assert_same(grads(ddp), expected())

    in_two(one_rank)


def test_a_wrapper_whose_parameters_are_all_delayed_refuses_it() -> None:
    def one_rank(group: Group) -> None:
        module = model()
        named = list(module.named_parameters())
        ddp = DDP(
            module,
            process_group=group,
            delay_all_reduce_named_params=named,
            param_to_hook_all_reduce=named[0][1],
        )
        for attempt in (lambda: setattr(ddp, NAME, True), ddp.finalize_backward):
            with pytest.raises(RuntimeError, match="is not supported when all DDP parameters use"):
                attempt()
        setattr(ddp, NAME, False)

    in_two(one_rank)
