"""The benchmark over slow wires: its cable behaves like one, and all of its ways train."""

import importlib
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from paceline.testing import Meeting, spawn_ranks

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def wire_link(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("wire_link")


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("wire")


@pytest.fixture
def cable(wire_link: ModuleType) -> Iterator[object]:
    if why := wire_link.unable():
        pytest.skip(why)
    with wire_link.lay_cable(wire_link.Link(megabits=80, milliseconds=20)) as laid:
        yield laid


# -- pure -------------------------------------------------------------------------------------


def frame(size: int, *, kind: int = 0, headers: int = 0, segment: int = 0) -> bytes:
    return struct.pack("=BBHHHH", 0, kind, headers, segment, 0, 0) + bytes(size)


def test_a_frame_that_is_not_cut_up_pays_for_one_segment(wire_link: ModuleType) -> None:
    assert wire_link.size_on_wire(frame(1500)) == 1500 + wire_link.ETHERNET


def test_a_frame_that_is_cut_up_pays_for_the_headers_of_each_segment(wire_link: ModuleType) -> None:
    whole = frame(52 + 3 * 1448 + 1, kind=1, headers=52, segment=1448)  # four segments
    each = 52 + wire_link.ETHERNET
    assert wire_link.size_on_wire(whole) == 4 * each + 3 * 1448 + 1


def run_of(wire: ModuleType, losses: dict[int, float], seconds: float = 1.0) -> object:
    steps = max(losses)
    ends = [seconds * (step + 1) for step in range(steps)]
    sent = [100 * (step + 1) for step in range(steps)]
    return wire.Run(ends, ends, sent, [bytes_ / 2 for bytes_ in sent], losses)


def test_the_loss_is_reached_when_the_mean_of_the_last_three_is_low_enough(
    wire: ModuleType,
) -> None:
    lucky = run_of(wire, {2: 3.0, 4: 1.0, 6: 3.0, 8: 2.0, 10: 1.0})
    outcome = wire.judge([lucky, lucky], target=2.0)
    assert (outcome.reached, outcome.steps, outcome.seconds) == (True, 8, 8.0)
    assert wire.judge([lucky, lucky], target=2.4).steps == 6


def test_a_way_is_as_slow_as_its_slower_rank(wire: ModuleType) -> None:
    losses = {1: 1.0, 2: 1.0, 3: 1.0}
    runs = [run_of(wire, losses, seconds=1.0), run_of(wire, losses, seconds=2.0)]
    outcome = wire.judge(runs, target=1.0)
    assert (outcome.seconds, outcome.sent, outcome.payload) == (6.0, 100.0, 50.0)


def test_a_way_that_never_reaches_the_loss_says_so(wire: ModuleType) -> None:
    own = run_of(wire, {1: 2.0, 2: 2.0, 3: 2.0})
    assert not wire.judge([own, own], target=1.0).reached


# -- over a cable -----------------------------------------------------------------------------


def send_and_wait(meeting: Meeting, hosts: tuple, size: int) -> tuple[float, int]:
    """Rank 0 sends so many bytes and waits for one in return; its seconds, and bytes it sent."""
    hosts[meeting.rank].enter()
    store = meeting.store()
    if meeting.rank == 1:
        with socket.create_server((hosts[1].address, 5000)) as server:
            store.set("listens", "yes")
            peer, _ = server.accept()
            with peer:
                left = size
                while left:
                    left -= len(peer.recv(min(left, 1 << 20)))
                peer.sendall(b"!")
        return 0.0, hosts[1].sent()
    store.wait(["listens"])
    with socket.create_connection((hosts[1].address, 5000)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        peer.sendall(bytes(size))
        assert peer.recv(1) == b"!"
        return time.perf_counter() - began, hosts[0].sent()


def test_a_message_takes_at_least_the_delay_there_and_back(cable) -> None:
    (seconds, _), _ = spawn_ranks(2, send_and_wait, cable.hosts, 1)
    assert seconds >= 0.040


def test_bytes_take_at_least_what_the_rate_says_and_are_counted(cable) -> None:
    size = 2_000_000
    (seconds, sent), _ = spawn_ranks(2, send_and_wait, cable.hosts, size)
    assert seconds >= 8 * size / 80e6 + 0.040
    assert sent >= size


def test_nothing_is_left_of_a_cable(wire_link: ModuleType) -> None:
    if why := wire_link.unable():
        pytest.skip(why)
    with wire_link.lay_cable(wire_link.Link(100, 1)) as cable:
        names = [host.namespace for host in cable.hosts]
        assert all(Path("/run/netns", name).exists() for name in names)
    assert not any(Path("/run/netns", name).exists() for name in names)
    assert cable.told["cpu"] > 0


# -- the benchmark itself ---------------------------------------------------------------------


@pytest.mark.slow
def test_every_way_trains_and_is_told_of(wire: ModuleType, tmp_path: Path) -> None:
    if why := wire.unable():
        pytest.skip(why)
    saved = tmp_path / "runs.json"
    script = str(BENCHMARKS / "wire.py")
    command = [sys.executable, script, "--toy", "--links", "1000", "--save", str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (runs,) = json.loads(saved.read_text()).values()
    assert set(runs) == set(wire.WAYS)
    for way in wire.WAYS:
        assert f"| {way} |" in done.stdout
