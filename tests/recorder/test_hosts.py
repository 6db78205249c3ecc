"""The side channel between two hosts (network namespaces, ``tests/groups/netns.py``)."""

import os
import queue
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

import paceline
from paceline import recorder
from paceline.recorder.peers import Silence
from paceline.recorder.watch import watch
from paceline.testing import Meeting, spawn_ranks
from tests.groups import netns
from tests.recorder.patience import await_line, be_patient
from tests.recorder.test_verdicts import DEADLINE, WARNING, Ear

Pair = tuple[netns.Host, netns.Host]
PORT = 29517  # the namespaces are the test's own


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pair]:
    if why := netns.unable():
        pytest.skip(f"two hosts are needed: {why}")
    with netns.two_hosts() as pair:
        yield pair


def wait_across(meeting: Meeting, hosts: Pair) -> tuple[str, str]:
    be_patient(DEADLINE)
    hosts[meeting.rank].enter()
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    patience = timedelta(seconds=DEADLINE)
    store = TCPStore(hosts[0].address, PORT, 2, meeting.rank == 0, patience)
    group = paceline.new_group("gloo", store=store, rank=meeting.rank, world_size=2)
    group.barrier()
    watch.look()
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    signal = meeting.store(patience)  # a file: both hosts have it
    if meeting.rank == 1:
        signal.wait(["explained"])  # rank 1 is on the other host
    else:
        await_line(group.board, 1, "# rank 1 is on the other host")
        sys.stderr = Ear(said)
        recorder.configure(warn_after=WARNING)
        threading.Thread(target=lambda: signal.set("explained", said.get())).start()
    group.all_reduce(torch.zeros(3))
    listens = watch.peers._listener
    assert listens is not None
    group.barrier()
    group.shutdown()
    return signal.get("explained").decode(), listens.host


def test_a_rank_on_another_host_tells_where_it_is(hosts: Pair) -> None:
    (text, first), (_, second) = spawn_ranks(2, wait_across, hosts, deadline=DEADLINE)
    assert "Rank 1 is missing" in text
    assert "# rank 1 is on the other host" in text
    assert (first, second) == (hosts[0].address, hosts[1].address), "each on the cable only"


def ask_past_loopback(meeting: Meeting, hosts: Pair) -> Silence:
    hosts[meeting.rank].enter()  # but its environment says that all ranks are on one host
    group = meeting.new_group("gloo")
    group.barrier()
    said = watch.peers.hear(group.board, [1 - meeting.rank])[1 - meeting.rank]
    group.barrier()
    group.shutdown()
    return said


def test_a_rank_that_cannot_be_reached_is_not_taken_for_dead(hosts: Pair) -> None:
    both = spawn_ranks(2, ask_past_loopback, hosts, deadline=DEADLINE)
    assert both == [Silence.UNKNOWN, Silence.UNKNOWN]
