"""What a group is: objects, barriers that name names, hooks, and groups that come out of groups."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from paceline import Group
from paceline._transport import Clock
from paceline.errors import (
    CodecError,
    CollectiveTimeoutError,
    GroupClosedError,
    MonitoredBarrierError,
    PeerDiedError,
    UnsupportedError,
)
from paceline.groups import Call
from paceline.groups import group as barriers
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.marks import USUAL

from .reference import check_all_collectives

BACKENDS = ["shm", "gloo"]


def total(group: Group) -> float:
    tensor = torch.tensor(float(group.rank()))
    group.all_reduce(tensor)
    return tensor.item()


def do_everything(meeting: Meeting) -> None:
    with meeting.new_group("gloo", timeout=timedelta(seconds=30)) as group:
        check_all_collectives(group)


@pytest.mark.parametrize("size", [1, 3])
def test_every_collective_over_gloo(size: int) -> None:
    spawn_ranks(size, do_everything)


# -- split, merge, reconfigure --------------------------------------------------------------------


def split_ragged(meeting: Meeting, backend: str) -> tuple[object, ...]:
    with meeting.new_group(backend) as group:
        part = group.split([[3, 0, 2], [1]])
        assert part is not None
        again = group.split([[3, 0, 2], [1]])  # the same ranks once more
        assert again is not None
        total(again)
        pair = group.split([0, 1])
        inner = part.split([0, 1]) if part.size() == 3 else None
        found = (
            part.rank(),
            part.size(),
            part.members,
            total(part),
            None if pair is None else total(pair),
            None if inner is None else inner.members,
        )
        for made in (part, again, pair, inner):
            if made is not None:
                made.shutdown()
        total(group)
        return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_splits_into_ragged_parts_and_those_again(backend: str) -> None:
    assert spawn_ranks(4, split_ragged, backend) == [
        (1, 3, (3, 0, 2), 3.0, 1.0, (3, 0)),
        (0, 1, (1,), 0.0, 1.0, None),
        (2, 3, (3, 0, 2), 3.0, None, None),
        (0, 3, (3, 0, 2), 3.0, None, (3, 0)),
    ]


def merge_two(meeting: Meeting) -> tuple[int, float]:
    mine = [0] if meeting.rank == 0 else [1, 2]
    with meeting.new_group(USUAL, ranks=mine) as group:
        store = PrefixStore("both", meeting.store())
        with group.merge(store, 3) as merged:
            assert merged.size() == 3
            position = merged.rank() - group.rank()
            return position, total(merged)


def test_groups_merge_into_one() -> None:
    results = spawn_ranks(3, merge_two)
    assert [r[1] for r in results] == [3.0] * 3
    assert results[1][0] == results[2][0], "a group stays together"
    assert {results[0][0], results[1][0]} in ({0, 1}, {0, 2})


def go_on_without_a_dead_rank(meeting: Meeting) -> tuple[int, int, float, tuple[int, ...]]:
    group = meeting.new_group("shm")
    keep = group  # whoever holds the group keeps it
    total(group)
    if meeting.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDiedError) as caught:
        total(group)
    alive = [r for r in range(group.size()) if r not in caught.value.ranks]
    assert group.reconfigure(alive) is keep
    result = (group.rank(), group.size(), total(group), group.members)
    group.shutdown()
    return result


def test_survivors_reconfigure_and_go_on() -> None:
    results = spawn_ranks(4, go_on_without_a_dead_rank, may_die=[1])
    assert results[0] == (0, 3, 3.0, (0, 2, 3))
    assert results[2] == (1, 3, 3.0, (0, 2, 3))
    assert results[3] == (2, 3, 3.0, (0, 2, 3))


def leave_one_out(meeting: Meeting) -> str:
    group = meeting.new_group(USUAL)
    total(group)
    group.reconfigure([2, 0])
    if meeting.rank == 1:
        with pytest.raises(GroupClosedError):
            total(group)
        return "out"
    assert group.members == (2, 0)
    value = total(group)
    group.shutdown()
    return f"{group.rank()} {value}"


def test_a_rank_that_is_no_member_any_more_has_a_closed_group() -> None:
    assert spawn_ranks(3, leave_one_out) == ["1 1.0", "out", "0 1.0"]


# -- barriers -----------------------------------------------------------------------------------


def miss_the_barrier(meeting: Meeting, missing: list[int]) -> list[int] | None:
    with meeting.new_group(USUAL) as group:
        group.monitored_barrier(120.0)
        store = meeting.store()
        if meeting.rank in missing:
            store.wait(["over"])
            return None
        if store.add("here", 1) == meeting.size - len(missing):
            store.set("all here", "yes")
        store.wait(["all here"])
        with pytest.raises(
            MonitoredBarrierError, match="failed to pass monitoredBarrier"
        ) as caught:
            hears = meeting.rank != 0 and 0 not in missing  # who is missing, from rank 0
            group.monitored_barrier(timedelta(seconds=60 if hears else 4))
        assert isinstance(caught.value, CollectiveTimeoutError)
        if store.add("seen", 1) == meeting.size - len(missing):
            store.set("over", "yes")
        return list(caught.value.ranks)


@pytest.mark.parametrize("missing", [[1, 3], [0]])
def test_a_monitored_barrier_names_every_missing_rank(missing: list[int]) -> None:
    results = spawn_ranks(4, miss_the_barrier, missing)
    assert results == [None if r in missing else missing for r in range(4)]


def test_rank_0_may_hold_the_store_and_stays_until_all_have_read_who_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, comes = threading.Event(), barriers._comes

    def comes_late(store: Store, key: str, seconds: float) -> bool:
        if key == "missing":  # rank 1 asks
            assert not done.wait(1), "rank 0 may end now, and the store with it"
        return comes(store, key, seconds)

    def one_rank(group: Group) -> None:
        group.monitored_barrier(120.0)
        if group.rank() == 0:
            done.set()

    monkeypatch.setattr(barriers, "_comes", comes_late)
    run_ranks(2, one_rank)
    assert done.is_set()


class TimeIsOver(Clock):
    """Of a rank whose time was over when the others came."""

    def left(self) -> float:
        return 0.0


def test_rank_0_is_not_missing_while_it_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 comes last and waits for rank 2, when the time of rank 1 is over."""
    asked, comes = threading.Event(), barriers._comes

    def comes_or_not(store: Store, key: str, seconds: float) -> bool:
        if key == "2":
            assert asked.wait(120)
            return False
        if key == "missing":
            asked.set()
            return seconds > 60 and comes(store, key, seconds)
        return comes(store, key, 120.0)

    def one_rank(group: Group) -> None:
        if group.rank() != 2:
            with pytest.raises(MonitoredBarrierError) as caught:
                group.monitored_barrier(120.0)
            assert caught.value.ranks == [2]

    monkeypatch.setattr(barriers, "_comes", comes_or_not)
    monkeypatch.setattr(barriers, "Clock", TimeIsOver)
    run_ranks(3, one_rank)


