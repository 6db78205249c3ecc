"""Tensors and lists as users give them: wrong ones are refused, others are moved as they are."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.testing import assert_close

from paceline import Group
from paceline.errors import CollectiveArgumentError, CollectiveTypeError, MismatchError
from paceline.groups import Call
from paceline.groups.checks import Checker
from paceline.groups.engines.fake import FakeEngine
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.marks import needs_shm

BACKENDS = [pytest.param("shm", marks=needs_shm), "gloo"]
SWAPPED = 20_000  # floats: more than gloo gathers in one go


def in_group(meeting: Meeting, backend: str, fn: Callable[..., object], *args: object) -> object:
    with meeting.new_group(backend, timeout=timedelta(seconds=60)) as group:
        return fn(group, *args)


def over(backend: str, size: int, fn: Callable[..., object], *args: object) -> list[Any]:
    return spawn_ranks(size, in_group, backend, fn, *args)


def total(group: Group) -> float:
    """A sum that is right while the ranks are at the same call."""
    tensor = torch.ones(())
    group.all_reduce(tensor)
    return tensor.item()


# -- sizes ----------------------------------------------------------------------------------------


def refuse_other_sizes(group: Group) -> None:
    for output, given in (
        (torch.empty(4), torch.arange(8.0)),
        (torch.empty(16), torch.arange(8.0)),
        (torch.empty(4, 2), torch.ones(4, 1024)),
        (torch.empty(4, 2), torch.empty(0, 2)),
    ):
        with pytest.raises(CollectiveArgumentError, match="output"):
            group.all_to_all_single(output, given)
    rows = [4 // group.size()] * group.size()
    for output, given, take, give in (
        (torch.empty(4, 3), torch.ones(4, 2), rows, rows),
        (torch.empty(8), torch.ones(4), [2 * n for n in rows], rows),
        (torch.empty(8), torch.ones(4), None, rows),
        (torch.empty(8), torch.ones(4), [2 * n for n in rows], None),
    ):
        with pytest.raises((CollectiveArgumentError, MismatchError)):  # the latter on all ranks
            group.all_to_all_single(output, given, take, give)
    taken = torch.empty(8)  # of another shape, but with room for what comes
    group.all_to_all_single(taken, torch.ones(4, 2))
    assert taken.eq(1).all()
    group.all_to_all_single(taken, torch.full((4, 2), 2.0), [2 * n for n in rows], rows)
    assert taken.eq(2).all()
    assert total(group) == group.size()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exchange_into_an_output_of_another_size_is_refused(backend: str, size: int) -> None:
    over(backend, size, refuse_other_sizes)


def differ_in_width(group: Group) -> None:
    """The rows for a rank itself are none, so that it cannot see by itself what is wrong."""
    rank = group.rank()
    splits = [2 * (rank == 1), 2 * (rank == 0)]
    with pytest.raises(MismatchError):
        group.all_to_all_single(torch.empty(2, 3), torch.ones(2, 2), splits, splits)
    assert total(group) == 2


@needs_shm
def test_rows_of_another_width_from_another_rank_are_a_mismatch() -> None:
    run_ranks(2, differ_in_width)
    over("shm", 2, differ_in_width)


def test_tensors_of_one_call_must_be_on_one_device() -> None:
    checker = Checker(0, 2, FakeEngine(0, 2))
    here, there = torch.ones(2), torch.ones(4, device="meta")
    with pytest.raises(CollectiveArgumentError, match=r"device cpu.*got meta"):
        checker.check(Call("all_gather_single", (here,), (there,)))
    with pytest.raises(CollectiveArgumentError, match=r"device meta.*got cpu"):
        checker.check(Call("all_gather", (there,), (there.clone(), torch.ones(4))))
    checker.check(Call("all_gather_single", (there,), (there.repeat(2),)))


# -- conjugates -----------------------------------------------------------------------------------

Z = torch.tensor([1 + 2j, 3 - 4j])


def move_conjugates(group: Group) -> None:
    if group.backend != "gloo":  # which does so with real numbers alone
        _gather_conjugates(group)
    _reduce_conjugates(group)
    rank, own, both = group.rank(), Z * (group.rank() + 1), torch.stack((Z, 2 * Z))
    tensor = own.clone() if rank == 0 else own.conj()
    memory = tensor.conj()
    group.broadcast(tensor, 0)
    assert_close(tensor, Z)
    assert_close(memory, Z.conj())
    gathered, taken = torch.empty_like(both), torch.empty_like(Z)
    group.gather(list(gathered) if rank == 0 else [], both[rank].conj(), 0)
    if rank == 0:
        assert_close(gathered, both.conj())
    group.scatter(taken.conj(), [Z.conj(), 2 * Z.conj()] if rank == 0 else [], 0)
    assert_close(taken, both[rank])
    _swap_negatives(group, both[rank], both[1 - rank])


def _gather_conjugates(group: Group) -> None:
    rank, both = group.rank(), torch.stack((Z, 2 * Z))
    own, gathered = both[rank], torch.empty_like(both)
    group.all_gather_single(gathered, own.conj())
    assert_close(gathered, both.conj())
    gathered.zero_()
    group.all_gather_single(gathered.conj(), own)
    assert_close(gathered, both.conj())
    gathered.zero_()
    group.all_gather(list(gathered.conj()), own)
    assert_close(gathered, both.conj())
    taken = torch.empty_like(Z)
    group.all_to_all_single(taken, own.conj())
    assert_close(taken, both[:, rank].conj())
    group.all_to_all(list(taken.view(2, 1)), list(own.view(2, 1).conj()))
    assert_close(taken, both[:, rank].conj())


def _reduce_conjugates(group: Group) -> None:
    rank = group.rank()
    own = Z * (rank + 1)
    tensor = own.clone().conj() if rank == 0 else own.clone()
    group.all_reduce(tensor)
    assert_close(tensor, Z.conj() + 2 * Z)
    tensor = own.clone().conj()
    group.reduce(tensor, 0)
    assert_close(tensor, 3 * Z.conj() if rank == 0 else own.conj())
    part = torch.empty(1, dtype=Z.dtype)
    group.reduce_scatter_single(part, own.conj())
    assert_close(part, 3 * Z.conj()[rank : rank + 1])
    group.reduce_scatter(part.conj(), [Z[:1].conj(), Z[1:].conj()])
    assert_close(part, 2 * Z[rank : rank + 1])


def _swap_negatives(group: Group, own: Tensor, theirs: Tensor) -> None:
    """The imaginary part of a conjugate is the negative of what is in memory."""
    peer = 1 - group.rank()
    given, memory = own.conj().imag[:1], torch.zeros(1, dtype=Z.dtype)
    assert given.is_neg()
    assert given.is_contiguous()
    sent = group.send(given, peer, async_op=True)
    group.recv(memory.conj().imag, peer)
    sent.wait()
    assert memory.imag.item() == theirs.imag[0].item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_conjugates_and_negatives_are_moved_as_what_they_stand_for(backend: str) -> None:
    over(backend, 2, move_conjugates)


def test_conjugates_and_negatives_are_moved_between_threads() -> None:
    run_ranks(2, move_conjugates)


# -- autograd -------------------------------------------------------------------------------------


def keep_graphs(group: Group, sizes: Sequence[int] = (1, SWAPPED), messages: bool = True) -> None:
    """Whatever a collective writes to, gradients are as if it had not been called."""
    ways = [reduce_in_place, reduce_strided, reduce_scaled, reduce_in_time]
    for numel in sizes:
        for way in [*ways, receive] if messages else ways:
            weight = nn.Parameter(torch.full((numel,), 2.0))
            result = weight * 3
            way(group, result)
            result.sum().backward()
            assert_close(weight.grad, torch.full((numel,), 3.0), msg=f"{way.__name__}, {numel}")
        for write in (group.all_reduce, group.broadcast, group.reduce):
            weight = nn.Parameter(torch.full((numel,), 2.0))
            write(weight)
            assert weight.is_leaf
            assert weight.requires_grad
        keep_outputs_apart(group, numel)
    assert total(group) == group.size()


def reduce_in_place(group: Group, tensor: Tensor) -> None:
    group.all_reduce(tensor)
    assert tensor.detach().eq(6 * group.size()).all()


def reduce_strided(group: Group, tensor: Tensor) -> None:
    group.all_reduce(tensor[::2])
    assert tensor.detach()[0] == 6 * group.size()


def reduce_scaled(group: Group, tensor: Tensor) -> None:
    group.all_reduce(tensor, torch.distributed._make_nccl_premul_sum(0.5))
    assert tensor.detach().eq(3 * group.size()).all()


def reduce_in_time(group: Group, tensor: Tensor) -> None:
    """Another thread waits, and ends what there is to do at the end."""
    with torch.no_grad():
        work = group.all_reduce(tensor, ReduceOp.AVG, async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()
    work.wait()
    assert tensor.detach().eq(6).all()


def receive(group: Group, tensor: Tensor) -> None:
    if group.rank() == 0:
        group.send(tensor, 1)
    elif group.rank() == 1:
        group.recv(tensor, 0)


def keep_outputs_apart(group: Group, numel: int) -> None:
    """Outputs require no gradient because an input does."""
    size, rank = group.size(), group.rank()
    given = torch.ones(numel * size, requires_grad=True) * 2
    own = given[:numel]
    whole, part = torch.empty(numel * size), torch.empty(numel)
    strided = torch.empty(numel * size, 2)[:, 0]
    unequal = [torch.empty(numel + r) for r in range(size)]
    group.all_gather_single(whole, own)
    group.all_gather_single(strided, own)
    group.all_gather(list(whole.view(size, -1)), own)
    group.all_gather(unequal, torch.cat((own, given[:rank])))
    group.reduce_scatter_single(part, given)
    group.reduce_scatter(part, list(given.view(size, -1)))
    group.all_to_all_single(whole, given)
    group.all_to_all(list(whole.view(size, -1)), list(given.view(size, -1)))
    group.gather(list(whole.view(size, -1)) if rank == 0 else [], own, 0)
    group.scatter(part, list(given.view(size, -1)) if rank == 0 else [], 0)
    for output in (whole, part, strided, *unequal):
        assert not output.requires_grad, output.shape


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_collective_is_no_step_of_autograd(backend: str, size: int) -> None:
    over(backend, size, keep_graphs)


def test_a_collective_is_no_step_of_autograd_between_threads() -> None:
    run_ranks(2, keep_graphs)


# -- lists ----------------------------------------------------------------------------------------


def test_a_list_of_several_tensors_is_refused_where_one_is_moved() -> None:
    def one_rank(group: Group) -> list[float]:
        first, second = torch.full((2,), float(group.rank())), torch.zeros(2)
        several, root = [first, second], group.rank() == 0
        outputs = [torch.zeros(2) for _ in range(2)]
        for call in (
            lambda: group.broadcast(several, 0),
            lambda: group.reduce(several, 0),
            lambda: group.send(several, 1 - group.rank()),
            lambda: group.recv(several, 1 - group.rank()),
            lambda: group.all_gather(outputs, several),
            lambda: group.gather(outputs if root else [], several, 0),
            lambda: group.scatter(several, outputs if root else [], 0),
            lambda: group.reduce_scatter(several, outputs),
            lambda: group.broadcast([], 0),
            lambda: group.recv([], 1 - group.rank()),
        ):
            with pytest.raises(CollectiveArgumentError, match="one tensor"):
                call()
        group.broadcast([first], 0).wait()
        return first.tolist()

    assert run_ranks(2, one_rank) == [[0.0, 0.0]] * 2


def test_lists_for_several_devices_are_refused_and_not_cut_off() -> None:
    def one_rank(group: Group) -> float:
        def two() -> list[list[Tensor]]:
            return [[torch.zeros(2) for _ in range(2)] for _ in range(2)]

        tensor, root = torch.ones(2), group.rank() == 0
        for call in (
            lambda: group.all_gather(two(), [tensor]),
            lambda: group.gather(two() if root else [[], []], [tensor], 0),
            lambda: group.scatter([tensor], two() if root else [[], []], 0),
            lambda: group.reduce_scatter([tensor], two()),
        ):
            with pytest.raises(CollectiveTypeError, match="list"):
                call()
        return total(group)

    assert run_ranks(2, one_rank) == [2.0] * 2


def change_lists(group: Group) -> None:
    """The first rank changes its lists while the call waits for the second."""
    first = group.rank() == 0
    for numel in (4, SWAPPED):
        reduced = [torch.full((numel,), group.rank() + 1.0)]
        gathered = [torch.zeros(2) for _ in range(2)]
        splits, taken = [1, 1], torch.zeros(2)
        if not first:
            group.recv(torch.empty(()), 0)
        works = [
            group.allreduce(reduced),
            group.allgather([gathered], [torch.full((2,), group.rank() + 1.0)]),
            group.all_to_all_single(
                taken, torch.full((2,), group.rank() + 1.0), splits, splits, async_op=True
            ),
        ]
        alive = [weakref.ref(t) for t in (*reduced, *gathered)]
        if first:
            reduced.clear()
            gathered[:] = [torch.zeros(2) for _ in range(2)]
            splits[:] = [2, 0]
            kept = [ref() for ref in alive]
            group.send(torch.ones(()), 1)
            assert all(t is not None for t in kept), "memory that the engine uses"
        else:
            kept = [*reduced, *gathered]
        for work in works:
            work.wait()
        assert [t.unique().tolist() for t in kept] == [[3.0], [1.0], [2.0]]
        assert taken.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_list_may_be_changed_while_a_call_is_under_way(backend: str) -> None:
    over(backend, 2, change_lists)


def test_a_list_may_be_changed_while_threads_are_under_way() -> None:
    run_ranks(2, change_lists)


# -- scaled sums ----------------------------------------------------------------------------------

premul: Callable[..., Any] = torch.distributed._make_nccl_premul_sum


def scale_halves(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for factor in (0.5, torch.tensor([0.5]), torch.full((1, 1), 0.5, dtype=torch.float64)):
            given = torch.arange(2 * size, dtype=dtype) + rank
            want = (torch.arange(2 * size) * size + sum(range(size))).to(dtype) / 2
            part = torch.empty(2, dtype=dtype)
            group.reduce_scatter_single(part, given, premul(factor))
            assert_close(part, want[2 * rank :][:2])
            part.zero_()
            group.reduce_scatter(part, list(given.view(size, 2)), premul(factor))
            assert_close(part, want[2 * rank :][:2])
            for root in range(size):
                tensor = given.clone()
                group.reduce(tensor, root, premul(factor))
                assert_close(tensor, want if rank == root else given)
            group.all_reduce(given, premul(factor))
            assert_close(given, want)
            single = torch.ones((), dtype=dtype)
            group.reduce(single, 0, premul(factor))
            assert single.item() == (size / 2 if rank == 0 else 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scaled_sum_has_the_type_of_its_tensor(backend: str) -> None:
    over(backend, 2, scale_halves)


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [
        (torch.int32, 0.5),
        (torch.int64, 0.5),
        (torch.int64, torch.tensor([0.5])),
        (torch.float32, torch.ones(1, dtype=torch.complex64)),
    ],
)
def test_a_factor_of_another_kind_of_number_is_refused_before_anything_is_sent(
    dtype: torch.dtype, factor: float | Tensor
) -> None:
    def one_rank(group: Group) -> list[float]:
        given, part = torch.ones(4, dtype=dtype), torch.zeros(2, dtype=dtype)
        op = premul(factor)
        for call in (
            lambda: group.all_reduce(given, op),
            lambda: group.all_reduce_coalesced([torch.ones(4, dtype=dtype), given], op),
            lambda: group.reduce(given, 0, op),
            lambda: group.reduce_scatter_single(part, given, op),
            lambda: group.reduce_scatter(part, [given[:2], given[2:]], op),
        ):
            with pytest.raises(CollectiveArgumentError, match="factor"):
                call()
        assert total(group) == 2
        return given.tolist()

    assert run_ranks(2, one_rank) == [[1.0] * 4] * 2


def test_integers_may_be_scaled_by_integers() -> None:
    def one_rank(group: Group) -> list[int]:
        part = torch.zeros(1, dtype=torch.int32)
        group.reduce_scatter_single(part, torch.ones(2, dtype=torch.int32), premul(torch.tensor(3)))
        return part.tolist()

    assert run_ranks(2, one_rank) == [[6], [6]]
