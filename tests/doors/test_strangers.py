"""Attacks on the port of a job: who belongs to it is served meanwhile, and nobody else ever is.

Each attack lasts as long as the good caller's talks do. How long those took is printed; what
decides is that all were answered, that the service heard nothing else, and nothing stays behind.
"""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.synchronize import Event

import pytest

from paceline._doors import AGENT, WELCOME, Identity, JobKey, Porter, connect, listen
from paceline._doors.callers import CALLERS
from paceline._doors.tls import HEARINGS
from paceline.errors import StrangerError
from tests.doors.echoes import Echo
from tests.doors.ports import ports_here
from tests.waiting import until

TALKS = 40
Address = tuple[str, int]


@pytest.fixture(scope="module")
def key() -> JobKey:
    return JobKey.make()


@pytest.fixture
def house(tmp_path, key):
    with contextlib.ExitStack() as stack:
        echo = Echo(tmp_path / "house" / "echo")
        stack.callback(echo.close)
        porter = Porter()
        stack.callback(porter.close)
        listener = listen("127.0.0.1", 0)
        porter.serve(listener, key.identity(AGENT), {"echo": echo.path})
        yield listener.getsockname()[:2], echo, porter


def client_hello(key: JobKey) -> bytes:
    """What a caller says first, without the rest."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = key.identity(AGENT).calling()
    half = context.wrap_bio(incoming, outgoing, server_hostname=AGENT)
    with contextlib.suppress(ssl.SSLWantReadError):
        half.do_handshake()
    return outgoing.read()


@contextlib.contextmanager
def attacked(kind: Callable, address: Address, key: JobKey) -> Iterator[None]:
    """An attack over and over, by another process, for as long as the block lasts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.testing", "paceline.groups"])
    begun, over = context.Event(), context.Event()
    attacker = context.Process(target=go_on, args=(kind, address, key, begun, over))
    attacker.start()
    try:
        assert begun.wait(300)  # the first one starts the server, which imports torch
        yield
    finally:
        over.set()
        attacker.join(120)
        assert attacker.exitcode == 0
        attacker.close()


def go_on(kind: Callable, address: Address, key: JobKey, begun: Event, over: Event) -> None:
    kept: list[socket.socket] = []
    attack = kind(address, key, kept)
    while not over.is_set() and os.getppid() != 1:
        with contextlib.suppress(OSError):
            attack()
        begun.set()


def talk_to(address: Address, key: JobKey, label: str) -> None:
    """Talk on a connection that is open, and on new ones; print the longest it took."""
    identity = key.identity(AGENT)
    open_, new = [], []
    with connect(address, identity, "echo", 30) as talk:
        for number in range(TALKS):
            began = time.monotonic()
            talk.sendall(b"good")
            assert talk.recv(4) == b"good"
            open_.append(time.monotonic() - began)
            if number % 8 == 0:
                began = time.monotonic()
                connect(address, identity, "echo", 30).close()
                new.append(time.monotonic() - began)
    print(f"{label}: open connections at most {max(open_):.4f} s, new ones {max(new):.4f} s")


def only_good_words(echo: Echo) -> bool:
    return set(echo.heard) <= set(b"good")


def garbage(address: Address, key: JobKey, kept: list) -> Callable[[], None]:
    def attack() -> None:
        with socket.create_connection(address, 5) as talk:
            talk.sendall(os.urandom(4096))

    return attack


def plain_words(address: Address, key: JobKey, kept: list) -> Callable[[], None]:
    def attack() -> None:
        with socket.create_connection(address, 5) as talk:
            talk.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            talk.settimeout(1)
            talk.recv(1)

    return attack


def half_handshakes(address: Address, key: JobKey, kept: list) -> Callable[[], None]:
    hello = client_hello(key)

    def attack() -> None:
        if len(kept) < 200:
            kept.append(socket.create_connection(address, 5))
            kept[-1].sendall(hello)
        time.sleep(0.001)

    return attack


def slow_words(address: Address, key: JobKey, kept: list) -> Callable[[], None]:
    """One byte at a time on many connections (slow loris)."""
    hello = client_hello(key)
    said = itertools.count()

    def attack() -> None:
        if len(kept) < 100:
            kept.append(socket.create_connection(address, 5))
        number = next(said) % len(hello)
        for talk in list(kept):
            with contextlib.suppress(OSError):
                talk.send(hello[number : number + 1])
        time.sleep(0.01)

    return attack


def flood(address: Address, key: JobKey, kept: list) -> Callable[[], None]:
    def attack() -> None:
        socket.create_connection(address, 5).close()

    return attack


