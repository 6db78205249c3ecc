"""Ranks whose surroundings differ: they settle it among themselves, or all of them say so."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch._dynamo  # the wrapper uses it; so ranks are forked with it
from torch import nn
from torch.distributed import Store

from paceline import DistributedDataParallel, Group, ReduceOp, new_group
from paceline._transport import clib
from paceline._transport.terms import PAGE, Terms, Wish, settle
from paceline.errors import (
    DisagreementError,
    OptionValueError,
    PacelineError,
    RankUnableError,
)
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.marks import needs_shm

from .reference import check_all_collectives

pytestmark = needs_shm

MINUTE = timedelta(minutes=1)


# -- the terms, which every rank computes -----------------------------------------------------


def test_ranks_settle_on_what_the_weakest_of_them_can_do() -> None:
    wishes = [Wish("a", 4, 9 * PAGE + 1, 0), Wish("a", 1, 5 * PAGE + 7, 0)]
    assert settle(wishes, 0) == settle(wishes, 1) == Terms(cores=1, heap=5 * PAGE, window=0)


@pytest.mark.parametrize("rank", [0, 2])
def test_what_cannot_be_settled_is_the_same_error_on_every_rank(rank: int) -> None:
    fine = Wish("a", 4, PAGE, 0)
    with pytest.raises(DisagreementError, match="a on ranks 0, 2; b on rank 1"):
        settle([fine, Wish("b", 4, PAGE, 0), fine], rank)
    with pytest.raises(DisagreementError, match="0 on ranks 0, 2; 4096 on rank 1"):
        settle([fine, Wish("a", 4, PAGE, 4096), fine], rank)
    with pytest.raises(RankUnableError) as caught:
        settle([fine, fine, Wish("", 0, 0, 0, "no room")], rank)
    assert (caught.value.rank, caught.value.culprit) == (rank, 2)


# -- ranks that differ ------------------------------------------------------------------------


def one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def little_address_space() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), resource.RLIM_INFINITY))


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, resource.RLIM_INFINITY))


def larger_pages() -> None:
    real = os.sysconf
    page = 65536
    os.sysconf = lambda name: (  # type: ignore[assignment]
        page
        if name == "SC_PAGE_SIZE"
        else real(name) // 16
        if name == "SC_PHYS_PAGES"
        else real(name)
    )
    mmap.PAGESIZE = page  # type: ignore[misc]


def no_recorder() -> None:
    os.environ["PACELINE_RECORDER"] = "0"


def few_threads() -> None:
    torch.set_num_threads(2)
    os.environ["PACELINE_WARN_AFTER"] = "0"


DIFFERENCES: dict[str, Callable[[], None]] = {
    "affinity": one_core,
    "address space": little_address_space,
    "file size": small_files,
    "page size": larger_pages,
    "recorder": no_recorder,
    "threads": few_threads,
}


def collectives_and_a_model(meeting: Meeting, difference: str, odd: int) -> list[float]:
    if meeting.rank == odd:
        DIFFERENCES[difference]()
    with meeting.new_group("shm", timeout=timedelta(seconds=60)) as group:
        check_large(group)
        return train(group)


def check_large(group: Group) -> None:
    """Every collective with tensors that take many windows, shared and not."""
    rank, size, n = group.rank(), group.size(), 100_001
    everyone = [torch.arange(n).remainder(97).float() + r for r in range(size)]
    total = sum(everyone, torch.zeros(n))
    for shared in (False, True):
        tensor = group.allocate(n) if shared else torch.empty(n)
        tensor.copy_(everyone[rank])
        group.all_reduce(tensor)
        assert torch.equal(tensor, total), f"{int((tensor != total).sum())} sums are wrong"
        tensor.copy_(everyone[rank])
        group.reduce(tensor, 1)
        assert torch.equal(tensor, total if rank == 1 else everyone[rank])
        tensor.copy_(everyone[rank])
        group.broadcast(tensor, 1)
        assert torch.equal(tensor, everyone[1])
        tensor.copy_(everyone[rank])
        taken = [torch.empty(n) for _ in range(size)]
        group.all_gather(taken, tensor)
        assert all(torch.equal(a, b) for a, b in zip(taken, everyone, strict=True))
        part = torch.empty(n)
        group.reduce_scatter(part, [tensor + d for d in range(size)])
        assert torch.equal(part, total + size * rank)
        group.all_to_all(taken, [tensor + d for d in range(size)])
        assert all(torch.equal(a, b + rank) for a, b in zip(taken, everyone, strict=True))
        group.scatter(part, [tensor + d for d in range(size)] if rank == 1 else None, 1)
        assert torch.equal(part, everyone[1] + rank)
        group.gather(taken if rank == 0 else None, tensor, 0)
        assert rank or all(torch.equal(a, b) for a, b in zip(taken, everyone, strict=True))
        if rank == 0:
            group.send(tensor, 1)
        elif rank == 1:
            group.recv(part, 0)
            assert torch.equal(part, everyone[0])


def train(group: Group) -> list[float]:
    torch.manual_seed(group.rank())  # other weights, which the wrapper makes the same
    model = nn.Sequential(nn.Linear(40, 900), nn.ReLU(), nn.Linear(900, 3))
    wrapped = DistributedDataParallel(model, process_group=group)
    for _ in range(2):
        wrapped(torch.ones(2, 40) * group.rank()).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return [p.double().sum().item() for p in model.parameters()]


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_that_differ_in_one_thing_have_the_right_numbers(difference: str) -> None:
    first, *others = spawn_ranks(2, collectives_and_a_model, difference, 1)
    assert all(other == first for other in others)
    assert any(first), "the model has been trained"


def every_collective(meeting: Meeting) -> None:
    if meeting.rank == 0:
        one_core()
    with meeting.new_group("shm", timeout=timedelta(seconds=60)) as group:
        check_all_collectives(group)


@pytest.mark.slow
def test_every_collective_over_ranks_on_unequal_cores() -> None:
    spawn_ranks(3, every_collective)


# -- what is an error on all of them ----------------------------------------------------------


def other_library() -> None:
    library = clib.load()
    assert not isinstance(library, str)
    real = library.pl_build
    library.pl_build = lambda: real() ^ 1  # type: ignore[method-assign]


def other_version() -> None:
    from importlib import metadata

    real = metadata.version
    metadata.version = lambda name: "0.0.1" if name == "paceline" else real(name)


def other_backend() -> None:
    os.environ["PACELINE_BACKEND"] = "gloo"


def nothing() -> None:
    pass


REFUSALS: dict[str, tuple[str, Callable[[], None], dict[str, object], dict[str, object]]] = {
    "library": ("shm", other_library, {}, {}),
    "version": ("shm", other_version, {}, {}),
    "version of gloo": ("gloo", other_version, {}, {}),
    "PACELINE_BACKEND": ("auto", other_backend, {}, {}),
    "window": ("shm", nothing, {}, {"window": 4096}),
    "window of auto": ("auto", nothing, {}, {"window": 4096}),
    "backend": ("shm", nothing, {}, {"backend": "gloo"}),
}


def meet(meeting: Meeting) -> Store:
    """Wait for all ranks, which do not start at the same time; the store that they met in."""
    store = meeting.store()
    store.set(f"here/{meeting.rank}", b"")
    store.wait([f"here/{r}" for r in range(meeting.size)])
    return store


def refuse(meeting: Meeting, name: str) -> tuple[str, dict[int, str], float]:
    backend, differ, usual, odd = REFUSALS[name]
    options = dict(usual)
    if meeting.rank == 1:
        differ()
        options = dict(odd)
    meet(meeting)
    start = time.monotonic()
    with pytest.raises(DisagreementError) as caught:
        meeting.new_group(options.pop("backend", backend), timeout=MINUTE, **options)
    return caught.value.what, dict(caught.value.values), time.monotonic() - start


@pytest.mark.parametrize("name", REFUSALS)
def test_what_ranks_must_have_in_common_is_an_error_on_all_that_says_who_has_what(
    name: str,
) -> None:
    results = spawn_ranks(3, refuse, name)
    for what, values, took in results:
        assert (what, values) == results[0][:2]
        assert values[0] == values[2] != values[1]
        assert took < 30, "at once, not at the timeout"


# -- a rank that runs out of something ----------------------------------------------------------


def leave_descriptors(left: int) -> None:
    """Open files until only so many more can be opened."""
    opened = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + left, 4096))


def tiny_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))


def no_address_space() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))


def map_nothing() -> None:
    """What limits did not tell: the memory is promised, and then cannot be mapped."""
    library = clib.load()
    assert not isinstance(library, str)
    library.pl_map = lambda fd, size, own: None  # type: ignore[method-assign]


def no_memfd() -> None:
    def memfd_create(name: str, flags: int = 0) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    os.memfd_create = memfd_create


SHORTAGES: dict[str, tuple[Callable[[], None], str]] = {
    "descriptors": (lambda: leave_descriptors(10), "ulimit -n"),
    "file size": (tiny_files, "ulimit -f"),
    "address space": (no_address_space, "ulimit -v"),
    "mapping": (map_nothing, "ulimit -v"),
    "memory": (no_memfd, "ulimit -v"),
}


def run_out(meeting: Meeting, what: str, backend: str) -> tuple[int, str, float] | str:
    store = meet(meeting)
    if meeting.rank == 1:
        SHORTAGES[what][0]()
    start = time.monotonic()
    at = {"store": store, "rank": meeting.rank, "world_size": meeting.size, "timeout": MINUTE}
    if backend == "auto":
        with new_group("auto", **at) as group:
            tensor = torch.ones(3)
            group.all_reduce(tensor)
            assert tensor.tolist() == [meeting.size] * 3
            return group.backend
    with pytest.raises(RankUnableError) as caught:
        new_group(backend, **at)
    return caught.value.culprit, caught.value.reason, time.monotonic() - start


@pytest.mark.parametrize("what", SHORTAGES)
def test_a_rank_that_runs_out_is_named_by_all_at_once(what: str) -> None:
    for culprit, reason, took in spawn_ranks(2, run_out, what, "shm"):
        assert culprit == 1
        assert SHORTAGES[what][1] in reason
        assert took < 30, "not at the timeout"


@pytest.mark.parametrize("what", sorted(SHORTAGES.keys() - {"address space"}))  # nor can gloo then
def test_auto_takes_gloo_on_all_ranks_when_one_cannot_share_memory(what: str) -> None:
    assert spawn_ranks(2, run_out, what, "auto") == ["gloo", "gloo"]


def have_nothing_left(meeting: Meeting, backend: str) -> tuple[int, str]:
    store = meeting.store()
    if meeting.rank == 1:
        leave_descriptors(3)
    with pytest.raises(RankUnableError) as caught:
        new_group(backend, store=store, rank=meeting.rank, world_size=meeting.size, timeout=MINUTE)
    return caught.value.culprit, caught.value.backend


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_a_rank_without_descriptors_even_for_gloo_is_named_by_all(backend: str) -> None:
    assert spawn_ranks(2, have_nothing_left, backend) == [(1, "gloo")] * 2


def allocate_too_much(meeting: Meeting) -> float:
    if meeting.rank == 1:
        small_files()
    with meeting.new_group("shm") as group:
        heap = group._engine.shm._resources.segment.heap
        tensors = [group.allocate(1 << 20) for _ in range(9)]  # more than 32 MB
        assert heap.used < 32 << 20
        for tensor in tensors:
            tensor.fill_(meeting.rank + 1)
            group.all_reduce(tensor)
        return float(sum(t.sum().item() for t in tensors)) / (9 << 20)


def test_what_does_not_fit_into_shared_memory_is_reduced_all_the_same() -> None:
    assert spawn_ranks(2, allocate_too_much) == [3.0, 3.0]


# -- windows ----------------------------------------------------------------------------------


def use_window(meeting: Meeting, window: object) -> float | PacelineError:
    try:
        group = meeting.new_group("shm", timeout=MINUTE, window=window)
    except PacelineError as error:
        return error
    with group:
        tensor = torch.full((70_001,), float(meeting.rank + 1))
        group.all_reduce(tensor)
        assert (tensor == 3).all()
        parts = [torch.full((40_001,), float(meeting.rank)) for _ in range(2)]
        group.all_gather(parts, torch.full((40_001,), float(meeting.rank + 1)))
        assert (parts[0] == 1).all()
        assert (parts[1] == 2).all()
        return tensor[-1].item()


@pytest.mark.parametrize("window", [1, 64, 127, (1 << 20) + 1, -1, "much", 1 << 70])
def test_a_window_that_cannot_be_is_an_error_on_every_rank(window: object) -> None:
    for error in spawn_ranks(2, use_window, window):
        assert isinstance(error, (OptionValueError, RankUnableError))
        assert str(window) in str(error)


@pytest.mark.parametrize("window", [128, 1000, 1 << 20])
def test_the_smallest_and_the_largest_window_move_everything(window: int) -> None:
    assert spawn_ranks(2, use_window, window) == [3.0, 3.0]


def test_the_library_itself_refuses_numbers_that_cannot_be() -> None:
    library = clib.load()
    assert not isinstance(library, str)
    assert library.pl_window(2, 2, 127) == library.pl_window(65, 2, 0) == 0
    bases, watches = (ctypes.c_void_p * 2)(0, 0), (ctypes.c_int * 2)(-1, -1)
    least = library.pl_heap_at(2)
    good = (0, 2, bases, watches, least, 2, 128)
    engine = library.pl_open(*good)
    assert engine
    library.pl_free(engine)
    for place, bad in ((0, 2), (0, -1), (1, 0), (1, 65), (4, least - 1), (6, 127), (6, 0)):
        assert not library.pl_open(*good[:place], bad, *good[place + 1 :])


# -- means of integers ------------------------------------------------------------------------

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def extremes(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sums overflow; by rank, and in an order that makes quotients uneven."""
    info = torch.iinfo(dtype)
    numbers = [info.max, info.min, info.max - rank, info.min + 2 * rank, rank, 100, info.max // 2]
    if info.min < 0:
        numbers += [-rank, -100, -1, 1 - 2 * rank]
    return torch.tensor(numbers, dtype=dtype)


def expected_means(size: int, dtype: torch.dtype) -> torch.Tensor:
    columns = zip(*(extremes(r, dtype).tolist() for r in range(size)), strict=True)
    means = [abs(sum(c)) // size * (1 if sum(c) >= 0 else -1) for c in columns]
    return torch.tensor(means, dtype=dtype)


def check_means(group: Group, dtypes: tuple[torch.dtype, ...] = INTEGERS) -> None:
    rank, size = group.rank(), group.size()
    for dtype in dtypes:
        own, want = extremes(rank, dtype), expected_means(size, dtype)
        tensor = own.clone()
        group.all_reduce(tensor, ReduceOp.AVG)
        assert torch.equal(tensor, want), (dtype, tensor, want)
        tensor = own.clone()
        group.reduce(tensor, 1, ReduceOp.AVG)
        assert torch.equal(tensor, want if rank == 1 else own), dtype
        part = torch.empty_like(own)
        group.reduce_scatter_single(part, own.repeat(size), ReduceOp.AVG)
        assert torch.equal(part, want), (dtype, part, want)
        group.reduce_scatter(part, [own.clone() for _ in range(size)], ReduceOp.AVG)
        assert torch.equal(part, want), dtype
        big = own.repeat(30_000)
        work = group.all_reduce(big, ReduceOp.AVG, async_op=True)
        work.wait()
        assert torch.equal(big, want.repeat(30_000)), dtype


def means_over(meeting: Meeting, backend: str) -> None:
    with meeting.new_group(backend) as group:
        check_means(group, (*INTEGERS, *UNSIGNED) if backend == "shm" else _reducible(group))


def _reducible(group: Group) -> tuple[torch.dtype, ...]:
    return tuple(d for d in INTEGERS if group._engine.reduces(d, "avg"))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_mean_of_integers_does_not_overflow_over(backend: str, size: int) -> None:
    spawn_ranks(size, means_over, backend)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_mean_of_integers_does_not_overflow_over_threads(size: int) -> None:
    run_ranks(size, lambda group: check_means(group, (*INTEGERS, *UNSIGNED)))
