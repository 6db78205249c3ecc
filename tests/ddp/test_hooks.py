"""Communication hooks: torch's interface, torch's own hooks, and hooks that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.futures import Future
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline.errors import CommHookError
from paceline.groups import Group
from paceline.testing import Meeting, hold_on_cue, run_ranks, spawn_ranks
from tests.ddp.toys import (
    TINY,
    Branches,
    Grads,
    assert_same,
    count_calls,
    data,
    grads,
    mean_grads,
    stack,
)


def batch(rank: int) -> Tensor:
    return data(4, 3, seed=rank)


def loss(model: Any, rank: int) -> Tensor:
    return model(batch(rank)).square().sum()


EXPECTED = mean_grads(Branches(), 2, loss)

# Hooks carry no annotations here: what they may say is checked at the end.


def average(group, bucket):
    """The plainest hook there is."""
    work = group.all_reduce(bucket.buffer().div_(group.size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def done(tensor: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(tensor)
    return future


def train(hook: Any, *, steps: int = 3, cap: float | None = TINY, **options: Any) -> list[Grads]:
    """The gradients after each of the ranks' last steps with ``hook(group, bucket)``."""

    def one_rank(group: Group) -> Grads:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=cap, **options)
        ddp.register_comm_hook(group, hook)
        for _ in range(steps):
            ddp.zero_grad()
            loss(ddp, group.rank()).backward()
        return grads(ddp)

    return run_ranks(2, one_rank)


# What a hook is given, and what becomes of its result.


@pytest.mark.parametrize("views", [None, False])
def test_a_hooks_results_become_the_gradients(views: bool | None) -> None:
    for found in train(average, gradient_as_bucket_view=views):
        assert_same(found, EXPECTED)


def test_gradients_come_undivided_and_in_the_order_of_the_buckets() -> None:
    seen: dict[int, list[tuple[int, bool, int]]] = {0: [], 1: []}

    def hook(group, bucket):
        buffer, parts, params = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert buffer.dim() == 1
        assert buffer.numel() == sum(p.numel() for p in params)
        assert [g.shape for g in parts] == [p.shape for p in params]
        assert torch.equal(torch.cat([g.flatten() for g in parts]), buffer)
        seen[group.rank()].append((bucket.index(), bucket.is_last(), len(params)))
        return average(group, bucket)

    train(hook, steps=2)
    assert seen[0] == seen[1]
    passes = [seen[0][:1], seen[0][1:]]  # one bucket until the order is known
    for run in passes:
        assert [index for index, _, _ in run] == list(range(len(run)))
        assert [last for _, last, _ in run] == [False] * (len(run) - 1) + [True]
        assert sum(count for _, _, count in run) == 8


def test_gradients_are_this_ranks_own() -> None:
    own = [mean_grads(Branches(), 1, lambda m, _, rank=rank: loss(m, rank)) for rank in range(2)]

    def hook(group, bucket):
        total = sum(gradient.sum() for gradient in bucket.gradients())
        assert_close(total, sum(gradient.sum() for gradient in own[group.rank()].values()))
        return average(group, bucket)

    train(hook, steps=1, cap=None)


def test_futures_may_be_chained() -> None:
    def hook(group, bucket):
        work = group.all_reduce(bucket.buffer(), async_op=True)
        first = work.get_future().then(lambda f: f.value()[0])
        return first.then(lambda f: f.value() / group.size()).then(lambda f: f.value())

    for found in train(hook):
        assert_same(found, EXPECTED)