# -- objects ------------------------------------------------------------------------------------


def carry_objects(meeting: Meeting, backend: str) -> None:
    rank, size = meeting.rank, meeting.size
    with meeting.new_group(backend) as group:
        mine = {
            "rank": rank,
            "text": "é" * rank,
            "list": [1.5, None, b"x"],
            "t": torch.arange(rank),
        }
        everyone = group.all_gather_object(mine)
        assert [e["rank"] for e in everyone] == list(range(size))  # type: ignore[index]
        assert torch.equal(everyone[2]["t"], torch.arange(2))  # type: ignore[index]
        assert group.broadcast_object(["from", rank], root=1) == ["from", 1]
        assert group.gather_object(rank * "z", root=2) == (["", "z", "zz"] if rank == 2 else None)
        parts = [{"for": r} for r in range(size)] if rank == 0 else None
        assert group.scatter_object(parts) == {"for": rank}
        for bad in (group.all_gather_object, group.gather_object):
            with pytest.raises(CodecError) as caught:
                bad(object() if rank == 1 else rank)
            expected = "an object of type" if rank == 1 else "rank 1 has an object"
            assert expected in str(caught.value)
        with pytest.raises(CodecError):
            group.broadcast_object({1: len}, root=0)
        with pytest.raises(CodecError):
            group.scatter_object([1, 2], root=0)
        assert total(group) == 3.0, "the ranks are still in step"


@pytest.mark.parametrize("backend", BACKENDS)
def test_objects_travel_without_pickle_and_others_are_refused(backend: str) -> None:
    spawn_ranks(3, carry_objects, backend)


# -- hooks and ends -----------------------------------------------------------------------------


