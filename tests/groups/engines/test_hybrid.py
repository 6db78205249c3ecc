"""Ranks on two hosts, some of which share one. The hosts are network namespaces (netns.py)."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

from paceline import DistributedDataParallel
from paceline.errors import (
    CollectiveTimeoutError,
    DisagreementError,
    EngineUnavailableError,
    GroupClosedError,
    GroupError,
    MismatchError,
    PeerDiedError,
    PeerLeftError,
)
from paceline.groups import Group
from paceline.groups.engines.hybrid import faults
from paceline.groups.engines.hybrid.collectives import STRIPED_FROM, WINDOW
from paceline.groups.engines.hybrid.hosts import Hosts
from paceline.testing import Meeting, spawn_ranks
from tests.groups import netns, reference
from tests.groups.descriptors import open_files, still_open
from tests.groups.test_unequal_ranks import check_means
from tests.groups.test_what_is_given import (
    SWAPPED,
    change_lists,
    keep_graphs,
    move_conjugates,
    refuse_other_sizes,
    scale_halves,
)

TWO_AND_TWO, INTERLEAVED, ONE_AND_TWO, ONE_EACH = (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1), (0, 1)
TOGETHER = (0, 0)
MEBI = 1 << 20
SOON = 30.0  # seconds: far less than any timeout here
TELLING = 30.0  # seconds to tell of a fault before the others are freed, also on a busy machine

Where = tuple[int, ...]
Pair = tuple[netns.Host, netns.Host]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pair]:
    if why := netns.unable():
        pytest.skip(f"two hosts are needed: {why}")
    with netns.two_hosts() as pair:
        yield pair


@pytest.fixture
def slow_hosts() -> Iterator[Pair]:
    if why := netns.unable(200):
        pytest.skip(f"two hosts with a slow cable are needed: {why}")
    with netns.two_hosts(200) as pair:
        yield pair


def on_hosts(
    hosts: Pair,
    where: Where,
    fn: Callable[..., object],
    *args: object,
    may_die: Collection[int] = (),
    **options: object,
) -> list:
    """Run ``fn(group, *args)`` with rank r on ``hosts[where[r]]`` and return what each returned."""
    options = {"backend": "hybrid", "timeout": timedelta(minutes=1)} | options
    return spawn_ranks(len(where), _in_group, hosts, where, fn, args, options, may_die=may_die)


def _in_group(meeting: Meeting, hosts: Pair, where: Where, fn, args, options) -> object:
    hosts[where[meeting.rank]].enter()
    faults._SECONDS = TELLING
    with meeting.new_group(**options) as group:
        return fn(group, *args)


# -- hosts ------------------------------------------------------------------------------------


def _components(group: Group) -> list[list[int]]:
    return group._engine._hosts.components


@pytest.mark.parametrize(
    ("where", "components"),
    [
        (TWO_AND_TWO, [[0, 1], [2, 3]]),
        (INTERLEAVED, [[0, 2], [1, 3]]),
        (ONE_AND_TWO, [[0], [1, 2]]),
    ],
)
def test_ranks_are_found_to_share_a_host_or_not(
    hosts: Pair, where: Where, components: list[list[int]]
) -> None:
    assert on_hosts(hosts, where, _components) == [components] * len(where)


def _backend(group: Group) -> str:
    group.barrier()  # gloo fails on a rank that still connects to one that has left
    return group.backend


@pytest.mark.parametrize(
    ("where", "backend"),
    [(ONE_AND_TWO, "hybrid"), (ONE_EACH, "gloo"), (TOGETHER, "shm")],
)
def test_auto_picks_the_engine_that_fits_the_hosts(hosts: Pair, where: Where, backend: str) -> None:
    assert on_hosts(hosts, where, _backend, backend="auto") == [backend] * len(where)


def _trained(group: Group) -> list[torch.Tensor]:
    """Gradients after three steps, in buckets small enough that there are several."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ddp.zero_grad()
        whole = torch.randn(group.size(), 5, 8, generator=generator)
        with ddp.samples(5 + group.rank()):  # all weights differ; the mean must know
            ddp(whole[group.rank()]).square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    weights = [5 + rank for rank in range(group.size())]
    for weight, part in zip(weights, whole, strict=True):
        (model(part).square().mean() * (weight / sum(weights))).backward()
    for grad, p in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad)
    return grads


