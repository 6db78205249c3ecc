"""The client of etcd: what it asks, and answers that are none."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline._etcd import Condition, Etcd, Put, StoreAddress, parse_store
from paceline.errors import StoreLostError, StoreUrlError
from tests.etcd.server import etcd_server, free_port, no_etcd

SOON = 1.0  # seconds that a question has whose answer does not come
PATIENCE = 300.0  # …and one that is answered


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("etcd://a:1", (("a", 1),)),
        ("etcd://a", (("a", 2379),)),
        ("etcd://a:1,b:2/", (("a", 1), ("b", 2))),
        ("etcd://[::1]:7", (("::1", 7),)),
    ],
)
def test_a_store_is_read(url, servers) -> None:
    assert parse_store(url) == StoreAddress(servers)


def test_a_store_with_tls_names_its_files() -> None:
    found = parse_store("etcds://a:1?ca=/x/ca.pem&cert=/x/c.pem&key=/x/k.pem")
    assert found == StoreAddress((("a", 1),), True, "/x/ca.pem", "/x/c.pem", "/x/k.pem")


@pytest.mark.parametrize(
    "url",
    ["", "etcd://", "http://a:1", "etcd://a:b", "etcd://a:99999", "etcd://a,", "etcd://u@a:1",
     "etcd://a:1?ca=x", "etcds://a:1?user=x", "etcds://a:1?key=k", "etcd://a:1/path"],
)  # fmt: skip
def test_a_store_that_cannot_be_is_refused(url) -> None:
    with pytest.raises(StoreUrlError, match="--store is"):
        parse_store(url)


def test_files_that_are_not_there_are_named() -> None:
    with pytest.raises(StoreUrlError, match=r"/nowhere/ca\.pem"):
        Etcd(parse_store("etcds://a:1?ca=/nowhere/ca.pem"))


@contextmanager
def answering(data: bytes, pause: float = 0.0) -> Iterator[Etcd]:
    """Somebody who answers every question with ``data``, a byte at a time if there is a pause."""
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            try:
                caller, _ = door.accept()
            except OSError:
                continue
            with caller:
                caller.settimeout(PATIENCE)
                try:
                    caller.recv(1 << 16)
                    for piece in [data] if not pause else [bytes([b]) for b in data]:
                        caller.sendall(piece)
                        over.wait(pause)
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(0.05)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Etcd(StoreAddress((door.getsockname(),)), SOON)
        finally:
            over.set()
            thread.join(60)


def http(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x16\x03\x01" + bytes(200),
        http(b"not json"),
        http(b"[]"),
        http(b'{"header":{"revision":"x"}}'),
        http(b'{"header":{"revision":"1"},"responses":[{"response_range":{"kvs":[{"key":"!"}]}}]}'),
        http(b'{"header"', length=100),  # cut off
        http(b"\xff\xfe"),
        http(b"Not Found", "404 Not Found"),
        http(b'{"code":14,"message":"no leader"}', "503 Unavailable"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        http(bytes(5 << 20)),  # too much
    ],
    ids=range(14),
)
def test_an_answer_that_is_none_is_an_error(answer) -> None:
    with answering(answer) as etcd, pytest.raises(StoreLostError, match="does not answer"):
        etcd.read("key")


def test_who_answers_byte_by_byte_has_a_deadline() -> None:
    begun = time.monotonic()
    with answering(http(bytes(10_000)), 0.1) as etcd, pytest.raises(StoreLostError):
        etcd.read("key")
    assert time.monotonic() - begun < 60


def test_a_server_that_is_not_there_is_passed_over() -> None:
    good = b'{"header":{"revision":"4"}}'
    with answering(http(good)) as one:
        both = StoreAddress((("127.0.0.1", free_port()), *one.address.servers))
        assert Etcd(both, PATIENCE).read("key") == {}


def test_a_write_that_may_have_happened_is_not_sent_to_another() -> None:
    good = b'{"header":{"revision":"4"},"succeeded":true}'
    with answering(b"") as dumb, answering(http(good)) as one:
        etcd = Etcd(StoreAddress((*dumb.address.servers, *one.address.servers)), PATIENCE)
        with pytest.raises(StoreLostError):
            etcd.write({"key": Put(b"")}, [])
        assert etcd.write({"key": Put(b"")}, []) == 4  # asked again, of the other first


@pytest.fixture(scope="module")
def etcd(tmp_path_factory) -> Iterator[Etcd]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as where:
        yield Etcd(parse_store(f"etcd://{where}"))


real = pytest.mark.skipif(bool(no_etcd()), reason=no_etcd())


@real
def test_an_etcd_writes_under_conditions_only(etcd) -> None:
    made = etcd.write({"a": Put(b"1")}, [Condition("a", created=0)])
    assert made is not None
    assert etcd.write({"a": Put(b"2")}, [Condition("a", created=0)]) is None
    changed = etcd.write({"a": Put(b"\xff")}, [Condition("a", changed=made)])
    assert changed is not None
    assert etcd.write({"a": Put(b"3")}, [Condition("a", changed=made)]) is None
    found = etcd.read("a", "b")
    assert found.keys() == {"a"}
    assert (found["a"].value, found["a"].created, found["a"].changed) == (b"\xff", made, changed)


@real
def test_a_key_of_an_etcd_goes_with_its_lease(etcd) -> None:
    lease = etcd.grant(60)
    assert etcd.keep(lease)
    assert etcd.write({"leased": Put(b"", lease)}, []) is not None
    etcd.revoke(lease)
    assert etcd.read("leased") == {}
    assert not etcd.keep(lease)
    assert etcd.write({"leased": Put(b"", lease)}, []) is None
    etcd.revoke(lease)  # is over already


@real
def test_the_way_to_an_etcd_has_an_address_of_this_host(etcd) -> None:
    assert etcd.local_address() == "127.0.0.1"