def test_set_buffer_changes_what_the_next_hook_sees() -> None:
    def hook(group, bucket):
        bucket.set_buffer(bucket.buffer() * 2)
        assert_close(
            bucket.gradients()[0].flatten(), bucket.buffer()[: bucket.gradients()[0].numel()]
        )
        return average(group, bucket).then(lambda f: f.value() / 2)

    for found in train(hook):
        assert_same(found, EXPECTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_of_another_dtype_is_converted(dtype: torch.dtype) -> None:
    def hook(group, bucket):
        return average(group, bucket).then(lambda f: f.value().to(dtype))

    for found in train(hook):
        assert_same(found, EXPECTED, rtol=0.02, atol=0.02)
        assert all(g.dtype == torch.float64 for g in found.values() if g is not None)


def test_a_result_in_a_list_is_taken_as_torch_does() -> None:
    def hook(group, bucket):
        return group.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()

    for found in train(hook):
        assert_same(found, EXPECTED)


def test_a_hook_that_talks_to_nobody_leaves_the_ranks_apart() -> None:
    for rank, found in enumerate(train(lambda group, bucket: done(bucket.buffer()))):
        assert_same(found, mean_grads(Branches(), 1, lambda m, _, rank=rank: loss(m, rank)))


def test_a_rank_alone_runs_its_hook_too() -> None:
    def one_rank(group: Group) -> Tensor:
        ddp = DDP(stack(3, 2), process_group=group)
        ddp.register_comm_hook(None, lambda state, bucket: done(bucket.buffer() * 10))
        ddp(batch(0)).sum().backward()
        return ddp.module[0].bias.grad

    assert_close(run_ranks(1, one_rank)[0], torch.full((2,), 40.0, dtype=torch.float64))


@pytest.mark.parametrize("cap", [None, TINY])
def test_parameters_that_are_not_used_come_as_zeros(cap: float | None) -> None:
    def one_rank(group: Group) -> Grads:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=cap)
        ddp.register_comm_hook(group, average)
        for _ in range(3):
            ddp.zero_grad()
            ddp(batch(group.rank()), (group.rank(),)).square().sum().backward()
        return grads(ddp)

    expected = mean_grads(Branches(), 2, lambda m, rank: m(batch(rank), (rank,)).square().sum())
    assert expected["others.2.weight"] is None
    for found in run_ranks(2, one_rank):
        assert_same(found, expected)


def test_hooks_go_with_gradient_accumulation() -> None:
    def one_rank(group: Group) -> tuple[Grads, int]:
        ddp = DDP(Branches(), process_group=group)
        ddp.register_comm_hook(group, average)
        for _ in range(2):
            ddp.zero_grad()
            calls = count_calls(group)
            for micro in range(3):
                with ddp.accumulate(3):
                    loss(ddp, 2 * micro + group.rank()).backward()
                    assert bool(calls) == (micro == 2)
        return grads(ddp), len(calls)

    expected = mean_grads(
        Branches(), 2, lambda m, rank: sum(loss(m, 2 * micro + rank) for micro in range(3))
    )
    for found, _ in run_ranks(2, one_rank):
        assert_same(found, expected)


def test_hooks_see_sparse_gradients() -> None:
    def hook(group, bucket):
        if not bucket.buffer().is_sparse:
            return average(group, bucket)
        (gradient,) = bucket.gradients()
        assert gradient.is_sparse
        work = group.all_reduce(gradient.coalesce() / group.size(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    def one_rank(group: Group) -> Tensor:
        table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
        ddp = DDP(nn.Sequential(table, stack(2, 2)), process_group=group)
        ddp.register_comm_hook(group, hook)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.tensor([group.rank(), 3])).sum().backward()
        return table.weight.grad.to_dense().any(1)

    for touched in run_ranks(2, one_rank):
        assert touched.tolist() == [True, True, False, True, False]


# torch's own hooks.


def power_state(group: Any) -> power.PowerSGDState:
    return power.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)


HOOKS: dict[str, tuple[Callable[[Any], Any], Any, float]] = {
    "allreduce": (lambda g: g, default_hooks.allreduce_hook, 1e-12),
    "fp16": (lambda g: g, default_hooks.fp16_compress_hook, 1e-2),
    "bf16": (lambda g: g, default_hooks.bf16_compress_hook, 5e-2),
    "fp16 wrapper": (
        lambda g: g,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        1e-2,
    ),
    "bf16 wrapper": (
        lambda g: g,
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
        5e-2,
    ),
    "post-local SGD": (
        lambda g: post_localSGD_hook.PostLocalSGDState(g, None, 100),
        post_localSGD_hook.post_localSGD_hook,
        1e-12,
    ),
}


def _train_with_torchs_hooks(meeting: Meeting, backend: str) -> dict[str, Grads]:
    dist.init_process_group("gloo")  # torch's hooks look the group up there
    group = dist.group.WORLD if backend == "stock gloo" else meeting.new_group(backend)
    found = {}
    for name, (state, hook, _) in HOOKS.items():
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        ddp.register_comm_hook(state(group), hook)
        for _ in range(3):
            ddp.zero_grad()
            loss(ddp, meeting.rank).backward()
        found[name] = grads(ddp)
    if backend != "stock gloo":
        group.shutdown()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("backend", ["stock gloo", "shm", "gloo"])
def test_torchs_hooks_average(backend: str) -> None:
    for results in spawn_ranks(2, _train_with_torchs_hooks, backend):
        for name, (_, _, tolerance) in HOOKS.items():
            assert_same(results[name], EXPECTED, rtol=tolerance, atol=tolerance)


