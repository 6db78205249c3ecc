"""Each rank keeps its stretch of the averages: ``ddp.scatter_gradients()``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import paceline
from paceline import DistributedDataParallel as DDP
from paceline._reducer import Stretch
from paceline.errors import ModuleStateError, ScatterError
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import watch
from tests.ddp.toys import TINY, Branches, data, grads, mean_grads, stack


def loss(model: Any, rank: int, step: int = 0) -> Tensor:
    return model(data(3, 3, seed=10 * step + rank)).square().mean()


def wrapped(group: Group, **options: Any) -> DDP:
    return DDP(stack(3, 5, 4), process_group=group, bucket_cap_mb=TINY, **options)


def whole(group: Group, stretches: tuple[Stretch, ...], model: nn.Module) -> dict[str, Tensor]:
    """The ranks' stretches put together again, by name."""
    names = {p: name for name, p in model.named_parameters()}
    found = {}
    for stretch in stretches:
        assert stretch.grad is not None
        flat = torch.empty(stretch.numel, dtype=stretch.grad.dtype)
        group.all_gather_single(flat, stretch.grad.clone())
        at = 0
        for p in stretch.params:
            found[names[p]] = flat[at : at + p.numel()].view(p.shape).clone()
            at += p.numel()
        assert not flat[at:].any(), "what fills a bucket up stays zero"
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_stretches_of_all_ranks_are_the_average(ranks: int) -> None:
    def one_rank(group: Group) -> list[dict[str, Tensor]]:
        ddp = wrapped(group)
        sharded, found = ddp.scatter_gradients(), []
        for step in range(3):
            loss(ddp, group.rank(), step).backward()
            assert all(p.grad is None for p in ddp.parameters())
            found.append(whole(group, sharded.stretches, ddp.module))
            sharded.clear()
        return found

    for found in run_ranks(ranks, one_rank):
        for step, gradients in enumerate(found):
            expected = mean_grads(stack(3, 5, 4), ranks, lambda m, r, s=step: loss(m, r, s))
            assert_close(gradients, expected)


def test_stretches_are_equal_and_cover_each_bucket() -> None:
    def one_rank(group: Group) -> list[tuple[int, int, int]]:
        stretches = wrapped(group).scatter_gradients().stretches
        return [(s.numel, s.start, s.stop) for s in stretches]

    first, second, third = run_ranks(3, one_rank)
    assert len(first) > 1
    for (n, a, b), (_, c, d), (_, e, f) in zip(first, second, third, strict=True):
        assert (a, b, d, f) == (0, c, e, n)
        assert b - a == d - c == f - e


def test_what_was_not_cleared_is_added_to() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = wrapped(group)
        sharded = ddp.scatter_gradients()
        for step in range(3):
            loss(ddp, group.rank(), step).backward()
        return whole(group, sharded.stretches, ddp.module)

    expected = mean_grads(stack(3, 5, 4), 2, lambda m, r: sum(loss(m, r, s) for s in range(3)))
    for found in run_ranks(2, one_rank):
        assert_close(found, expected)


@pytest.mark.parametrize("clear", ["ddp", "stretches"])
def test_cleared_gradients_are_forgotten(clear: str) -> None:
    def one_rank(group: Group) -> list[Any]:
        ddp = wrapped(group)
        sharded = ddp.scatter_gradients()
        loss(ddp, group.rank()).backward()
        ddp.zero_grad() if clear == "ddp" else sharded.clear()
        return [stretch.grad for stretch in sharded.stretches]

    assert all(grad is None for found in run_ranks(2, one_rank) for grad in found)


def test_gradients_gathered_in_no_sync_are_scattered_with_the_next() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = wrapped(group)
        sharded = ddp.scatter_gradients()
        with ddp.no_sync():
            loss(ddp, group.rank(), 0).backward()
        assert all(stretch.grad is None for stretch in sharded.stretches)
        loss(ddp, group.rank(), 1).backward()
        return whole(group, sharded.stretches, ddp.module)

    expected = mean_grads(stack(3, 5, 4), 2, lambda m, r: loss(m, r, 0) + loss(m, r, 1))
    for found in run_ranks(2, one_rank):
        assert_close(found, expected)


def test_weights_make_the_mean_over_all_samples() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = wrapped(group)
        sharded = ddp.scatter_gradients()
        for step in range(2):
            sharded.clear()
            with ddp.samples(1 + 2 * group.rank()):
                loss(ddp, group.rank(), step).backward()
        return whole(group, sharded.stretches, ddp.module)

    single = stack(3, 5, 4)
    (loss(single, 0, 1) / 4 + loss(single, 1, 1) * 3 / 4).backward()
    for found in run_ranks(2, one_rank):
        assert_close(found, grads(single))


def test_a_rank_that_has_run_out_still_gets_its_stretch() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = wrapped(group)
        sharded = ddp.scatter_gradients()
        with ddp.join():
            for step in range(1 + group.rank()):
                sharded.clear()
                loss(ddp, group.rank(), step).backward()
        return whole(group, sharded.stretches, ddp.module)

    single = stack(3, 5, 4)
    (loss(single, 1, 1) / 2).backward()  # torch's rule: divided by the initial number of ranks
    zero, one = run_ranks(2, one_rank)
    assert_close(zero, one)
    found = {n: g for n, g in one.items() if g.any()}
    assert found.keys() == grads(single).keys()


