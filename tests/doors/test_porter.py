"""Bytes of a service reach other hosts that show a certificate of the job, and nobody else."""

import contextlib
import os
import socket
import threading

import pytest

from paceline._doors import AGENT, JobKey, Porter, bind_private, connect, connect_private, listen
from paceline.errors import StrangerError
from tests.doors.echoes import Echo
from tests.waiting import until


@pytest.fixture(scope="module")
def key() -> JobKey:
    return JobKey.make()


@pytest.fixture
def house(tmp_path, key):
    """An echo that other hosts reach: (its address, the echo, its porter)."""
    with contextlib.ExitStack() as stack:
        echo = Echo(tmp_path / "house" / "echo")
        stack.callback(echo.close)
        porter = Porter()
        stack.callback(porter.close)
        listener = listen("127.0.0.1", 0)
        porter.serve(listener, key.identity(AGENT), {"echo": echo.path})
        yield listener.getsockname()[:2], echo, porter


def test_who_has_a_certificate_of_the_job_reaches_the_service(house, key) -> None:
    address, _, _ = house
    with connect(address, key.identity(AGENT), "echo", 10) as talk:
        talk.sendall(b"hello")
        assert talk.recv(5) == b"hello"
        assert talk.version() == "TLSv1.3"


def test_a_service_of_another_host_has_a_unix_socket_here(house, key, tmp_path) -> None:
    address, _, _ = house
    here = tmp_path / "here" / "echo"
    relay = Porter()
    try:
        relay.reach(bind_private(here), address, key.identity(AGENT), "echo")
        much = os.urandom(3_000_000)
        with connect_private(here, 20) as talk:
            threading.Thread(target=talk.sendall, args=(much,), daemon=True).start()
            found = bytearray()
            while len(found) < len(much):
                found += talk.recv(1 << 20)
        assert found == much
    finally:
        relay.close()


def test_who_asks_for_a_service_that_there_is_none_of_is_hung_up_on(house, key) -> None:
    address, echo, _ = house
    with pytest.raises(StrangerError):
        connect(address, key.identity(AGENT), "another", 10)
    assert echo.came == 0


def test_a_service_that_has_ended_is_told_as_a_hang_up(house, key) -> None:
    address, echo, _ = house
    echo.close()
    with pytest.raises(ConnectionError):
        connect(address, key.identity(AGENT), "echo", 10)


def test_closing_a_porter_hangs_up_on_all_and_gives_the_port_back(tmp_path, key) -> None:
    echo = Echo(tmp_path / "echo")
    before = threading.active_count()
    porter = Porter()
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()[:2]
    porter.serve(listener, key.identity(AGENT), {"echo": echo.path})
    with connect(address, key.identity(AGENT), "echo", 10) as talk:
        talk.sendall(b"x")
        assert talk.recv(1) == b"x"
        porter.close()
        with contextlib.suppress(ConnectionError):
            assert talk.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 1)
    # One is the echo's own, until it hears of it.
    assert until(lambda: threading.active_count() <= before + 1)
    echo.close()


def test_a_unix_socket_in_a_folder_that_others_write_to_is_refused(tmp_path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="other users can write"):
        bind_private(shared / "socket")
    assert list(shared.iterdir()) == []