@pytest.mark.parametrize("where", [INTERLEAVED, ONE_AND_TWO])
def test_a_wrapped_model_is_averaged_over_hosts(hosts: Pair, where: Where) -> None:
    first, *others = on_hosts(hosts, where, _trained)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_a_rank_knows_its_place_among_the_hosts() -> None:
    hosts = Hosts([[0, 3], [1], [2, 4]], rank=3)
    assert (hosts.host, hosts.place, hosts.here) == (0, 1, [0, 3])
    assert hosts.elsewhere == [1, 2, 4]
    assert hosts.order == [0, 3, 1, 2, 4]
    assert not hosts.equal
    assert hosts.stripe(0) == [0, 1, 2]
    assert list(hosts.places) == [0, 1, 2, 3, 4]


# -- collectives ------------------------------------------------------------------------------


def _every_collective(group: Group, only: Sequence[str]) -> None:
    reference.check_all_collectives(group, only=only)


HIERARCHICAL = ("all_reduce", "reduce", "all_gather_single", "uneven_reduce_scatter", "broadcast")


@pytest.mark.parametrize(
    ("where", "striped", "only"),
    [
        (INTERLEAVED, True, ()),
        pytest.param(TWO_AND_TWO, False, HIERARCHICAL, marks=pytest.mark.slow),
        (ONE_AND_TWO, None, (*HIERARCHICAL, "uneven_all_gather", "uneven_gather", "transfers")),
        (TOGETHER, None, ("all_reduce", "transfers", "many_in_flight")),
    ],
)
def test_every_collective_gives_what_it_must(
    hosts: Pair, where: Where, striped: bool | None, only: Sequence[str]
) -> None:
    on_hosts(hosts, where, _every_collective, only, striped=striped)


