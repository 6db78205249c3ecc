"""The threads backend: every collective against plain torch, and how a group of threads ends."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import HashStore, ReduceOp

from paceline.errors import (
    CollectiveTimeoutError,
    EngineUnavailableError,
    GroupClosedError,
    MismatchError,
    PeerLeftError,
    RanksFailedError,
    WaitTimeoutError,
)
from paceline.groups import Call, Group, new_group
from paceline.groups.engines.threads import world
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.groups import reference
from tests.waiting import until

# Results.


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_gives_what_plain_torch_gives(size: int) -> None:
    run_ranks(size, reference.check_all_collectives)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("reduction", ["SUM", "AVG"])
def test_all_ranks_get_the_same_bits(dtype: torch.dtype, reduction: str) -> None:
    torch.manual_seed(0)
    inputs = [(torch.randn(1001) * 1e3).to(dtype) for _ in range(4)]

    def one_rank(group: Group) -> tuple[Tensor, Tensor]:
        tensor = inputs[group.rank()].clone()
        group.all_reduce(tensor, getattr(ReduceOp, reduction))
        part = torch.empty(0, dtype=dtype)
        parts = [part if r else torch.empty_like(tensor) for r in range(4)]
        given = [inputs[group.rank()] if r == 0 else part for r in range(4)]
        group.reduce_scatter(parts[group.rank()], given, getattr(ReduceOp, reduction))
        return tensor, parts[0]

    found = run_ranks(4, one_rank)
    assert all(reference.same(tensor, found[0][0]) for tensor, _ in found)
    assert reference.same(found[0][1], found[0][0])  # the same reduction by another collective


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_width_floats_are_rounded_once(dtype: torch.dtype) -> None:
    big, small = torch.tensor([2048.0]).to(dtype), torch.tensor([1.0]).to(dtype)

    def one_rank(group: Group) -> Tensor:
        tensor = (big if group.rank() == 0 else small).clone()
        group.all_reduce(tensor)
        return tensor

    exact = torch.tensor([2048.0 + 7]).to(dtype)  # one at a time, the ones would all be lost
    assert all(reference.same(found, exact) for found in run_ranks(8, one_rank))


def test_uint64_reductions_hold_above_the_signed_range() -> None:
    numbers = [[2**63 + 5, 1, 2**64 - 1], [2**63 - 2, 2**64 - 1, 2]]

    def one_rank(group: Group) -> list[list[int]]:
        found = []
        for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG):
            tensor = torch.tensor(numbers[group.rank()], dtype=torch.uint64)
            group.all_reduce(tensor, op)
            found.append(tensor.tolist())
        return found

    a, b = numbers
    sums = [(x + y) % 2**64 for x, y in zip(a, b, strict=True)]
    means = [(x + y) // 2 for x, y in zip(a, b, strict=True)]
    expected = [sums, list(map(min, a, b)), list(map(max, a, b)), means]
    assert run_ranks(2, one_rank) == [expected, expected]


def test_what_has_no_meaning_is_refused() -> None:
    def one_rank(group: Group) -> None:
        for dtype, op in (
            (torch.bool, ReduceOp.AVG),
            (torch.complex64, ReduceOp.MAX),
            (torch.float32, ReduceOp.BAND),
        ):
            with pytest.raises(ValueError, match="threads can reduce"):
                group.all_reduce(torch.ones(1, dtype=dtype), op)

    run_ranks(2, one_rank)


def test_float8_tensors_are_moved_and_summed() -> None:
    def one_rank(group: Group) -> tuple[list[float], list[float]]:
        own = torch.tensor([group.rank() + 1.0]).to(torch.float8_e4m3fn)
        gathered = torch.empty(2, dtype=own.dtype)
        group.all_gather_single(gathered, own)
        group.all_reduce(own)
        return gathered.float().tolist(), own.float().tolist()

    assert run_ranks(2, one_rank) == [([1.0, 2.0], [3.0])] * 2


def test_parameters_that_require_gradients_are_written_to() -> None:
    def one_rank(group: Group) -> list[float]:
        weight = torch.nn.Parameter(torch.full((2,), float(group.rank())))
        group.broadcast(weight, 1)
        return weight.tolist()

    assert run_ranks(2, one_rank) == [[1.0, 1.0]] * 2


def test_started_and_called_collectives_keep_their_order() -> None:
    def one_rank(group: Group) -> list[float]:
        tensor = torch.ones(1)
        works = [group.all_reduce(tensor, async_op=True) for _ in range(3)]
        group.all_reduce(tensor)  # after the three
        assert all(work.is_completed() for work in works)
        return tensor.tolist()

    assert run_ranks(2, one_rank) == [[16.0]] * 2


# Calls that do not fit.

Action = Callable[[Group], object]


def _differently(first: Action, second: Action) -> list[MismatchError]:
    """What each of three ranks gets when rank 1 calls something else; the group works on."""

    def one_rank(group: Group) -> MismatchError:
        with pytest.raises(MismatchError) as caught:
            (second if group.rank() == 1 else first)(group)
        tensor = torch.ones(1)
        group.all_reduce(tensor)
        assert tensor.item() == 3
        return caught.value

    return run_ranks(3, one_rank)


@pytest.mark.parametrize(
    ("first", "second", "calls"),
    [
        (
            lambda g: g.all_reduce(torch.ones(2)),
            lambda g: g.all_reduce(torch.ones(3)),
            ("all_reduce(2 x torch.float32, SUM)", "all_reduce(3 x torch.float32, SUM)"),
        ),
        (
            lambda g: g.all_reduce(torch.ones(2)),
            lambda g: g.all_reduce(torch.ones(2), ReduceOp.MAX),
            ("all_reduce(2 x torch.float32, SUM)", "all_reduce(2 x torch.float32, MAX)"),
        ),
        (
            lambda g: g.all_reduce(torch.ones(2)),
            lambda g: g.all_reduce(torch.ones(2, dtype=torch.int64)),
            ("all_reduce(2 x torch.float32, SUM)", "all_reduce(2 x torch.int64, SUM)"),
        ),
        (
            lambda g: g.broadcast(torch.ones(2), 0),
            lambda g: g.broadcast(torch.ones(2), 1),
            ("broadcast(2 x torch.float32, root 0)", "broadcast(2 x torch.float32, root 1)"),
        ),
        (
            lambda g: g.barrier(),
            lambda g: g.all_reduce(torch.ones(1)),
            ("barrier()", "all_reduce(1 x torch.float32, SUM)"),
        ),
    ],
)
def test_calls_that_differ_are_an_error_on_every_rank_and_the_group_stays_usable(
    first: Action, second: Action, calls: tuple[str, str]
) -> None:
    for rank, error in enumerate(_differently(first, second)):
        assert (error.rank, error.sequence) == (rank, 1)
        assert (error.rank_a, error.rank_b) == (0, 1)
        assert (error.call_a, error.call_b) == calls


def test_sizes_that_differ_between_two_ranks_are_told_in_bytes() -> None:
    def gather(group: Group, own: int) -> None:
        sizes = [2, 2, 2]
        sizes[group.rank()] = own
        group.all_gather([torch.ones(size) for size in sizes], torch.ones(own))

    for error in _differently(lambda g: gather(g, 2), lambda g: gather(g, 3)):
        assert (error.rank_a, error.rank_b) == (1, 0)  # who sends, who receives
        assert error.call_a == "all_gather(3 x torch.float32, 12 bytes between the two)"
        assert error.call_b == "all_gather(2 x torch.float32, 8 bytes between the two)"


def test_a_message_that_does_not_fit_is_an_error_on_both_sides() -> None:
    def one_rank(group: Group) -> None:
        other = 1 - group.rank()
        if group.rank() == 0:
            group.send(torch.ones(2), other)
            group.barrier()  # the receiver knows by now
            with pytest.raises(MismatchError) as caught:
                group.send(torch.ones(2), other)
            group.send(torch.full((2,), 7.0), other)
        else:
            with pytest.raises(MismatchError) as caught:
                group.recv(torch.ones(2, dtype=torch.int64), other)
            group.barrier()
            tensor = torch.ones(2)
            group.recv(tensor, other)
            assert tensor.tolist() == [7.0, 7.0]
        error = caught.value
        assert (error.rank, error.rank_a, error.rank_b) == (group.rank(), 0, 1)
        assert error.call_a == "send(8 bytes of torch.float32)"
        assert error.call_b == "recv(16 bytes of torch.int64)"

    run_ranks(2, one_rank)


# Messages.


def test_sends_do_not_block_and_started_receives_are_served_in_their_order() -> None:
    def one_rank(group: Group) -> list[float]:
        if group.rank() == 0:
            for value in range(4):
                group.send(torch.tensor([float(value)]), 1)
            return []
        rooms = [torch.empty(1) for _ in range(4)]
        works = [group.recv(room, 0, async_op=True) for room in rooms]
        for work in reversed(works):
            assert work.wait()
        return [room.item() for room in rooms]

    assert run_ranks(2, one_rank)[1] == [0.0, 1.0, 2.0, 3.0]


def test_a_receive_that_times_out_names_the_sender_and_leaves_the_group_usable() -> None:
    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            with pytest.raises(CollectiveTimeoutError) as caught:
                group.recv(torch.ones(1), 1, timeout=0.05)
            assert list(caught.value.ranks) == [1]
            work = group.recv(torch.ones(1), 1, async_op=True)
            with pytest.raises(WaitTimeoutError):
                work.wait(0.01)  # it goes on
            assert not work.is_completed()
            group.barrier()
            assert work.wait()
        else:
            group.barrier()
            group.send(torch.ones(1), 0)

    run_ranks(2, one_rank)


def test_a_message_from_a_rank_that_left_still_arrives_and_the_next_does_not() -> None:
    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            group.send(torch.ones(1), 1)
            group.shutdown()
        else:
            group.recv(torch.ones(1), 0)
            with pytest.raises(PeerLeftError) as caught:
                group.recv(torch.ones(1), None)
            assert list(caught.value.ranks) == [0]
            with pytest.raises(PeerLeftError):
                group.send(torch.ones(1), 0)

    run_ranks(2, one_rank)


# How a group ends.


def test_a_timeout_names_the_late_rank_and_ends_the_group_on_all() -> None:
    over = threading.Event()

    def one_rank(group: Group) -> CollectiveTimeoutError:
        group.barrier()
        if group.rank() == 0:
            world = group._engine.world
            assert until(lambda: "all_reduce" in world._position(1))
        if group.rank() == 2:
            over.wait()
        with pytest.raises(CollectiveTimeoutError) as caught:
            group.all_reduce(torch.ones(1), timeout=0.5 if group.rank() == 0 else 60)
        over.set()
        with pytest.raises(CollectiveTimeoutError):
            group.barrier()
        return caught.value

    errors = run_ranks(3, one_rank)
    for rank, error in enumerate(errors):
        assert (error.rank, error.operation, error.sequence) == (rank, "all_reduce", 2)
        assert list(error.ranks) == [2]
        assert (error.seconds, error.reporter) == (0.5, 0)
        assert list(error.behind) == ["rank 2 in operation 1 (barrier)"]


def test_an_abort_frees_every_rank_at_once() -> None:
    all_started = threading.Barrier(3)

    def one_rank(group: Group) -> tuple[type, bool, list[int]]:
        if group.rank() == 0:
            all_started.wait()
            group.abort()
            with pytest.raises(GroupClosedError) as caught:
                group.barrier()
        else:
            work = group.all_reduce(torch.ones(1), async_op=True)
            message = group.recv(torch.ones(1), None, async_op=True)
            all_started.wait()
            with pytest.raises(PeerLeftError):
                message.wait()
            with pytest.raises(PeerLeftError) as caught:
                work.wait()
        return type(caught.value), caught.value.aborted, list(caught.value.ranks)

    assert run_ranks(3, one_rank) == [
        (GroupClosedError, True, [0]),
        (PeerLeftError, True, [0]),
        (PeerLeftError, True, [0]),
    ]


def test_abort_from_another_thread_frees_the_caller() -> None:
    def one_rank(group: Group) -> None:
        if group.rank() == 0:
            entered = threading.Event()
            group.register_hooks(before=lambda call: entered.set())
            aborter = threading.Thread(target=lambda: (entered.wait(), group.abort()))
            aborter.start()
            with pytest.raises(GroupClosedError) as caught:
                group.barrier()
            assert caught.value.aborted
            aborter.join()
        else:
            with pytest.raises(PeerLeftError) as caught:
                group.recv(torch.ones(1), 0)
            assert caught.value.aborted

    run_ranks(2, one_rank)


def test_a_rank_that_left_is_not_waited_for() -> None:
    def one_rank(group: Group) -> None:
        group.barrier()
        if group.rank() == 1:
            group.shutdown()
            with pytest.raises(GroupClosedError):
                group.barrier()
        else:
            with pytest.raises(PeerLeftError) as caught:
                group.barrier()
            assert list(caught.value.ranks) == [1]
            assert not caught.value.aborted

    run_ranks(3, one_rank)


def test_shutdown_finishes_what_was_started() -> None:
    def one_rank(group: Group) -> float:
        tensor = torch.ones(1000)
        for _ in range(5):
            group.all_reduce(tensor, async_op=True)
        group.shutdown()
        return tensor.mean().item()

    assert run_ranks(2, one_rank) == [32.0, 32.0]


def test_an_error_inside_a_collective_does_not_leave_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute = world.results

    def fail_on_rank_1(parts: object, rank: int) -> list[Tensor]:
        if rank == 1:
            raise MemoryError("no room")
        return compute(parts, rank)

    monkeypatch.setattr(world, "results", fail_on_rank_1)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, lambda group: group.all_reduce(torch.ones(1)))
    assert isinstance(caught.value.__cause__, MemoryError)
    assert {rank for rank, _ in caught.value.failures} == {0, 1}


# Meeting.


def join_from_processes(meeting: Meeting) -> str:
    try:
        meeting.new_group("threads")
    except EngineUnavailableError as error:
        return error.reason
    return "no error"


def test_ranks_of_different_processes_are_told_so() -> None:
    first, second = spawn_ranks(2, join_from_processes)
    assert first == "the ranks are not threads of one process (not of this one: 1)"
    assert second == "the ranks are not threads of one process (not of this one: 0)"


def test_one_store_serves_several_groups() -> None:
    store = HashStore()

    def one_rank(group: Group) -> list[float]:
        totals = []
        for scale in (1, 10):
            own = new_group("threads", store=store, rank=group.rank(), world_size=2)
            tensor = torch.full((1,), float(scale))
            own.all_reduce(tensor)
            totals.append(tensor.item())
        return totals

    assert run_ranks(2, one_rank) == [[2.0, 20.0]] * 2


# What the Group adds, on this engine.


def test_ragged_splits_work_side_by_side() -> None:
    def one_rank(group: Group) -> tuple[object, ...]:
        part = group.split([[3, 0, 4], [1]])
        if part is None:
            return (group.rank(), None)
        tensor = torch.tensor([float(group.rank())])
        part.all_reduce(tensor)
        return (group.rank(), part.rank(), part.size(), part.members, tensor.item())

    assert run_ranks(5, one_rank) == [
        (0, 1, 3, (3, 0, 4), 7.0),
        (1, 0, 1, (1,), 1.0),
        (2, None),
        (3, 0, 3, (3, 0, 4), 7.0),
        (4, 2, 3, (3, 0, 4), 7.0),
    ]


def test_survivors_go_on_after_reconfigure() -> None:
    def one_rank(group: Group) -> float:
        if group.rank() == 1:
            group.shutdown()
            return 0.0
        with pytest.raises(PeerLeftError):
            group.barrier()
        group.reconfigure([2, 0])
        tensor = torch.tensor([1.0 + group.rank()])
        group.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(3, one_rank) == [3.0, 0.0, 3.0]


def test_hooks_see_every_collective_until_they_are_removed() -> None:
    def one_rank(group: Group) -> list[tuple[str, str, int]]:
        seen = []

        def note(what: str) -> Callable[..., None]:
            return lambda call, *error: seen.append((what, call.kind, call.nbytes))

        handle = group.register_hooks(note("before"), note("after"), note("error"))
        group.all_reduce(torch.ones(2))
        group.broadcast(torch.ones(1), 0, async_op=True).wait()
        with pytest.raises(MismatchError):
            group.all_reduce(torch.ones(1 + group.rank()))
        handle.remove()
        group.barrier()
        return seen

    for rank, seen in enumerate(run_ranks(2, one_rank)):
        assert seen == [
            ("before", "all_reduce", 8),
            ("after", "all_reduce", 8),
            ("before", "broadcast", 4),
            ("after", "broadcast", 4),
            ("before", "all_reduce", 4 + 4 * rank),
            ("error", "all_reduce", 4 + 4 * rank),
        ]


def test_what_a_before_hook_raises_stops_the_call() -> None:
    def one_rank(group: Group) -> float:
        def refuse(call: Call) -> None:
            raise KeyError(call.kind)

        handle = group.register_hooks(before=refuse)
        with pytest.raises(KeyError):
            group.all_reduce(torch.ones(1))
        handle.remove()
        tensor = torch.ones(1)
        group.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(2, one_rank) == [2.0, 2.0]


def test_capabilities_say_what_it_can_do() -> None:
    def one_rank(group: Group) -> None:
        can = group.capabilities
        assert (can.backend, can.abortable, can.checks_agreement) == ("threads", True, True)
        assert (can.in_place_memory, can.names_dead_ranks, can.max_ranks) == (False, False, None)
        assert "cpu" in can.devices
        assert group.allocate(3, torch.int8).shape == (3,)

    run_ranks(1, one_rank)


def test_a_scaled_reduce_leaves_the_tensors_of_other_ranks_alone() -> None:
    def one_rank(group: Group) -> float:
        tensor = torch.tensor([1.0 + group.rank()])
        group.reduce(tensor, root=1, op=_make_nccl_premul_sum(10.0))
        return tensor.item()

    assert run_ranks(2, one_rank) == [1.0, 30.0]


def test_a_wait_that_took_too_long_can_be_repeated_for_a_strided_tensor() -> None:
    late = threading.Event()

    def one_rank(group: Group) -> list[list[float]]:
        tensor = torch.ones(2, 3).t()
        if group.rank() == 1:
            assert late.wait(120)
        work = group.all_reduce_coalesced([tensor, torch.ones(1)], async_op=True)
        if group.rank() == 0:
            with pytest.raises(WaitTimeoutError):
                work.wait(timedelta(milliseconds=20))
            late.set()
        assert work.wait()
        return tensor.tolist()

    assert run_ranks(2, one_rank) == [[[2.0, 2.0]] * 3] * 2