def flood_of_hellos(address: Address, key: JobKey, kept: list) -> Callable[[], None]:
    """Each costs the host a signature, and the stranger nothing; none is finished."""
    hello = client_hello(key)

    def attack() -> None:
        kept.append(socket.create_connection(address, 5))
        kept[-1].sendall(hello)
        if len(kept) > 2 * CALLERS:
            kept.pop(0).close()

    return attack


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", [garbage, plain_words, half_handshakes, slow_words, flood])
def test_the_job_is_served_while_strangers_are_at_its_port(house, key, kind) -> None:
    address, echo, porter = house
    with attacked(kind, address, key):
        talk_to(address, key, kind.__name__)
    assert only_good_words(echo)
    assert echo.waits_for(1 + TALKS // 8)
    assert kind is slow_words or until(lambda: porter.strangers.total() > 0)


@pytest.mark.slow
def test_who_is_in_is_served_while_strangers_flood_the_port_with_hellos(house, key) -> None:
    address, echo, porter = house
    with connect(address, key.identity(AGENT), "echo", 30) as talk:
        talk.settimeout(60)
        with attacked(flood_of_hellos, address, key):
            end = time.monotonic() + 60
            for number in itertools.count():
                talk.sendall(b"good")
                assert talk.recv(4) == b"good"
                if number >= TALKS // 4 and porter.strangers.total() > 0:
                    break
                assert time.monotonic() < end, "nobody was turned away"
    assert only_good_words(echo)
    connect(address, key.identity(AGENT), "echo", 30).close()


def test_400_idle_sockets_keep_nobody_out(house, key) -> None:
    address, echo, porter = house
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection(address, 10))
        talk_to(address, key, "400 idle sockets")
    turned_away = porter.strangers["too many"] + porter.strangers["too slow"]
    assert turned_away >= 400 - CALLERS - 1
    assert porter.strangers["too many"] > 0
    assert echo.waits_for(1 + TALKS // 8)


def hang_up(listener: socket.socket, key: JobKey, times: int) -> None:
    """Be a host that hangs up so often after the handshake, then welcomes."""
    for number in range(times + 1):
        plain, _ = listener.accept()
        with key.identity(AGENT).answering().wrap_socket(plain, server_side=True) as talk:
            if number == times:
                talk.sendall(WELCOME)


@pytest.mark.parametrize("times", [HEARINGS - 1, HEARINGS])
def test_a_caller_tries_again_after_a_hang_up_and_believes_the_last_one(key, times) -> None:
    with listen("127.0.0.1", 0) as listener:
        host = threading.Thread(target=hang_up, args=(listener, key, times), daemon=True)
        host.start()
        address = listener.getsockname()[:2]
        if times == HEARINGS:
            refused(address, key.identity(AGENT), "the certificate of this host")
            connect(address, key.identity(AGENT), "echo", 10).close()  # the host waits for one more
        else:
            connect(address, key.identity(AGENT), "echo", 10).close()
        host.join(60)
        assert not host.is_alive()


def refused(address: Address, identity: Identity, reason: str) -> None:
    with pytest.raises(StrangerError, match=reason):
        connect(address, identity, "echo", 10)


def test_a_certificate_of_another_job_is_refused_by_both_sides(house, key) -> None:
    address, echo, porter = house
    stranger = JobKey.make().identity(AGENT)
    refused(
        address, stranger, "its certificate is not valid"
    )  # what the good host shows is foreign
    believes_all = Identity(key.authority, stranger.certificate, stranger.key)
    refused(address, believes_all, "the certificate of this host")
    assert echo.came == 0
    assert porter.strangers["TLSV1_ALERT_UNKNOWN_CA"] == 1


def test_a_certificate_whose_time_is_over_is_refused(house, key) -> None:
    address, echo, _ = house
    refused(address, key.identity(AGENT, life=timedelta(hours=-1)), "the certificate of this host")
    assert echo.came == 0


def test_nobody_gets_in_without_a_certificate_or_with_an_older_tls(house, key) -> None:
    address, echo, _ = house
    for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = version
        context.set_alpn_protocols(["echo"])
        with (
            pytest.raises((ssl.SSLError, ConnectionError)),
            socket.create_connection(address, 10) as plain,
            context.wrap_socket(plain) as talk,
        ):
            talk.settimeout(60)
            if not talk.recv(1):
                raise ConnectionResetError
    assert echo.came == 0


def test_a_certificate_that_a_rank_signed_with_its_own_is_none(house, key) -> None:
    """Only the authority signs: a chain through another certificate is too long."""
    address, echo, _ = house
    middle = key.identity(AGENT)
    forged = JobKey(middle.certificate, middle.key).identity(AGENT)
    chain = Identity(key.authority, forged.certificate + middle.certificate, forged.key)
    refused(address, chain, "the certificate of this host")
    assert echo.came == 0


def test_a_talk_that_was_overheard_cannot_be_held_again(house, key) -> None:
    address, echo, _ = house
    said = overhear(address, key)
    heard, came = bytes(echo.heard), echo.came
    with socket.create_connection(address, 10) as talk:
        talk.sendall(said)
        talk.settimeout(60)
        with contextlib.suppress(ConnectionError):
            while talk.recv(65536):
                pass
    assert (bytes(echo.heard), echo.came) == (heard, came)


def overhear(address: Address, key: JobKey) -> bytes:
    """All that a good caller sends, as somebody between the two hosts sees it."""
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def pass_on() -> None:
            here, there = between.accept()[0], socket.create_connection(address, 10)
            back = threading.Thread(target=pump, args=(there, here), daemon=True)
            back.start()
            pump(here, there, seen)
            back.join(60)
            here.close(), there.close()

        worker = threading.Thread(target=pass_on, daemon=True)
        worker.start()
        with connect(between.getsockname()[:2], key.identity(AGENT), "echo", 10) as talk:
            talk.sendall(b"good")
            assert talk.recv(4) == b"good"
        worker.join(60)
    return bytes(seen)


def pump(source: socket.socket, target: socket.socket, seen: bytearray | None = None) -> None:
    with contextlib.suppress(OSError):
        while said := source.recv(65536):
            if seen is not None:
                seen += said
            target.sendall(said)
        target.shutdown(socket.SHUT_WR)


def test_a_pickle_is_not_opened(house, key, tmp_path) -> None:
    address, echo, _ = house
    bomb = pickle.dumps(Bomb(str(tmp_path / "ran")))
    with socket.create_connection(address, 10) as talk:
        talk.sendall(bomb)
        talk.settimeout(60)
        with contextlib.suppress(ConnectionError):
            while talk.recv(4096):
                pass
    assert echo.came == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["another job", "another name", "plain", "silent"])
