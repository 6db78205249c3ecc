"""Messages of an shm group that come while others move: who gets them, and when waiting ends.

Transfers are started quietly here: they move only while this rank waits for one of them, so that a
message can be left halfway for as long as a test likes.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import Group
from paceline.errors import (
    CollectiveTimeoutError,
    MismatchError,
    PeerDiedError,
    WaitTimeoutError,
)
from paceline.testing import Meeting, spawn_ranks

from .test_shm_faults import die

NUMEL = 1_000_000  # elements: many times what a channel holds


def start(group: Group, kind: str, tensor: Tensor, peer: int, tag: int, timeout: Any = None) -> Any:
    given, wanted = ((tensor,), ()) if kind == "send" else ((), (tensor,))
    call: Any = group.make_call
    return call(kind, given, wanted, timeout, True, root=peer, tag=tag, quiet=True)


def move_a_little(work: Any) -> None:
    with pytest.raises(WaitTimeoutError):
        work.wait(0.01)


# -- a message that is being put aside --------------------------------------------------------


def send_halfway(group: Group, meeting: Meeting) -> None:
    """Start a message of tag 7, one of tag 5 and another of tag 7; go on when rank 0 has asked."""
    store = meeting.store()
    works = [
        start(group, "send", torch.full((NUMEL,), 7.0), 0, 7),
        start(group, "send", torch.ones(1), 0, 5),
        start(group, "send", torch.full((NUMEL,), 8.0), 0, 7),
    ]
    move_a_little(works[0])
    store.set("half of it is there", "yes")
    store.wait(["asked for"])
    for work in works:
        work.wait()


def ask_halfway(
    group: Group, meeting: Meeting, source: int, sizes: list[int]
) -> tuple[Any, list[tuple[Tensor, Any]]]:
    """Put half of the first message aside by waiting for the second; then ask for tag 7."""
    store = meeting.store()
    store.wait(["half of it is there"])
    other = start(group, "recv", torch.empty(1), 1, 5)
    move_a_little(other)
    wanted = [torch.zeros(size) for size in sizes]
    works = [start(group, "recv", tensor, source, 7) for tensor in wanted]
    store.set("asked for", "yes")
    return other, list(zip(wanted, works, strict=True))


def receive_what_is_put_aside(meeting: Meeting, source: int) -> None:
    with meeting.new_group("shm") as group:
        if meeting.rank == 1:
            send_halfway(group, meeting)
            return
        other, (first, second) = ask_halfway(group, meeting, source, [NUMEL, NUMEL])
        for (tensor, work), value in ((first, 7), (second, 8)):
            work.wait()
            assert (tensor == value).all()
            assert work.source_rank() == 1
        other.wait()


@pytest.mark.parametrize("source", [1, -1], ids=["named", "any"])
def test_receives_that_come_while_a_message_is_put_aside_get_messages_in_order(source: int) -> None:
    spawn_ranks(2, receive_what_is_put_aside, source)


def receive_one_that_does_not_fit(meeting: Meeting) -> str:
    group = meeting.new_group("shm")
    if meeting.rank == 1:
        send_halfway(group, meeting)
        group.barrier()
        with pytest.raises(MismatchError) as caught:
            group.send(torch.ones(1), 0)
    else:
        other, (first, second) = ask_halfway(group, meeting, 1, [NUMEL - 1, NUMEL])
        with pytest.raises(MismatchError) as caught:
            first[1].wait()
        assert not first[0].any()
        second[1].wait()
        assert (second[0] == 8).all()
        other.wait()
        group.barrier()
    group.shutdown()
    return str(caught.value)


def test_a_message_put_aside_that_does_not_fit_is_an_error_at_both_ends() -> None:
    for text in spawn_ranks(2, receive_one_that_does_not_fit):
        assert f"rank 1 called send({4 * NUMEL} bytes" in text
        assert f"rank 0 called recv({4 * NUMEL - 4} bytes" in text


# -- a transfer that cannot go on, while others do --------------------------------------------

LOOK = 0.02  # seconds: longer than the engine goes on without a look at what cannot go on
MESSAGES = 12  # more than it needs to look, and to fill a channel


def send_what_comes_beside(group: Group) -> None:
    if group.rank() == 2:
        for _ in range(MESSAGES):
            group.send(torch.ones(1), 0)
    group.barrier()


def is_over_beside_traffic(group: Group, work: Any) -> bool:
    """Whether ``work`` ends while messages are received that are there, so that nobody waits."""
    for _ in range(MESSAGES):
        group.recv(torch.empty(1), 2)
        if work.is_over():
            return True
        time.sleep(LOOK)
    return False


def wait_for_a_dead_rank_beside_traffic(meeting: Meeting) -> list[int]:
    group = meeting.new_group("shm")
    pids: list[Any] = group.all_gather_object(os.getpid())
    process = os.pidfd_open(pids[1])
    send_what_comes_beside(group)
    if meeting.rank == 1:
        die()
    if meeting.rank == 2:
        meeting.store().wait(["rank 0 knows"])
        return []
    work = start(group, "recv", torch.empty(1), 1, 5)
    assert select.select([process], [], [], 60)[0], "it is dead"
    over = is_over_beside_traffic(group, work)
    meeting.store().set("rank 0 knows", "yes")
    assert over
    with pytest.raises(PeerDiedError) as caught:
        work.wait()
    return list(caught.value.ranks)


def test_a_dead_rank_is_named_while_messages_of_others_keep_coming() -> None:
    results = spawn_ranks(3, wait_for_a_dead_rank_beside_traffic, may_die=[1])
    assert results == [[1], None, []]


def time_out_beside_traffic(meeting: Meeting, kind: str) -> list[int]:
    group, numel = meeting.new_group("shm"), NUMEL if kind == "send" else 1
    send_what_comes_beside(group)
    if meeting.rank > 0:
        meeting.store().wait(["rank 0 knows"])
        return []
    work = start(group, kind, torch.ones(numel), 1, 5, 0.001)
    over = is_over_beside_traffic(group, work)
    meeting.store().set("rank 0 knows", "yes")
    assert over
    with pytest.raises(CollectiveTimeoutError) as caught:
        work.wait()
    return list(caught.value.ranks)


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_transfer_times_out_while_messages_of_others_keep_coming(kind: str) -> None:
    assert spawn_ranks(3, time_out_beside_traffic, kind) == [[1], [], []]
