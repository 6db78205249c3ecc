"""The side channel of a job under launchers: through their folders, and between hosts by TLS.

Two launchers of one machine stand for two hosts: their processes have no folder in common.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from paceline._doors import AGENT, GONE, OUT, SIDE, SIDE_DOOR, JobKey, Porter, SideDoor, Wanted
from paceline._doors.tls import calling
from paceline.recorder.account import Silence
from paceline.recorder.channel import ask, tell
from paceline.recorder.peers import Letter, Peers
from paceline.recorder.places import Address, UnreachableError, is_far
from tests.doors.test_strangers import as_another_user, attacked, flood, garbage, half_handshakes
from tests.recorder.test_channel import Office, with_key
from tests.waiting import until

ADDRESS = "127.0.0.7"
DEADLINE = 600.0


@pytest.fixture(scope="module")
def key() -> JobKey:
    return JobKey.make()


class Host:
    """A launcher, and a process of it that listens."""

    def __init__(self, folder: Path, key: JobKey, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self.side, self.porter = SideDoor.make(folder), Porter()
        monkeypatch.setenv("PACELINE_RECORDER_HOST", ADDRESS)
        self.side.open(self.porter, key.identity(AGENT), ADDRESS)
        self._environment = monkeypatch
        self.enter()
        self.office = Office()

    def enter(self) -> None:
        """Be a process of this host from now on."""
        self._environment.setenv(SIDE_DOOR, self.side.folder)

    @property
    def port(self) -> tuple[str, int]:
        return self.office.address.host, self.office.address.port

    def close(self) -> None:
        self.office.listener.close()
        self.porter.close()


Pair = tuple[Host, Host]


@pytest.fixture
def hosts(tmp_path: Path, key: JobKey, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    pair = Host(tmp_path / "a", key, monkeypatch), Host(tmp_path / "b", key, monkeypatch)
    pair[0].enter()
    yield pair
    for host in pair:
        host.close()


def test_a_process_of_another_host_is_asked_and_told_through_the_launchers(hosts: Pair) -> None:
    far = hosts[1].office
    assert is_far(far.address)
    assert not is_far(hosts[0].office.address)
    assert far.address.host == ADDRESS, "the interface that was asked for"
    assert ask(far.address, b"where?", DEADLINE) == b"answer to where?"
    assert ask(far.address, b"all" * 300, DEADLINE) == b"answer to " + b"all" * 300 * 500
    tell(far.address, b"goodbye" * 4000)
    assert until(lambda: far.told == [b"goodbye" * 4000])


def test_a_process_that_has_ended_is_told_from_one_that_cannot_be_reached(hosts: Pair) -> None:
    address, peers = hosts[1].office.address, Peers()
    peers.patience = DEADLINE
    hosts[1].office.listener.close()
    with pytest.raises(ConnectionRefusedError):
        ask(address, b"hello?", DEADLINE)
    assert peers.ask(address) is Silence.ENDED
    hosts[1].porter.close()  # its launcher is killed: what has become of its ranks is not known
    with pytest.raises(UnreachableError):
        ask(address, b"hello?", DEADLINE)
    assert peers.ask(address) is Silence.UNKNOWN
    hosts[0].porter.close()
    with pytest.raises(UnreachableError, match="leads nowhere"):
        ask(address, b"hello?", DEADLINE)


def test_the_key_of_the_job_does_not_open_what_needs_the_key_of_the_rank(hosts: Pair) -> None:
    far = hosts[1].office
    with pytest.raises(OSError):
        ask(with_key(far.address, b"x" * 32), b"let me in", DEADLINE)
    assert ask(far.address, b"still there?", DEADLINE)
    assert far.asked == [b"still there?"]


@pytest.mark.parametrize("name", ["../out", "address", "..", "", "a/b", "a" * 65, "out\0", "x y"])
def test_a_name_leads_to_no_file_beside_the_sockets(hosts: Pair, key: JobKey, name: str) -> None:
    context = calling(key.identity(AGENT), SIDE)
    plain = socket.create_connection(hosts[1].port, DEADLINE)
    with context.wrap_socket(plain, server_hostname=AGENT) as talk:
        talk.sendall(bytes([len(name)]) + name.encode())
        assert talk.recv(1) in (b"", GONE)
    assert ask(hosts[1].office.address, b"fine?", DEADLINE)


@pytest.mark.parametrize(
    "kind",
    [
        flood,
        pytest.param(garbage, marks=pytest.mark.slow),
        pytest.param(half_handshakes, marks=pytest.mark.slow),
    ],
)
def test_strangers_at_the_port_keep_no_rank_from_asking(
    hosts: Pair, key: JobKey, kind: Callable[..., None]
) -> None:
    far = hosts[1].office
    with attacked(kind, hosts[1].port, key):
        for number in range(10):
            question = b"%d" % number
            assert ask(far.address, question, DEADLINE) == b"answer to " + question
    assert len(far.asked) == 10, "and nobody else was heard"


def test_garbage_at_the_launchers_socket_is_hung_up_on(hosts: Pair) -> None:
    said = [b"", b"\xff", b"\x04what", Wanted(True, ("127.0.0.1", 9), "x").pack(), os.urandom(300)]
    for words in said:
        with socket.socket(socket.AF_UNIX) as talk:
            talk.settimeout(DEADLINE)
            talk.connect(str(Path(hosts[0].side.folder, OUT)))
            talk.sendall(words)
            talk.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                assert talk.recv(1) == b""
    assert ask(hosts[1].office.address, b"fine?", DEADLINE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_hung_up_on_where_any_process_can_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SIDE_DOOR, raising=False)
    office = Office()
    try:
        assert office.listener.path.startswith("\0"), "there is no launcher"
        assert as_another_user(office.listener.path) == "hung up"
        assert ask(office.address, b"fine?", DEADLINE) == b"answer to fine?"
    finally:
        office.listener.close()


def test_400_idle_connections_keep_nobody_waiting(hosts: Pair) -> None:
    near = hosts[0].office
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(near.knock())
        assert ask(near.address, b"busy?", DEADLINE) == b"answer to busy?"


def test_a_letter_that_was_overheard_is_not_heard_again() -> None:
    peers = Peers()
    first, second = (Letter(1, 0, "process", number) for number in (1, 2))
    heard = [peers._is_old(letter) for letter in (first, second, first, second)]
    assert heard == [False, False, True, True]
    assert not peers._is_old(Letter(1, 0, "another process", 1))
    assert not peers._is_old(Letter(2, 0, "process", 1)), "another group has letters of its own"


def test_an_address_of_an_older_kind_is_read() -> None:
    old = {"process": "p", "host": "h", "port": 1, "key": b"k", "machine": "m"}
    data = msgspec.msgpack.encode(old | {"network": "n", "board": 3})
    assert msgspec.msgpack.decode(data, type=Address).path == ""