def test_who_pretends_to_be_the_first_host_is_found_out(key, kind) -> None:
    """Nothing is said to it, and the caller learns why within its time."""
    names = {"another job": JobKey.make().identity(AGENT), "another name": key.identity("rank")}
    with socket.create_server(("127.0.0.1", 0)) as fake:
        heard = []

        def pretend() -> None:
            talk = fake.accept()[0]
            with contextlib.suppress(OSError), talk:
                if kind == "silent":
                    talk.recv(65536), talk.recv(1)
                elif kind == "plain":
                    talk.sendall(b"welcome, send me your keys\r\n")
                    talk.recv(65536), talk.recv(1)
                else:
                    context = names[kind].answering()
                    context.verify_mode = ssl.CERT_NONE
                    with context.wrap_socket(talk, server_side=True) as opened:
                        heard.append(opened.recv(1))

        worker = threading.Thread(target=pretend, daemon=True)
        worker.start()
        with pytest.raises(StrangerError):
            connect(fake.getsockname()[:2], key.identity(AGENT), "echo", 1)
        worker.join(60)
    assert not heard or heard == [b""]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_sent_away_from_the_unix_socket(key, tmp_path) -> None:
    from paceline._doors import bind_private

    tmp_path.chmod(0o755)
    path = tmp_path / "here" / "echo"
    porter = Porter()
    try:
        porter.reach(bind_private(path), ("127.0.0.1", 9), key.identity(AGENT), "echo")
        path.parent.chmod(0o755)
        path.chmod(0o666)  # as if the folder did not keep them out already
        for folder in [path, *path.parents][:-1]:
            if folder.stat().st_mode & 0o005 == 0:
                folder.chmod(folder.stat().st_mode | 0o005)
        assert as_another_user(path) == "hung up"
        assert porter.strangers["another user"] == 1
    finally:
        porter.close()


def as_another_user(path: os.PathLike) -> str:
    """How a process of another user fares that connects to ``path``."""
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([]), os.setgid(65534), os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as talk:
                talk.settimeout(60)
                talk.connect(str(path))
                os.write(tells, b"hung up" if talk.recv(1) == b"" else b"let in")
        except ConnectionError:
            os.write(tells, b"hung up")
        except OSError as error:
            os.write(tells, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(tells)
    os.waitpid(child, 0)
    with os.fdopen(told) as file:
        return file.read()


def test_one_address_is_listened_on_and_no_other() -> None:
    with listen("127.0.0.3", 0) as listener:
        port = listener.getsockname()[1]
        places = {place for place in ports_here() if place.endswith(f":{port:04X}")}
        assert places == {f"0300007F:{port:04X}"}