SIZES = [1, 3, 1000, STRIPED_FROM // 4 + 1, WINDOW // 4 + 1]  # elements


def _large_and_small(group: Group) -> list[bytes]:
    results = []
    for n in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(group.rank() + n)
            tensor = group.allocate(n, dtype).copy_(torch.randn(n))
            inputs = _all_of(group, tensor)
            group.all_reduce(tensor, ReduceOp.AVG)
            mean = inputs.double().mean(0).to(dtype)
            close = 2e-2 if dtype is torch.bfloat16 else 1e-5
            assert torch.allclose(tensor, mean, rtol=close, atol=close), (n, dtype)
            results.append(hashlib.sha256(tensor.view(torch.uint8).numpy()).digest())
    return results


def _all_of(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(group.size() * tensor.numel(), dtype=tensor.dtype)
    group.all_gather_single(whole, tensor)
    return whole.view(group.size(), -1)


@pytest.mark.parametrize("striped", [True, False, None])
def test_averages_of_any_size_are_right_and_have_the_same_bits_everywhere(
    hosts: Pair, striped: bool | None
) -> None:
    first, *others = on_hosts(hosts, INTERLEAVED, _large_and_small, striped=striped)
    assert others == [first] * 3


def _large_moves(group: Group) -> None:
    n, rank, size = MEBI + 1, group.rank(), group.size()
    parts = [torch.full((n + r,), float(r)) for r in range(size)]
    for root in range(size):
        tensor = parts[rank][:n].clone()
        group.broadcast(tensor, root)
        assert (tensor == root).all()
        tensor = parts[rank][:n].clone()
        group.reduce(tensor, root, ReduceOp.MAX)
        assert (tensor == (size - 1 if rank == root else rank)).all()
    outputs = [torch.empty_like(part) for part in parts]
    group.all_gather(outputs, parts[rank])
    assert all(torch.equal(a, b) for a, b in zip(outputs, parts, strict=True))
    result = torch.empty_like(parts[rank])
    group.reduce_scatter(result, parts)
    assert torch.equal(result, parts[rank] * size)


@pytest.mark.parametrize("where", [INTERLEAVED, ONE_AND_TWO])
def test_large_tensors_are_moved_whole(hosts: Pair, where: Where) -> None:
    on_hosts(hosts, where, _large_moves)


def _extremes(group: Group) -> None:
    tensor = torch.tensor([float("nan") if group.rank() == 1 else 1.0, float(group.rank())])
    group.all_reduce(tensor, ReduceOp.MAX)
    assert tensor[0].isnan()
    assert tensor[1] == group.size() - 1
    truth = torch.tensor([True, group.rank() == 0])
    group.all_reduce(truth)
    assert truth.view(torch.uint8).tolist() == [1, 1]


def test_a_nan_wins_and_a_truth_value_stays_one(hosts: Pair) -> None:
    on_hosts(hosts, TWO_AND_TWO, _extremes)


# -- what crosses the cable -------------------------------------------------------------------


def _traffic(group: Group, hosts: Pair, where: Where, numel: int) -> dict[str, int]:
    host, rank, size = hosts[where[group.rank()]], group.rank(), group.size()
    flat = torch.full((numel,), float(rank))
    wide = torch.empty(numel * size)
    sent = {}

    def measure(name: str, call: Callable[[], object]) -> None:
        group.barrier()
        before = host.sent()
        call()
        group.barrier()
        sent[name] = host.sent() - before

    measure("all_reduce", lambda: group.all_reduce(flat))
    assert (flat == sum(range(size))).all()
    measure("broadcast", lambda: group.broadcast(flat, 0))
    measure("all_gather", lambda: group.all_gather_single(wide, flat))
    measure("reduce_scatter", lambda: group.reduce_scatter_single(flat, wide))
    assert (flat == sum(range(size)) * size).all()
    return sent


@pytest.mark.parametrize("striped", [True, False])
def test_a_slow_cable_carries_each_byte_once(slow_hosts: Pair, striped: bool) -> None:
    numel = MEBI // 4
    ranks = on_hosts(
        slow_hosts, TWO_AND_TWO, _traffic, slow_hosts, TWO_AND_TWO, numel, striped=striped
    )
    # In units of the tensor, sent by the first host, of two with two ranks each.
    for name, promised in {
        "all_reduce": 1.0,  # half of it to be added there, half of it added here
        "broadcast": 1.0,
        "all_gather": 2.0,  # its two ranks' tensors
        "reduce_scatter": 2.0,  # the half of four parts that the other host keeps
    }.items():
        units = ranks[0][name] / (4 * numel)
        assert promised <= units < 1.15 * promised + 0.05, (name, units)
    assert ranks[2]["broadcast"] < MEBI / 20


# -- calls that differ ------------------------------------------------------------------------


def _differing(group: Group) -> list[MismatchError]:
    rank, size = group.rank(), group.size()
    last = rank == size - 1
    calls: list[Callable[[], object]] = [
        lambda: group.all_reduce(torch.ones(5 if last else 4)),
        lambda: group.all_reduce(torch.ones(4, dtype=torch.float64 if last else torch.float32)),
        lambda: group.all_reduce(torch.ones(4), ReduceOp.MAX if last else ReduceOp.SUM),
        lambda: group.broadcast(torch.ones(4), 1 if last else 0),
        lambda: group.barrier() if last else group.all_reduce(torch.ones(4)),
        lambda: group.all_gather(
            [torch.ones(r + (last and r == 0)) for r in range(size)], torch.ones(rank)
        ),
        lambda: group.gather(
            list(torch.ones(size, 3)) if rank == 0 else None, torch.ones(4 if last else 3), 0
        ),
        lambda: (
            group.all_to_all(list(torch.ones(size, 2)), list(torch.ones(size, 2)))
            if not last
            else group.all_to_all(list(torch.ones(size, 3)), list(torch.ones(size, 3)))
        ),
    ]
    errors = []
    for call in calls:
        with pytest.raises(MismatchError) as caught:
            call()
        errors.append(caught.value)
        tensor = torch.ones(2)
        group.all_reduce(tensor)  # the group is as good as before
        assert (tensor == size).all()
    return errors


@pytest.mark.parametrize("where", [INTERLEAVED, ONE_AND_TWO])
def test_calls_that_differ_are_named_on_every_rank(hosts: Pair, where: Where) -> None:
    ranks = on_hosts(hosts, where, _differing)
    last = len(where) - 1
    for errors in zip(*ranks, strict=True):
        assert [e.rank for e in errors] == list(range(len(where)))
        assert len({(e.rank_a, e.call_a, e.rank_b, e.call_b) for e in errors}) == 1
        assert last in (errors[0].rank_a, errors[0].rank_b)
    assert ranks[0][0].call_b == "all_reduce(5 x torch.float32, SUM)"
    assert ranks[0][4].call_b == "barrier()"


def _misfit(group: Group) -> MismatchError | None:
    if group.rank() == 0:
        group.send(torch.ones(5), 3)
        group.send(torch.ones(4), 3)
    if group.rank() == 3:
        with pytest.raises(MismatchError) as caught:
            group.recv(torch.ones(4), 0)
        tensor = torch.zeros(4)
        group.recv(tensor)
        assert (tensor == 1).all()
        return caught.value
    return None


def test_a_message_that_does_not_fit_is_refused_and_the_next_one_arrives(hosts: Pair) -> None:
    error = on_hosts(hosts, TWO_AND_TWO, _misfit)[3]
    assert (error.rank_a, error.rank_b) == (0, 3)
    assert error.call_a == "send(20 bytes of torch.float32)"


def _open_with(meeting: Meeting, hosts: Pair) -> dict[int, str]:
    hosts[meeting.rank % 2].enter()
    with pytest.raises(DisagreementError) as caught:
        meeting.new_group("hybrid", timeout=timedelta(minutes=1), striped=meeting.rank == 0)
    assert caught.value.what == "striped="
    return dict(caught.value.values)


def test_ranks_must_agree_on_the_options(hosts: Pair) -> None:
    assert spawn_ranks(3, _open_with, hosts) == [{0: "True", 1: "False", 2: "False"}] * 3


def test_a_mean_of_integers_does_not_overflow_over_several_hosts(hosts: Pair) -> None:
    on_hosts(hosts, TWO_AND_TWO, check_means)


@pytest.mark.parametrize("where", [TWO_AND_TWO, ONE_AND_TWO])
def test_a_collective_over_several_hosts_is_no_step_of_autograd(hosts: Pair, where: Where) -> None:
    on_hosts(hosts, where, keep_graphs, (1, SWAPPED, MEBI))


@pytest.mark.parametrize("check", [refuse_other_sizes, move_conjugates, change_lists, scale_halves])
def test_tensors_and_lists_are_taken_as_they_are_given(
    hosts: Pair, check: Callable[[Group], None]
) -> None:
    on_hosts(hosts, ONE_EACH, check)


# -- ranks that are lost ----------------------------------------------------------------------


def _lose(group: Group, victim: int, numel: int) -> tuple[GroupError, float] | None:
    group.all_reduce(torch.ones(numel))
    if group.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(GroupError) as caught:
        for _ in range(1000):
            group.all_reduce(torch.ones(numel))
    took = time.monotonic() - start
    with pytest.raises(GroupClosedError):
        group.barrier()
    return caught.value, took


@pytest.mark.parametrize(
    ("where", "victim"), [(TWO_AND_TWO, 1), (TWO_AND_TWO, 2), (ONE_AND_TWO, 0), (ONE_AND_TWO, 2)]
)
@pytest.mark.parametrize("numel", [10, MEBI])
def test_all_others_learn_that_a_rank_was_killed(
    hosts: Pair, where: Where, victim: int, numel: int
) -> None:
    results = on_hosts(hosts, where, _lose, victim, numel, may_die=[victim])
    for rank, result in enumerate(results):
        if rank != victim:
            error, took = result
            assert isinstance(error, PeerDiedError), error
            assert victim in error.ranks
            assert took < SOON


def _stay_away(group: Group) -> GroupError | None:
    group.barrier()
    if group.rank() == 3:
        # Comes when all the others have given up.
        group.store.wait([f"gave up/{r}" for r in range(3)], timedelta(seconds=60))
        with pytest.raises(GroupError):
            group.barrier()
        return None
    with pytest.raises(GroupError) as caught:
        group.all_reduce(torch.ones(3), timeout=3.0)
    group.store.set(f"gave up/{group.rank()}", "")
    return caught.value


def test_a_rank_that_stays_away_is_named(hosts: Pair) -> None:
    *errors, _ = on_hosts(hosts, INTERLEAVED, _stay_away)
    for error in errors:
        assert isinstance(error, CollectiveTimeoutError), error
        assert list(error.ranks) == [3]


def _wait_long_beside_others(group: Group) -> GroupError | None:
    """Rank 1, which shares a host with the missing rank, gives up after the others."""
    group.barrier()
    if group.rank() == 3:
        group.store.wait([f"gave up/{r}" for r in range(3)], timedelta(seconds=60))
        return None
    with pytest.raises(GroupError) as caught:
        group.all_reduce(torch.ones(3), timeout=4.0 if group.rank() == 1 else 3.0)
    group.store.set(f"gave up/{group.rank()}", "")
    return caught.value


def test_the_missing_rank_is_named_though_those_who_give_up_do_not_wait_for_it_themselves(
    hosts: Pair,
) -> None:
    """As on a busy machine, where whoever waits for it directly may be the last to give up."""
    *errors, _ = on_hosts(hosts, INTERLEAVED, _wait_long_beside_others)
    for error in errors:
        assert isinstance(error, CollectiveTimeoutError), error
        assert list(error.ranks) == [3]


def _abort(group: Group) -> GroupError | None:
    if group.rank() == 1:
        group.abort()
        return None
    with pytest.raises(GroupError) as caught:
        group.barrier()
    return caught.value


def test_an_abort_frees_the_ranks_of_all_hosts(hosts: Pair) -> None:
    errors = on_hosts(hosts, TWO_AND_TWO, _abort, timeout=timedelta(seconds=120))
    for error in (errors[0], errors[2], errors[3]):
        assert isinstance(error, PeerLeftError)
        assert list(error.ranks) == [1]
        assert error.aborted


def _descriptors(meeting: Meeting, hosts: Pair) -> int:
    hosts[meeting.rank % 2].enter()

    def use() -> int:
        with meeting.new_group("hybrid", timeout=timedelta(minutes=1)) as group:
            group.all_reduce(torch.ones(3))
        del group
        gc.collect()
        return open_files()

    first = use()
    for _ in range(3):
        use()
    return still_open(first)


def test_a_group_leaves_no_descriptors_behind(hosts: Pair) -> None:
    assert spawn_ranks(3, _descriptors, hosts) == [0, 0, 0]


# -- where it cannot be used ------------------------------------------------------------------


def _open_for_gpus(meeting: Meeting) -> str:
    with pytest.raises(EngineUnavailableError) as caught:
        meeting.new_group("hybrid", between="nccl")
    return caught.value.reason


def test_gpus_are_refused_with_a_reason() -> None:
    assert spawn_ranks(1, _open_for_gpus) == ["nccl moves GPU tensors, not those on cpu"]
