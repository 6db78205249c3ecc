"""Collectives whose inputs and outputs share memory give what they give in memory apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from paceline import Group
from paceline.errors import CollectiveArgumentError
from paceline.testing import Meeting, run_ranks, spawn_ranks

SMALL, LARGE = 50, 90_000  # elements for each rank: in one slot; in many windows

Make = Callable[[int], Tensor]


def _fresh(make: Make, numel: int, rank: int) -> Tensor:
    return make(numel).copy_(torch.arange(numel) % 1001 + 1000 * rank)


def _parts(flat: Tensor, start: int, n: int, size: int) -> list[Tensor]:
    return list(flat[start : start + n * size].split(n))


def all_to_all_single(group: Group, make: Make, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    size = group.size()
    for shift in (0, 1, n // 2, n):
        flat = _fresh(make, n * size + shift, group.rank())
        given, taken = flat[: n * size], flat[shift:]
        wanted = torch.empty(n * size)
        group.all_to_all_single(wanted, given.clone())
        group.all_to_all_single(taken, given)
        yield wanted, taken


def uneven_all_to_all(group: Group, make: Make, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    size, rank = group.size(), group.rank()
    splits = [n + r for r in range(size)]  # rows for rank r
    rows = [n + rank] * size
    flat = _fresh(make, max(sum(splits), sum(rows)), rank)
    given, taken = flat[: sum(splits)], flat[: sum(rows)]
    wanted = torch.empty(sum(rows))
    group.all_to_all_single(wanted, given.clone(), rows, splits)
    group.all_to_all_single(taken, given, rows, splits)
    yield wanted, taken


def all_to_all(group: Group, make: Make, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    size = group.size()
    for backwards in (False, True):
        flat = _fresh(make, n * size, group.rank())
        given, taken = _parts(flat, 0, n, size), _parts(flat, 0, n, size)
        if backwards:
            taken.reverse()
        wanted = [torch.empty(n) for _ in range(size)]
        group.all_to_all(wanted, [t.clone() for t in given])
        group.all_to_all(taken, given)
        yield torch.cat(wanted), torch.cat(taken)


def reduce_scatter_single(group: Group, make: Make, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    size, rank = group.size(), group.rank()
    for start in (0, 1, n // 2, rank * n, (size - 1) * n, rank * n - min(rank, 1)):
        flat = _fresh(make, n * size, rank)
        wanted = torch.empty(n)
        group.reduce_scatter_single(wanted, flat.clone())
        taken = flat[start : start + n]
        group.reduce_scatter_single(taken, flat)
        yield wanted, taken


def reduce_scatter(group: Group, make: Make, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    size, rank = group.size(), group.rank()
    for start in (0, n // 2, rank * n):
        flat = _fresh(make, n * size, rank)
        given, taken = _parts(flat, 0, n, size), flat[start : start + n]
        wanted = torch.empty(n)
        group.reduce_scatter(wanted, [t.clone() for t in given])
        group.reduce_scatter(taken, given)
        yield wanted, taken


def all_gather_single(group: Group, make: Make, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    size, rank = group.size(), group.rank()
    for start in (0, 1, n // 2, rank * n, (size - 1) * n):
        flat = _fresh(make, n * size, rank)
        given = flat[start : start + n]
        wanted = torch.empty(n * size)
        group.all_gather_single(wanted, given.clone())
        group.all_gather_single(flat, given)
        yield wanted, flat


def all_gather(group: Group, make: Make, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    size, rank = group.size(), group.rank()
    for start in (0, n // 2, rank * n):
        flat = _fresh(make, n * size, rank)
        given, taken = flat[start : start + n], _parts(flat, 0, n, size)
        wanted = [torch.empty(n) for _ in range(size)]
        group.all_gather(wanted, given.clone())
        group.all_gather(taken, given)
        yield torch.cat(wanted), flat


def gather(group: Group, make: Make, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    size, rank = group.size(), group.rank()
    for start in (0, n // 2, n):
        flat = _fresh(make, n * size, rank)
        given, taken = flat[start : start + n], _parts(flat, 0, n, size)
        wanted = [torch.zeros(n) for _ in range(size)]
        group.gather(wanted if rank == 0 else None, given.clone(), 0)
        group.gather(taken if rank == 0 else None, given, 0)
        if rank == 0:
            yield torch.cat(wanted), flat


def scatter(group: Group, make: Make, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    size, rank = group.size(), group.rank()
    for start in (0, n // 2, n):
        flat = _fresh(make, n * size, rank)
        given, taken = _parts(flat, 0, n, size), flat[start : start + n]
        wanted = torch.empty(n)
        group.scatter(wanted, [t.clone() for t in given] if rank == 0 else None, 0)
        group.scatter(taken, given if rank == 0 else None, 0)
        yield wanted, taken


KINDS = (
    all_to_all_single,
    uneven_all_to_all,
    all_to_all,
    reduce_scatter_single,
    reduce_scatter,
    all_gather_single,
    all_gather,
    gather,
    scatter,
)


def faults(group: Group, make: Make, n: int) -> list[str]:
    """The collectives that gave something else than in memory apart."""
    wrong = []
    for kind in KINDS:
        for turn, (wanted, found) in enumerate(kind(group, make, n)):
            if not torch.equal(wanted, found):
                wrong.append(f"{kind.__name__}, case {turn}")
    return wrong


def try_all(meeting: Meeting, backend: str) -> list[str]:
    with meeting.new_group(backend) as group:
        found = []
        for n in (SMALL, LARGE):
            found += [f"{n} ordinary: {text}" for text in faults(group, torch.empty, n)]
            for _ in range(3):  # who is first is a race
                found += [f"{n} shared: {text}" for text in faults(group, group.allocate, n)]
        return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_inputs_and_outputs_may_overlap(backend: str) -> None:
    assert spawn_ranks(3, try_all, backend) == [[], [], []]


def overlap_on_one_rank_only(meeting: Meeting) -> list[str]:
    wrong = []
    with meeting.new_group("shm") as group:
        for turn in range(20):
            flat = _fresh(group.allocate, 2 * LARGE, meeting.rank)
            wanted, apart = torch.empty(2 * LARGE), torch.empty(2 * LARGE)
            group.all_to_all_single(wanted, flat.clone())
            found = flat if meeting.rank == turn % 2 else apart
            group.all_to_all_single(found, flat)
            if not torch.equal(found, wanted):
                wrong.append(f"turn {turn}")
    return wrong


def test_the_ranks_need_not_overlap_alike() -> None:
    assert spawn_ranks(2, overlap_on_one_rank_only) == [[], []]


def test_ranks_that_are_threads_may_overlap_too() -> None:
    assert run_ranks(3, lambda group: faults(group, group.allocate, SMALL)) == [[], [], []]


def test_what_stays_in_its_place_is_not_copied() -> None:
    def one_rank(group: Group) -> list[bool]:
        seen: list[bool] = []
        flat = torch.arange(20.0)
        own = flat[10 * group.rank() :][:10]
        group.register_hooks(lambda call: seen.append(_ours(call.inputs[0], flat)))
        group.all_gather_single(flat, own)
        group.reduce_scatter_single(own, flat)
        group.all_to_all_single(flat, flat)
        return seen

    assert run_ranks(2, one_rank) == [[True, True, False]] * 2


def _ours(tensor: Tensor, flat: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


# -- two outputs in one place -------------------------------------------------------------------

SHARED: dict[str, Callable[[Group, Tensor], object]] = {
    "all_gather": lambda g, t: g.all_gather([t[:2]] * 2, torch.ones(2)),
    "partly": lambda g, t: g.all_gather([t[1:3], t[:2]], torch.ones(2)),
    "strided": lambda g, t: g.all_gather([t[::2]] * 2, torch.ones(4)),
    "gather": lambda g, t: g.gather([t[:2]] * 2 if g.rank() == 0 else None, torch.ones(2)),
    "all_to_all": lambda g, t: g.all_to_all([t[:2]] * 2, [torch.ones(2)] * 2),
    "coalesced": lambda g, t: g.all_reduce_coalesced([t, torch.ones(3), t]),
    "list": lambda g, t: g.allreduce([t, t[3:]]),
}


@pytest.mark.parametrize("kind", SHARED)
def test_two_outputs_in_the_same_memory_are_refused(kind: str) -> None:
    def one_rank(group: Group) -> list[float]:
        tensor = torch.zeros(8)
        if kind != "gather" or group.rank() == 0:
            with pytest.raises(CollectiveArgumentError) as caught:
                SHARED[kind](group, tensor)
            assert "memory of its own, got that of outputs[0]" in str(caught.value)
        return tensor.tolist()

    assert run_ranks(2, one_rank) == [[0.0] * 8] * 2


def test_outputs_side_by_side_and_inputs_in_one_place_are_fine() -> None:
    def one_rank(group: Group) -> list[float]:
        table, own = torch.zeros(3, 2), torch.full((3,), group.rank() + 1.0)
        group.all_gather(list(table.unbind(1)), own)  # one column for each rank
        nothing = torch.zeros(0)
        group.all_gather([nothing, nothing], nothing)
        got = torch.zeros(1)
        group.scatter(got, [torch.ones(1)] * 2 if group.rank() == 0 else None)
        return [*table.flatten().tolist(), got.item()]

    assert run_ranks(2, one_rank) == [[1.0, 2.0] * 3 + [1.0]] * 2
