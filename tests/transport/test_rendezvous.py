"""How ranks meet, and who is let in."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import msgspec
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline._transport import door
from paceline._transport.rendezvous import (
    NONCE_BYTES,
    Neighbours,
    Rendezvous,
    connected,
    prove_hosts,
)
from paceline._transport.terms import Wish
from paceline.errors import RankUnableError, RendezvousError
from paceline.testing import Meeting, spawn_ranks
from tests.groups.descriptors import still_open

MINUTE = timedelta(minutes=1)


def test_ranks_are_put_together_by_whom_they_reach() -> None:
    assert connected([[], [0], [0, 1]]) == [[0, 1, 2]]
    assert connected([[], [], []]) == [[0], [1], [2]]
    assert connected([[], [], [0], [1]]) == [[0, 2], [1, 3]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_any_layout_of_hosts_is_found(hosts: list[int]) -> None:
    reach = [[s for s in range(r) if hosts[s] == hosts[r]] for r in range(len(hosts))]
    found = connected(reach)
    assert sorted(r for part in found for r in part) == list(range(len(hosts)))
    assert all(len({hosts[r] for r in part}) == 1 for part in found)
    assert len(found) == len(set(hosts))


def prove(meeting: Meeting, unable: str) -> tuple[list[list[int]], dict[int, str], int]:
    store = meeting.store()
    before = len(os.listdir("/proc/self/fd"))
    met = prove_hosts(
        store, meeting.rank, meeting.size, MINUTE, unable if meeting.rank == 1 else ""
    )
    return met.components, met.unable, len(os.listdir("/proc/self/fd")) - before


def test_every_rank_gets_the_same_proof_and_no_descriptor_stays_open() -> None:
    for result in spawn_ranks(3, prove, ""):
        assert result == ([[0, 1, 2]], {}, 0)


def test_every_rank_learns_who_is_unable_and_why() -> None:
    for result in spawn_ranks(3, prove, "broken"):
        assert result == ([], {1: "broken"}, 0)


# -- one meeting, its ranks as threads ----------------------------------------------------------


class Memory:
    """A rank's memory with its nonce in it; closed by whoever made it."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.fd = os.memfd_create("test")
        os.write(self.fd, meeting.nonce)


def meet(store: dist.Store, rank: int, size: int, met: dict[int, Neighbours]) -> None:
    with Rendezvous(store, rank, size, MINUTE) as meeting:
        meeting.exchange(Wish("", 0, 0, 0))
        memory = Memory(meeting)
        try:
            meeting.reach(lambda: memory.fd)
            met[rank] = meeting.conclude(lambda neighbours: neighbours.proven(rank))
        finally:
            os.close(memory.fd)


def address_of(store: dist.Store, rank: int) -> bytes:
    return bytes(msgspec.msgpack.decode(store.get(f"card/{rank}"))["address"])


def knock(address: bytes, shown: bytes = b"", fd: int | None = None) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(address)
    if shown:
        with suppress(ConnectionError):  # it was sent away already
            socket.send_fds(stranger, [shown], [] if fd is None else [fd])
    return stranger


def finish(store: dist.Store, first: threading.Thread, met: dict[int, Neighbours]) -> float:
    """Let rank 1 come to rank 0, who waits for it; returns how long that took."""
    start = time.monotonic()
    second = threading.Thread(target=meet, args=(store, 1, 2, met))
    second.start()
    first.join(120)
    second.join(120)
    took = time.monotonic() - start
    for rank in (0, 1):
        assert os.pread(met[rank].segments[1 - rank], NONCE_BYTES, 0) == met[rank].nonces[1 - rank]
        met[rank].close()
    return took


def test_strangers_are_sent_away_and_silent_ones_cost_no_time() -> None:
    store, met = dist.HashStore(), {}
    first = threading.Thread(target=meet, args=(store, 0, 2, met))
    first.start()
    address = address_of(store, 0)
    with open("/dev/null") as file:
        strangers = [knock(address) for _ in range(100)]  # all stay on the line
        strangers += [knock(address, b"x" * 3), knock(address, b"\0" * 24, file.fileno())]
        strangers += [knock(address, b"y" * 24)]
        knock(address).close()
        assert finish(store, first, met) < 50, "it was a second for each of the silent ones"
    for stranger in strangers:
        stranger.close()


def test_of_silent_strangers_only_the_latest_are_kept() -> None:
    opened = door.Door()
    strangers = [knock(opened.address) for _ in range(200)]
    strangers[0].settimeout(60)
    assert strangers[0].recv(1) == b"", "the first was sent away"
    opened.close()
    for stranger in strangers:
        stranger.close()


def test_another_user_is_sent_away_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    monkeypatch.setattr(door, "process_of", lambda connection: None)
    monkeypatch.setattr(door, "hear_hello", heard.append)
    opened = door.Door()
    stranger = knock(opened.address, b"\0" * 24)
    stranger.settimeout(60)
    with suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    stranger.close()
    opened.close()
    assert heard == []


def test_a_meeting_that_nobody_else_comes_to_names_who_is_missing() -> None:
    soon = timedelta(seconds=0.1)
    with (
        Rendezvous(dist.HashStore(), 0, 3, soon) as meeting,
        pytest.raises(RendezvousError, match="no sign of rank 1, 2 of 3"),
    ):
        meeting.exchange(Wish("", 0, 0, 0))


@pytest.mark.parametrize("part", ["reach", "conclude"])
def test_a_rank_that_fails_at_the_meeting_is_named_by_all_at_once(part: str) -> None:
    store, errors = dist.HashStore(), {}

    def come(rank: int) -> None:
        def fail(*_: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        with Rendezvous(store, rank, 3, MINUTE) as meeting:
            meeting.exchange(Wish("", 0, 0, 0))
            memory = Memory(meeting)
            bad = part if rank == 1 else ""
            try:
                meeting.reach(fail if bad == "reach" else lambda: memory.fd)
                meeting.conclude(fail if bad else lambda met: met.proven(rank))
            except RankUnableError as error:
                errors[rank] = error
            finally:
                os.close(memory.fd)

    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [errors[rank].culprit for rank in range(3)] == [1, 1, 1]
    assert all("ulimit -n" in error.reason for error in errors.values())
    assert still_open(before) == 0