def test_what_comes_late_is_scattered_too() -> None:
    def one_rank(group: Group) -> list[dict[str, Tensor]]:
        ddp = DDP(Branches(), process_group=group, bucket_cap_mb=TINY)
        sharded, found = ddp.scatter_gradients(), []
        for step in range(4):
            sharded.clear()
            chosen = (0, 1, 2) if step % 2 else (2, 0, 1)
            ddp(data(2, 3, seed=group.rank()), chosen).square().sum().backward()
            found.append(whole(group, sharded.stretches, ddp.module))
        return found

    for found in run_ranks(2, one_rank):
        for step, gradients in enumerate(found):
            chosen = (0, 1, 2) if step % 2 else (2, 0, 1)

            def local_loss(model: Any, rank: int, chosen: Any = chosen) -> Tensor:
                return model(data(2, 3, seed=rank), chosen).square().sum()

            assert_close(gradients, mean_grads(Branches(), 2, local_loss))


def test_parameters_that_no_rank_reached_are_told_from_those_with_a_mean_of_zero() -> None:
    def one_rank(group: Group) -> list[tuple[bool, set[str]]]:
        ddp = DDP(Branches(), process_group=group)
        sharded, found = ddp.scatter_gradients(), []
        names = {p: name for name, p in ddp.module.named_parameters()}
        for chosen in ((0, 1, 2), (0,), ()):
            sharded.clear()
            (ddp(data(2, 3), chosen) * 0).sum().backward()
            (stretch,) = sharded.stretches
            reached = {names[stretch.params[slot]] for slot in stretch.touched}
            found.append((stretch.grad is not None, reached))
        return found

    for every, some, least in run_ranks(2, one_rank):
        assert every == (True, {name for name, _ in Branches().named_parameters()})
        assert some == (True, {"first.weight", "first.bias", "others.0.weight", "others.0.bias"})
        assert least == (True, {"first.weight", "first.bias"})


def test_a_hook_may_average_what_is_then_cut() -> None:
    def mean(group, bucket):  # type: ignore[no-untyped-def]
        group.all_reduce(bucket.buffer(), paceline.ReduceOp.AVG)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = wrapped(group)
        ddp.register_comm_hook(group, mean)
        sharded = ddp.scatter_gradients()
        loss(ddp, group.rank()).backward()
        return whole(group, sharded.stretches, ddp.module)

    expected = mean_grads(stack(3, 5, 4), 2, loss)
    for found in run_ranks(2, one_rank):
        assert_close(found, expected)


def test_half_the_bytes_of_an_average_are_sent() -> None:
    def one_rank(group: Group) -> tuple[float, float]:
        sent = []
        for stretch in (False, True):
            ddp = DDP(stack(30, 50, 40), process_group=group)
            if stretch:
                ddp.scatter_gradients()
            for step in range(2):
                group.traffic.reset()
                ddp(data(3, 30, seed=step)).square().mean().backward()
            sent.append(group.traffic.bytes_sent)
        return sent[0], sent[1]

    for averaged, scattered in run_ranks(2, one_rank):
        assert scattered < 0.52 * averaged


def test_sparse_gradients_are_refused_by_name() -> None:
    def one_rank(group: Group) -> list[str]:
        model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
        ddp = DDP(model, process_group=group)
        with pytest.raises(ScatterError) as caught:
            ddp.scatter_gradients()
        return list(caught.value.parameters)

    assert run_ranks(2, one_rank) == [["0.weight"]] * 2


def test_freezing_a_parameter_is_refused() -> None:
    def one_rank(group: Group) -> None:
        ddp = wrapped(group)
        ddp.scatter_gradients()
        next(ddp.parameters()).requires_grad_(False)
        with pytest.raises(ModuleStateError, match="frozen"):
            ddp(data(3, 3))

    run_ranks(2, one_rank)


def over_processes(meeting: Meeting, backend: str) -> tuple[dict[str, Tensor], list[str]]:
    if backend == "torch":
        dist.init_process_group(
            "gloo", store=meeting.store(), rank=meeting.rank, world_size=meeting.size
        )
        group = Group.wrap(dist.group.WORLD)
        ddp = DDP(stack(3, 5, 4), bucket_cap_mb=TINY)
    else:
        group = meeting.new_group(backend)
        ddp = wrapped(group)
    sharded = ddp.scatter_gradients()
    for step in range(2):
        sharded.clear()
        seen = watch(ddp.replica.group)
        loss(ddp, meeting.rank, step).backward()
    kinds = sorted({kind for kind, _ in seen})
    found = whole(group, sharded.stretches, ddp.module)
    dist.destroy_process_group() if backend == "torch" else group.shutdown()
    return found, kinds


@pytest.mark.parametrize("backend", ["shm", "gloo", "torch"])
def test_processes_get_the_same(backend: str) -> None:
    expected = mean_grads(stack(3, 5, 4), 2, lambda m, r: loss(m, r, 1))
    for found, kinds in spawn_ranks(2, over_processes, backend):
        assert_close(found, expected)
        assert kinds == ["all_reduce", "reduce_scatter_single"]
