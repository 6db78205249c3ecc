"""How ranks meet, and who is let in."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline._transport.rendezvous import (
    NONCE_BYTES,
    Neighbours,
    connected,
    meet_neighbours,
    prove_hosts,
)
from paceline.errors import RendezvousError
from paceline.testing import Meeting, spawn_ranks

TEN = timedelta(seconds=10)


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


def prove(meeting: Meeting) -> tuple[list[list[int]], dict[int, str], int]:
    store = meeting.store()
    before = len(os.listdir("/proc/self/fd"))
    met = prove_hosts(store, meeting.rank, meeting.size, TEN, "broken" if meeting.rank == 1 else "")
    return met.components, met.unable, len(os.listdir("/proc/self/fd")) - before


def test_every_rank_gets_the_same_proof_and_no_descriptor_stays_open() -> None:
    for result in spawn_ranks(3, prove):
        assert result == ([[0, 1, 2]], {1: "broken"}, 0)


def _memory(nonce: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, nonce)
    return fd


def test_a_stranger_without_the_token_is_sent_away_and_the_meeting_goes_on() -> None:
    import msgspec

    store = dist.HashStore()
    nonces = [bytes([r]) * NONCE_BYTES for r in range(2)]
    memory = [_memory(nonce) for nonce in nonces]
    met: dict[int, Neighbours] = {}

    def rank(r: int) -> None:
        met[r] = meet_neighbours(store, r, 2, TEN, memory[r], nonces[r])

    first = threading.Thread(target=rank, args=(0,))
    first.start()
    address = msgspec.msgpack.decode(store.get("card/0"))["address"]
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(4)]
    for stranger, shown in zip(strangers, (b"", b"", b"x" * 3, b"\0" * 24), strict=True):
        stranger.connect(address)  # silent, silent, too short, a wrong token
        if shown:
            socket.send_fds(stranger, [shown], [memory[1]])
    strangers[0].close()  # the other silent one stays on the line
    second = threading.Thread(target=rank, args=(1,))
    second.start()
    first.join(20)
    second.join(20)
    assert os.pread(met[0].segments[1], NONCE_BYTES, 0) == nonces[1]
    assert os.pread(met[1].segments[0], NONCE_BYTES, 0) == nonces[0]
    assert met[0].components == met[1].components == [[0, 1]]
    for neighbours in met.values():
        neighbours.close()
    for stranger in strangers:
        stranger.close()
    for fd in memory:
        os.close(fd)


def test_a_meeting_that_nobody_else_comes_to_names_who_is_missing() -> None:
    fd = _memory(b"\0" * NONCE_BYTES)
    with pytest.raises(RendezvousError, match="no sign of rank 1, 2 of 3"):
        meet_neighbours(dist.HashStore(), 0, 3, timedelta(seconds=0.1), fd, b"\0" * NONCE_BYTES)
    os.close(fd)
