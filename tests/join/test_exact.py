"""Weighted ranks with uneven inputs against one process that has all samples; plain ones: torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel as StockDDP

from paceline import DistributedDataParallel as DDP
from paceline import Join
from paceline.ddp.mixed_precision import _MixedPrecision
from paceline.ddp.sync_batchnorm import SyncBatchNorm
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import data, fill, weights
from tests.join.test_protocol import Counter

EXACT = 1e-12
WIDE, NARROW = 4, 3

Sizes = Sequence[Sequence[int]]  # by rank and step

ranks = st.integers(1, 4)
PLAIN, BATCH_NORM, SYNCED = "plain", "batch norm", "sync batch norm"


def all_sizes(smallest: int = 0) -> st.SearchStrategy[Sizes]:
    one_rank = st.lists(st.integers(smallest, 9), max_size=7)
    return ranks.flatmap(lambda n: st.lists(one_rank, min_size=n, max_size=n))


def enough_to_normalize(sizes: Sizes) -> Sizes:
    """No step in which all ranks together have a single sample, which has no variance."""
    found = [list(row) for row in sizes]
    for step in range(max(map(len, found))):
        having = [row for row in found if len(row) > step]
        if sum(row[step] for row in having) == 1:
            having[0][step] += 1
    return found


def model_of(kind: str) -> nn.Sequential:
    norm: dict[str, Callable[[int], nn.Module]] = {
        PLAIN: lambda _: nn.Identity(),
        BATCH_NORM: nn.BatchNorm1d,
        SYNCED: SyncBatchNorm,  # without a group it is plain batch norm
    }
    make = norm[kind]
    layers = (nn.Linear(WIDE, 5), make(5), nn.Tanh(), nn.Linear(5, NARROW), make(NARROW))
    model = nn.Sequential(*layers, nn.Linear(NARROW, 1)).double()
    return fill(model)  # type: ignore[return-value]


def batches_of(sizes: Sizes) -> list[list[Tensor]]:
    return [
        [data(n, WIDE, seed=100 * rank + step) for step, n in enumerate(row)]
        for rank, row in enumerate(sizes)
    ]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over samples."""
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


@dataclass
class Trained:
    """The gradients of each update, and what is left in the end."""

    grads: list[list[Tensor]]
    weights: list[Tensor]
    buffers: list[Tensor]

    @classmethod
    def of(cls, model: nn.Module, grads: list[list[Tensor]]) -> Trained:
        buffers = [b.double() for b in model.buffers()]
        return cls(grads, [p.detach().clone() for p in model.parameters()], buffers)