def _train_with_power(meeting: Meeting, backend: str) -> list[Grads]:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    group = world if backend == "stock gloo" else meeting.new_group(backend)
    found = []
    for wrap, over in ((DDP, group), (nn.parallel.DistributedDataParallel, world)):
        ddp = wrap(Branches().float(), process_group=over)
        ddp.register_comm_hook(power_state(over), power.powerSGD_hook)
        for _ in range(5):
            ddp.zero_grad()
            ddp(batch(meeting.rank).float()).square().sum().backward()
        found.append(grads(ddp))
    if backend != "stock gloo":
        group.shutdown()
    _kept.append(world)
    dist.destroy_process_group()
    return found


# A group whose last holder is a callback of torch's hook ends on a thread of its own, which then
# waits for itself: gloo ends the process. So it is held until the process ends.
_kept: list[Any] = []


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch's hook asks for a GPU wherever there is one"
)
@pytest.mark.parametrize("backend", ["stock gloo", "gloo", "shm"])
def test_powersgd_gives_what_it_gives_under_torch(backend: str) -> None:
    for ours, theirs in spawn_ranks(2, _train_with_power, backend):
        assert_same(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_callback_may_wait_for_another_collective() -> None:
    def hook(group, bucket):
        def second(future):
            ones = torch.ones(1, dtype=torch.float64)
            counted = group.all_reduce(ones, async_op=True).get_future().wait()[0]
            return future.value()[0] / counted

        return group.all_reduce(bucket.buffer(), async_op=True).get_future().then(second)

    for found in train(hook, cap=None):
        assert_same(found, EXPECTED)


def test_torchs_hooks_run_on_threads() -> None:
    def one_rank(group: Group) -> Grads:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
        for _ in range(2):
            ddp.zero_grad()
            loss(ddp, group.rank()).backward()
        return grads(ddp)

    for found in run_ranks(2, one_rank):
        assert_same(found, EXPECTED, rtol=1e-2, atol=1e-2)


def test_the_noop_hook_leaves_gradients_as_they_are() -> None:
    for rank, found in enumerate(train(noop_hook)):
        assert_same(found, mean_grads(Branches(), 1, lambda m, _, rank=rank: loss(m, rank)))


def test_builtin_hooks_average() -> None:
    def one_rank(group: Group) -> list[Grads]:
        found = []
        for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
            ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
            ddp._register_builtin_comm_hook(kind)
            for _ in range(3):
                ddp.zero_grad()
                loss(ddp, group.rank()).backward()
            found.append(grads(ddp))
        return found

    for plain, compressed in run_ranks(2, one_rank):
        assert_same(plain, EXPECTED)
        assert_same(compressed, EXPECTED, rtol=1e-2, atol=1e-2)


# Hooks that are refused.


def refused(register: Callable[[DDP], object], kind: type[Exception], text: str) -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(stack(3, 2), process_group=group)
        with pytest.raises(kind, match=text):
            register(ddp)

    run_ranks(1, one_rank)


def test_a_hook_is_registered_once() -> None:
    def twice(ddp: DDP) -> None:
        ddp.register_comm_hook(None, average)
        ddp.register_comm_hook(None, average)

    def both_kinds(ddp: DDP) -> None:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        ddp.register_comm_hook(None, average)

    for register in (twice, both_kinds):
        refused(register, RuntimeError, "can only be called once")


def test_a_hook_is_registered_before_the_first_pass() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(Branches(), process_group=group)
        loss(ddp, group.rank()).backward()
        with pytest.raises(RuntimeError, match="before training loop starts"):
            ddp.register_comm_hook(None, average)

    run_ranks(2, one_rank)


def test_a_hook_must_be_callable() -> None:
    refused(lambda ddp: ddp.register_comm_hook(None, 1), TypeError, "must be callable")


def test_a_hook_may_say_what_it_takes_and_returns_but_not_falsely() -> None:
    def right(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    def wrong_result(state: object, bucket: dist.GradBucket) -> int:
        raise NotImplementedError

    for hook in (right, wrong_bucket, wrong_result):  # as without the __future__ import
        hook.__annotations__ = {k: eval(v) for k, v in hook.__annotations__.items()}
    refused(lambda d: d.register_comm_hook(None, wrong_bucket), ValueError, "bucket annotation")
    refused(lambda d: d.register_comm_hook(None, wrong_result), ValueError, "return annotation")

    def one_rank(group: Group) -> None:
        DDP(stack(3, 2), process_group=group).register_comm_hook(None, right)

    run_ranks(1, one_rank)


# Hooks that fail.

FAILURES: dict[str, tuple[Any, type[Exception], str]] = {}


def failure(kind: type[Exception], text: str) -> Callable[[Any], Any]:
    def note(hook: Any) -> Any:
        FAILURES[hook.__name__] = hook, kind, text
        return hook

    return note


@failure(CommHookError, "Future")
def no_future(group, bucket):
    return bucket.buffer()


@failure(ArithmeticError, "no luck")
def raises(group, bucket):
    raise ArithmeticError("no luck")


@failure(RuntimeError, "no luck")
def failed_future(group, bucket):
    future = Future()
    future.set_exception(RuntimeError("no luck"))
    return future


@failure(RuntimeError, "no luck")
def raises_in_then(group, bucket):
    def fail(_):
        raise RuntimeError("no luck")

    return average(group, bucket).then(fail)


@failure(CommHookError, "one tensor of")
def wrong_size(group, bucket):
    return done(torch.zeros(1))


@failure(CommHookError, "one tensor of")
def no_tensor(group, bucket):
    return done("nothing")


class Sometimes:
    """Averages, but in pass ``at`` does what it should not on ``ranks``; at its second bucket."""

    def __init__(self, hook: Any, at: int, ranks: tuple[int, ...]) -> None:
        self.hook, self.at, self.ranks = hook, at, ranks
        self.step = 0

    def __call__(self, group, bucket):
        now = self.step == self.at and group.rank() in self.ranks
        if now and (bucket.is_last() or bucket.index() == 1):
            return self.hook(group, bucket)
        return average(group, bucket)


def train_with_failures(
    hook: Any, at: int, ranks: tuple[int, ...]
) -> list[tuple[list[str], Grads]]:
    def one_rank(group: Group) -> tuple[list[str], Grads]:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        sometimes = Sometimes(hook, at, ranks)
        ddp.register_comm_hook(group, sometimes)
        seen = []
        for step in range(4):
            sometimes.step = step
            ddp.zero_grad()
            try:
                loss(ddp, group.rank()).backward()
            except (RuntimeError, ArithmeticError) as error:
                seen.append(f"{step} {type(error).__name__} {error}")
        return seen, grads(ddp)

    return run_ranks(2, one_rank)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", FAILURES)
def test_after_a_hook_failed_on_all_ranks_they_go_on(name: str, at: int) -> None:
    hook, kind, text = FAILURES[name]
    for seen, found in train_with_failures(hook, at, (0, 1)):
        assert len(seen) == 1
        assert seen[0].startswith(f"{at} {kind.__name__}")
        assert text in seen[0]
        assert_same(found, EXPECTED)


def test_a_failed_pass_ends_only_when_nothing_is_under_way() -> None:
    """Else what still arrives spoils the buckets of the next pass."""

    def one_rank(group: Group) -> None:
        works, failing = [], []

        def hook(state, bucket):
            if failing and bucket.index() == 0:
                return failed_future(group, bucket)
            works.append(group.all_reduce(bucket.buffer().div_(2), async_op=True))
            return works[-1].get_future().then(lambda future: future.value()[0])

        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        ddp.register_comm_hook(None, hook)
        for _ in range(2):
            loss(ddp, group.rank()).backward()
        failing.append(True)
        released = threading.Event()
        if group.rank() == 1:  # so that rank 0 has something to wait for
            hold_on_cue(group, released, operation="all_reduce")
            threading.Timer(0.2, released.set).start()
        with pytest.raises(RuntimeError, match="no luck"):
            loss(ddp, group.rank()).backward()
        assert all(work.is_completed() for work in works)

    run_ranks(2, one_rank)


@pytest.mark.parametrize("name", ["raises", "no_future", "failed_future"])
def test_a_hook_that_fails_on_one_rank_raises_on_every_rank(name: str) -> None:
    """It talks to nobody, so that only we could keep the others waiting."""
    failing, _, _ = FAILURES[name]

    def one_rank(group: Group) -> str:
        ddp = DDP(Branches(), process_group=group)
        ddp.register_comm_hook(
            group,
            lambda g, bucket: failing(g, bucket) if g.rank() == 1 else done(bucket.buffer()),
        )
        with pytest.raises((RuntimeError, ArithmeticError)) as caught:
            loss(ddp, group.rank()).backward()
        return type(caught.value).__name__

    assert run_ranks(2, one_rank)[0] == "PeerError"
