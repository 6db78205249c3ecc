"""Buckets that have memory only while a pass needs it: ``lazy_bucket_allocation``."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline import DistributedDataParallel as DDP
from paceline import replicate
from paceline.errors import PeerError, WrapperMismatchError
from paceline.groups import Group
from paceline.optim import ZeroRedundancyOptimizer
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import TINY, Branches, assert_same, data, grads, mean_grads, stack, weights
from tests.marks import needs_shm
from tests.waiting import until


def model() -> nn.Sequential:
    return stack(3, 4, 2)


def loss(module: Any, rank: int, step: int = 0) -> Tensor:
    return module(data(4, 3, seed=10 * step + rank)).square().sum()


def expected(step: int = 0) -> Any:
    return mean_grads(model(), 2, lambda m, rank: loss(m, rank, step))


def lazy(group: Group, module: nn.Module | None = None, **options: Any) -> Any:
    module = model() if module is None else module
    return DDP(module, process_group=group, lazy_bucket_allocation=True, **options)


def sizes(ddp: Any) -> list[int]:
    """How many elements each bucket has memory for."""
    return [bucket.buffer.numel() for bucket in ddp.replica.reducer.buckets]


class Counted:
    """The memory that a group has given and not got back, in elements."""

    def __init__(self, group: Group) -> None:
        self.most = self.now = self.times = 0
        self._group, self._allocate = group, group.allocate
        group.allocate = self._give  # type: ignore[method-assign]

    def _give(self, numel: int, *rest: Any) -> Tensor:
        tensor = self._allocate(numel, *rest)
        self.times += 1
        self.now += numel
        self.most = max(self.most, self.now)
        weakref.finalize(tensor.untyped_storage(), self._got_back, numel)
        return tensor

    def _got_back(self, numel: int) -> None:
        self.now -= numel

    def left(self) -> int:
        """What is not back when no rank, which may be a thread, has to do with it any more.

        The recorder's thread may hold the work of a call for a moment while it looks at it.
        """
        self._group.barrier()
        until(lambda: gc.collect() >= 0 and self.now == 0)
        return self.now


def test_a_header_that_is_read_later_keeps_no_bucket() -> None:
    def one_rank(group: Group) -> int:
        counted, ddp = Counted(group), lazy(group)
        ddp.replica.reducer.read_late()  # as on a GPU
        for step in range(3):
            ddp.zero_grad()
            loss(ddp, group.rank(), step).backward()
        ddp.zero_grad()
        return counted.left()

    assert run_ranks(2, one_rank) == [0, 0]


# The numbers are the same.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": False},
        {"bucket_cap_mb": TINY},
        {"bucket_cap_mb": TINY, "gradient_as_bucket_view": False},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"batched_grad_copy": True},
    ],
    ids=str,
)
def test_gradients_are_the_mean_and_no_bucket_has_memory_afterwards(
    options: dict[str, Any],
) -> None:
    def one_rank(group: Group) -> None:
        ddp = lazy(group, **options)
        for step in range(4):
            ddp.zero_grad()
            loss(ddp, group.rank(), step).backward()
            assert_same(grads(ddp), expected(step))
            assert not any(sizes(ddp))

    run_ranks(2, one_rank)


@pytest.mark.parametrize("cap", [25, TINY])
@pytest.mark.parametrize("kept", ["all", "zeroed in place", "some"])
def test_gradients_that_are_not_dropped_are_added_to(kept: str, cap: float) -> None:
    def one_rank(group: Group) -> None:
        ddp, plain = lazy(group, bucket_cap_mb=cap), DDP(model(), process_group=group)
        for step in range(5):
            for each in (ddp, plain):
                loss(each, group.rank(), step).backward()
            assert_same(grads(ddp), grads(plain))
            for each in (ddp, plain):
                if kept == "zeroed in place":
                    each.zero_grad(set_to_none=False)
                if kept == "some":
                    each.module[0].zero_grad()

    run_ranks(2, one_rank)


def test_micro_steps_weights_and_unused_parameters_count_as_ever() -> None:
    def train(ddp: Any, rank: int) -> Any:
        for step in range(6):
            with ddp.accumulate(2) as last, ddp.samples(1 + rank):
                ddp(data(4, 3, seed=10 * step + rank), (rank, 2)).square().sum().backward()
            if last:
                found = grads(ddp)
                ddp.zero_grad()
        return found

    def one_rank(group: Group) -> None:
        plain = train(DDP(Branches(), process_group=group), group.rank())
        assert_same(train(lazy(group, Branches()), group.rank()), plain)

    run_ranks(2, one_rank)


@pytest.mark.parametrize("is_lazy", [True, False])
@pytest.mark.parametrize("dropped", [True, False])
def test_a_gradient_under_which_the_program_put_other_memory_counts(
    is_lazy: bool, dropped: bool
) -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(model(), process_group=group, lazy_bucket_allocation=is_lazy)
        for step in range(3):
            ddp.zero_grad()
            loss(ddp, group.rank(), step).backward()
            for param in ddp.parameters():
                param.grad.data = param.grad.data * 2
            held = {n: 0 if dropped else 2 * g for n, g in expected(step).items()}
            if dropped:
                ddp.zero_grad()
            loss(ddp, group.rank(), 7).backward()
            assert_same(grads(ddp), {n: g + held[n] for n, g in expected(7).items()})

    run_ranks(2, one_rank)


def test_a_communication_hook_gets_buckets_with_memory() -> None:
    def average(group, bucket):
        assert bucket.buffer().numel() == sum(g.numel() for g in bucket.gradients())
        work = group.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def one_rank(group: Group) -> None:
        ddp = lazy(group, bucket_cap_mb=TINY)
        ddp.register_comm_hook(group, average)
        for step in range(3):
            ddp.zero_grad()
            loss(ddp, group.rank(), step).backward()
            assert_same(grads(ddp), expected(step))
            assert not any(sizes(ddp))

    run_ranks(2, one_rank)


# Memory comes and goes.


def test_memory_is_taken_in_backward_and_given_back_when_gradients_are_dropped() -> None:
    def one_rank(group: Group) -> None:
        counted = Counted(group)
        ddp = lazy(group)
        for step in range(3):
            out = loss(ddp, group.rank(), step)
            assert counted.now == 0
            out.backward()
            assert counted.now > 0  # .grad lies in it
            ddp.zero_grad()
            assert counted.left() == 0

    run_ranks(2, one_rank)


def test_gradients_of_their_own_leave_the_buckets_without_memory_after_each_pass() -> None:
    def one_rank(group: Group) -> None:
        counted = Counted(group)
        ddp = lazy(group, gradient_as_bucket_view=False)
        for step in range(3):
            loss(ddp, group.rank(), step).backward()
            assert counted.left() == 0
            assert counted.most > 0

    run_ranks(2, one_rank)


def test_a_bucket_whose_gradients_have_not_come_has_no_memory() -> None:
    def one_rank(group: Group) -> None:
        ddp = lazy(group, bucket_cap_mb=TINY)
        seen: list[int] = []
        for step in range(3):
            ddp.zero_grad()
            seen.clear()
            out = loss(ddp, group.rank(), step)
            for param in ddp.parameters():
                param.register_hook(lambda _: seen.append(sum(map(bool, sizes(ddp)))))
            out.backward()
        assert seen == sorted(seen)
        assert seen[0] == 0
        assert seen[-1] > 0

    run_ranks(2, one_rank)


def test_gradients_that_stay_keep_their_memory_and_no_other_is_taken() -> None:
    def one_rank(group: Group) -> None:
        counted = Counted(group)
        ddp = lazy(group)
        for step in range(5):
            loss(ddp, group.rank(), step).backward()
            ddp.zero_grad(set_to_none=False)
            if step == 1:
                once = counted.times
        assert counted.times == once

    run_ranks(2, one_rank)


def test_a_gradient_that_the_program_keeps_is_not_written_over() -> None:
    def one_rank(group: Group) -> None:
        ddp, kept = lazy(group), []
        for step in range(3):
            ddp.zero_grad()
            loss(ddp, group.rank(), step).backward()
            kept.append(ddp.module[0].weight.grad)
        assert_same(dict(enumerate(kept)), {s: expected(s)["0.weight"] for s in range(3)})

    run_ranks(2, one_rank)


def test_a_pass_that_fails_leaves_no_memory_behind() -> None:
    def one_rank(group: Group) -> None:
        counted = Counted(group)
        ddp = lazy(group)
        for step in range(4):
            ddp.zero_grad()
            if step == 2 and group.rank() == 1:
                with pytest.raises(RuntimeError, match="mat1"):
                    ddp(data(4, 7))
            elif step == 2:
                with pytest.raises(PeerError):
                    loss(ddp, group.rank(), step).backward()
            else:
                loss(ddp, group.rank(), step).backward()
                assert_same(grads(ddp), expected(step))
            if step == 2:
                assert counted.left() == 0

    run_ranks(2, one_rank)


# With what else there is.


def test_not_even_the_first_pass_has_a_bucket_for_everything() -> None:
    def one_rank(group: Group) -> None:
        ddp, seen = lazy(group, bucket_cap_mb=TINY), []
        allocate = group.allocate
        group.allocate = lambda *what: seen.append(what[0]) or allocate(*what)  # type: ignore[method-assign,func-returns-value]
        loss(ddp, group.rank()).backward()
        assert len(seen) > 1
        assert_same(grads(ddp), expected())

    run_ranks(2, one_rank)


def test_ranks_that_differ_in_it_are_told_so() -> None:
    def one_rank(group: Group) -> None:
        with pytest.raises(WrapperMismatchError, match="lazy_bucket_allocation"):
            DDP(model(), process_group=group, lazy_bucket_allocation=group.rank() == 1)

    run_ranks(2, one_rank)


def test_it_goes_with_averages_that_the_program_waits_for() -> None:
    def one_rank(group: Group) -> None:
        ddp = lazy(group)
        ddp.require_manual_backward_finalization = True
        for step in range(3):
            ddp.zero_grad()
            loss(ddp, group.rank(), step).backward()
            assert any(sizes(ddp))  # they are on their way
            ddp.finalize_backward()
            assert_same(grads(ddp), expected(step))
            assert not any(sizes(ddp))

    run_ranks(2, one_rank)


def test_a_sharded_optimizer_keeps_its_part_only() -> None:
    def train(group: Group, **options: Any) -> dict[str, Tensor]:
        ddp = DDP(model(), process_group=group, **options)
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.SGD, ddp=ddp, process_group=group, lr=0.1
        )
        for step in range(6):
            with ddp.accumulate(2) as last:
                loss(ddp, group.rank(), step).backward()
            if last:
                if options:
                    parts = [
                        s.grad.untyped_storage().nbytes() for s in ddp.scattered_gradients.stretches
                    ]
                    assert sum(parts) <= 8 * (26 // 2 + 1)
                    assert not any(sizes(ddp))
                optimizer.step()
                optimizer.zero_grad()
        return weights(ddp)

    def one_rank(group: Group) -> None:
        assert_same(train(group, lazy_bucket_allocation=True), train(group), rtol=0, atol=0)

    run_ranks(2, one_rank)


def test_a_copy_and_a_replicated_module_have_it_too() -> None:
    def one_rank(group: Group) -> None:
        twin = copy.deepcopy(lazy(group))
        assert twin.lazy_bucket_allocation
        module = replicate(model(), process_group=group, lazy_bucket_allocation=True)
        for each, wrapper in ((twin, twin), (module, replicate.state(module).wrapper)):
            for step in range(2):
                each.zero_grad()
                loss(each, group.rank(), step).backward()
                assert_same(grads(each), expected(step))
                assert not any(sizes(wrapper))

    run_ranks(2, one_rank)


def in_processes(meeting: Meeting) -> None:
    """Over shared memory: the heap has it all back, with an optimizer step as one graph too."""
    group = meeting.new_group("shm")
    ddp = lazy(group, bucket_cap_mb=TINY)
    for step in range(4):
        loss(ddp, group.rank(), step).backward()
        assert_same(grads(ddp), expected(step))
        ddp.zero_grad()
    optimizers = []
    for each in (ddp, DDP(model(), process_group=group)):
        each.module.load_state_dict(model().state_dict())
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        take = paceline.compiled.train_step(
            each, optimizer, lambda m, x: m(x).square().sum(), backend="aot_eager"
        )
        for step in range(3):
            take(data(4, 3, seed=step + 10 * group.rank()))
        assert take.reason == ""
        optimizers.append(optimizer)
        assert not any(sizes(each)) or each is not ddp
    pairs = [[p for g in o.param_groups for p in g["params"]] for o in optimizers]
    for one, two in zip(*pairs, strict=True):
        torch.testing.assert_close(one, two)
    group.shutdown()


@needs_shm
def test_it_works_over_shared_memory_and_in_compiled_steps() -> None:
    spawn_ranks(2, in_processes)  # they compile, one after the other