def grads_of(model: nn.Module) -> list[Tensor]:
    """With zeros for none: a step without a single sample changes nothing."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor], error: float) -> None:
    """Relative to the largest number: what is zero but for rounding has no scale of its own."""
    scale = max((float(e.abs().max()) for e in expected if e.numel()), default=0.0)
    for f, e in zip(found, expected, strict=True):
        assert (f - e).abs().max() <= error * max(scale, 1e-3), (f, e)


def compare(found: Trained, expected: Trained, error: float = EXACT) -> None:
    assert len(found.grads) <= len(expected.grads)
    for mine, theirs in zip(found.grads, expected.grads, strict=False):
        assert_equal(mine, theirs, error)
    assert_equal(found.weights, expected.weights, error)
    assert_equal(found.buffers, expected.buffers, error)


# -- one process on the union -------------------------------------------------------------------


def train_alone(kind: str, batches: list[list[Tensor]], every: int = 1) -> Trained:
    """One process that has, in each step, the batches of all ranks; updates after ``every``."""
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = max(map(len, batches))
    grads = []
    for start in range(0, steps - steps % every, every):
        optimizer.zero_grad()
        window = range(start, start + every)
        total = sum(len(row[s]) for row in batches for s in window if s < len(row))
        for step in window:
            having = [row[step] for row in batches if step < len(row)]
            one_step(kind, model, having, total)
        optimizer.step()
        grads.append(grads_of(model))
    return Trained.of(model, grads)


def one_step(kind: str, model: nn.Module, parts: list[Tensor], total: int) -> None:
    if kind != BATCH_NORM:
        union = torch.cat(parts)
        if not len(union):  # nothing is learned; layers count that they were called
            for layer in model.modules():
                if isinstance(layer, SyncBatchNorm):
                    layer.num_batches_tracked.add_(1)
            return
        (loss_of(model, union) * (len(union) / total)).backward()
        return
    # Every rank normalizes by its own batch; the running statistics are those of the last one.
    before = copy.deepcopy(list(model.buffers()))
    for part in parts:
        for buffer, old in zip(model.buffers(), before, strict=True):
            buffer.data.copy_(old)
        (loss_of(model, part) * (len(part) / total)).backward()


# -- ranks --------------------------------------------------------------------------------------


def train_ranks(
    kind: str,
    sizes: Sizes,
    every: int = 1,
    hook: Any = None,
    **options: Any,
) -> list[Trained]:
    batches = batches_of(sizes)

    def one_rank(group: Group) -> Trained:
        model = model_of(kind)
        ddp = DDP(model, process_group=group, **options)
        if hook is not None:
            ddp.register_comm_hook(group, hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        grads = []
        with ddp.join():
            for x in batches[group.rank()]:
                with ddp.accumulate(every) as last, ddp.samples(len(x)):
                    loss_of(ddp, x).backward()
                if last:
                    optimizer.step()
                    grads.append(grads_of(model))
                    optimizer.zero_grad()
        return Trained.of(model, grads)

    return run_ranks(len(sizes), one_rank)


@pytest.mark.parametrize("kind", [PLAIN, SYNCED])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes=all_sizes())
def test_gradients_and_weights_are_those_of_one_process_on_the_union(
    kind: str, sizes: Sizes
) -> None:
    sizes = enough_to_normalize(sizes)
    expected = train_alone(kind, batches_of(sizes))
    for found in train_ranks(kind, sizes):
        compare(found, expected)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(sizes=all_sizes(smallest=2))
def test_batch_norm_without_sync_is_that_of_each_rank_and_all_else_exact(sizes: Sizes) -> None:
    expected = train_alone(BATCH_NORM, batches_of(sizes))
    for found in train_ranks(BATCH_NORM, sizes):
        compare(found, expected)


@pytest.mark.parametrize("kind", [PLAIN, SYNCED])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(sizes=all_sizes(), every=st.integers(2, 3))
def test_so_are_those_of_accumulated_passes_though_ranks_run_out_in_between(
    kind: str, sizes: Sizes, every: int
) -> None:
    sizes = enough_to_normalize(sizes)
    expected = train_alone(kind, batches_of(sizes), every)
    # The running statistics of an update that never came: no pass has made them alike.
    longest = max(map(len, sizes))
    expected.buffers = [] if longest % every else expected.buffers
    for found in train_ranks(kind, sizes, every):
        found.buffers = found.buffers if expected.buffers else []
        compare(found, expected)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(sizes=all_sizes())
def test_so_are_those_of_a_join_with_other_joinables(sizes: Sizes) -> None:
    sizes = enough_to_normalize(sizes)
    batches = batches_of(sizes)
    expected = train_alone(SYNCED, batches)

    def one_rank(group: Group) -> Trained:
        model = model_of(SYNCED)
        ddp, counter = DDP(model, process_group=group), Counter(group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        grads = []
        with Join([ddp, counter]):
            for x in batches[group.rank()]:
                with ddp.samples(len(x)):
                    loss_of(ddp, x).backward()
                optimizer.step()
                counter.step()
                grads.append(grads_of(model))
                optimizer.zero_grad()
        return Trained.of(model, grads)

    for found in run_ranks(len(sizes), one_rank):
        compare(found, expected)


# -- with less precision ------------------------------------------------------------------------

SOME: list[Sizes] = [[[3, 0, 2], [5], [], [1, 9, 4, 6]], [[2], [7, 7]], [[0, 4], [9, 0]]]


def halve(group, bucket):
    """Send half precision."""
    full = bucket.buffer()
    half = full.to(torch.float16).div_(group.size())
    work = group.all_reduce(half, async_op=True)
    return work.get_future().then(lambda future: full.copy_(future.value()[0]))


def sum_exactly(group, bucket):
    work = group.all_reduce(bucket.buffer().div_(group.size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize("sizes", SOME)
@pytest.mark.parametrize(("hook", "error"), [(halve, 5e-3), (sum_exactly, EXACT)])
def test_hooks_get_weighed_gradients(sizes: Sizes, hook: Any, error: float) -> None:
    expected = train_alone(SYNCED, batches_of(sizes))
    for found in train_ranks(SYNCED, sizes, hook=hook):
        compare(found, expected, error)


@pytest.mark.parametrize("sizes", SOME)
@pytest.mark.parametrize("reduce", [torch.bfloat16, torch.float32, None])
def test_mixed_precision_keeps_what_its_types_can(sizes: Sizes, reduce: torch.dtype | None) -> None:
    expected = train_alone(PLAIN, batches_of(sizes))
    policy = _MixedPrecision(param_dtype=torch.float32, reduce_dtype=reduce)
    error = 0.05 if reduce is torch.bfloat16 else 1e-5
    for found in train_ranks(PLAIN, sizes, mixed_precision=policy):
        compare(found, expected, error)


def test_large_weights_do_not_overflow_half_precision() -> None:
    def one_rank(group: Group) -> Tensor:
        policy = _MixedPrecision(reduce_dtype=torch.float16)
        ddp = DDP(model_of(PLAIN), process_group=group, mixed_precision=policy)
        with ddp.join():
            for step in range(3 + group.rank()):
                ddp.zero_grad()
                with ddp.samples(1e6 * (1 + group.rank())):
                    loss_of(ddp, data(4, WIDE, seed=10 * group.rank() + step)).backward()
        return torch.cat([g.flatten() for g in grads_of(ddp.module)])

    alone = model_of(PLAIN)
    loss_of(alone, data(4, WIDE, seed=13)).backward()
    expected = torch.cat([g.flatten() for g in grads_of(alone)])
    found = run_ranks(2, one_rank)[1]
    assert (found - expected).abs().max() < 5e-3 * expected.abs().max()


# -- plain ranks, as torch's Join has them ------------------------------------------------------

CASES: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "the higher rank goes on": ([[2, 3], [4, 2, 5, 3]], {}),
    "the lower rank goes on": ([[2, 3, 3, 4], [4]], {}),
    "none to begin with": ([[], [2, 3], [4, 2, 2]], {}),
    "by those that are left": ([[2], [2, 5], [3, 3, 4]], {"divide_by_initial_world_size": False}),
    "all alike": ([[2, 2], [3, 3]], {}),
}


def train_in_torchs_and_ours(
    meeting: Meeting, kind: str, case: str
) -> tuple[list[Tensor], list[Tensor]]:
    dist.init_process_group("gloo")
    sizes, keywords = CASES[case]
    mine = batches_of(sizes)[meeting.rank]
    found = []
    for wrapper, context in ((StockDDP, TorchJoin), (DDP, Join)):
        model = model_of(kind)
        ddp = wrapper(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with context([ddp], **keywords):
            for x in mine:
                optimizer.zero_grad()
                loss_of(ddp, x).backward()
                optimizer.step()
        found.append([*weights(model).values(), *(b.double() for b in model.buffers())])
    dist.destroy_process_group()
    return found[0], found[1]


@pytest.mark.parametrize("case", CASES)
def test_without_weights_it_is_what_torchs_join_gives(case: str) -> None:
    for theirs, ours in spawn_ranks(len(CASES[case][0]), train_in_torchs_and_ours, PLAIN, case):
        assert_equal(ours, theirs, EXACT)


def test_running_statistics_are_those_of_torch_where_the_last_rank_has_most() -> None:
    case = "the higher rank goes on"
    for theirs, ours in spawn_ranks(2, train_in_torchs_and_ours, BATCH_NORM, case):
        assert_equal(ours, theirs, EXACT)