def test_hooks_see_every_collective_until_they_are_removed() -> None:
    def one_rank(group: Group) -> list[str]:
        seen: list[str] = []
        handle = group.register_hooks(
            before=lambda call: seen.append(f"before {call.kind} {call.nbytes}"),
            after=lambda call: seen.append(f"after {call.kind}"),
            on_error=lambda call, error: seen.append(f"error {call.kind} {type(error).__name__}"),
        )
        group.all_reduce(torch.ones(2))
        work = group.broadcast(torch.ones(1), 0, async_op=True)
        work.wait()
        work.wait()
        handle.remove()
        group.barrier()
        return seen

    for seen in run_ranks(2, one_rank):
        assert seen == [
            "before all_reduce 8",
            "after all_reduce",
            "before broadcast 4",
            "after broadcast",
        ]


def test_a_hook_that_raises_stops_the_call_before_anything_is_sent() -> None:
    def one_rank(group: Group) -> float:
        def refuse(call: Call) -> None:
            raise KeyError(call.kind)

        handle = group.register_hooks(before=refuse)
        with pytest.raises(KeyError, match="all_reduce"):
            total(group)
        handle.remove()
        return total(group)

    assert run_ranks(2, one_rank) == [1.0, 1.0]


def test_a_scaled_sum_leaves_the_tensor_alone_when_the_call_is_stopped() -> None:
    def one_rank(group: Group) -> list[float]:
        def refuse(call: Call) -> None:
            raise KeyError(call.kind)

        half = torch.distributed._make_nccl_premul_sum(0.5)
        tensor = torch.full((2,), 4.0)
        handle = group.register_hooks(before=refuse)
        with pytest.raises(KeyError):
            group.all_reduce(tensor, half)
        assert tensor.tolist() == [4.0, 4.0]
        handle.remove()
        strided = torch.full((2, 2), 4.0).t()
        group.all_reduce(strided, half)
        assert (strided == 4.0).all()
        group.all_reduce(tensor, half)
        return tensor.tolist()

    assert run_ranks(2, one_rank) == [[4.0, 4.0], [4.0, 4.0]]


def test_a_group_is_a_context_and_its_timeout_can_be_changed() -> None:
    def one_rank(group: Group) -> None:
        group.set_timeout(timedelta(seconds=70))
        assert group.timeout == timedelta(seconds=70)
        seen: list[float] = []
        group.register_hooks(before=lambda call: seen.append(call.timeout))
        group.barrier()
        group.barrier(timeout=60)
        assert seen == [70.0, 60.0]
        with group as same:
            assert same is group
            assert "threads" in repr(group)
        assert "shut down" in repr(group)
        with pytest.raises(GroupClosedError, match="shut down"):
            group.barrier()

    run_ranks(2, one_rank)


def test_a_wrapped_group_says_what_it_lacks() -> None:
    def one_rank(group: Group) -> None:
        bare = Group.wrap(torch.distributed.ProcessGroup(0, 1))
        with pytest.raises(UnsupportedError, match="without a store"):
            bare.monitored_barrier()
        with pytest.raises(UnsupportedError):
            bare.split([0])

    run_ranks(1, one_rank)


def reduce_sparse(meeting: Meeting, backend: str) -> Tensor:
    with meeting.new_group(backend) as group:
        indices = torch.tensor([[0, meeting.rank + 1]])
        tensor = torch.sparse_coo_tensor(indices, torch.ones(2, 3), (5, 3), check_invariants=False)
        group.all_reduce(tensor)
        return tensor.to_dense()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_tensors_are_summed(backend: str) -> None:
    expected = torch.tensor([3.0, 1, 1, 1, 0]).unsqueeze(1).expand(5, 3)
    for result in spawn_ranks(3, reduce_sparse, backend):
        assert torch.equal(result, expected)


def wait_too_briefly(meeting: Meeting, backend: str) -> None:
    with meeting.new_group(backend) as group:
        tensor = torch.ones(3)
        store = meeting.store()
        if meeting.rank == 0:
            work = group.all_reduce(tensor, async_op=True)
            with pytest.raises(TimeoutError) if backend == "shm" else pytest.raises(RuntimeError):
                work.wait(timedelta(milliseconds=20))
            store.set("waited", "yes")
            if backend == "shm":  # gloo's work is lost with its wait
                work.wait()
                assert tensor.tolist() == [2, 2, 2]
        else:
            store.wait(["waited"])
            if backend == "shm":
                group.all_reduce(tensor)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wait_that_gives_up_raises_and_the_work_goes_on(backend: str) -> None:
    spawn_ranks(2, wait_too_briefly, backend)
