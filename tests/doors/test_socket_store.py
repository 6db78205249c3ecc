"""The store of a run on one machine: torch's in all that ranks see, and nobody else's."""

import contextlib
import gc
import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from _paceline_store import Lines, SocketStore, store_at
from paceline._members import StoreHost
from paceline.testing import spawn_ranks

MINUTE = timedelta(seconds=60)


@pytest.fixture
def host(tmp_path):
    made = StoreHost(tmp_path / "store" / "socket")
    made.begin(1)
    yield made
    made.close()


@pytest.fixture(params=["itself", "behind a prefix"])
def store(host, request):
    """Behind a PrefixStore all calls come from C++."""
    made = SocketStore(Lines(host.path), 1, MINUTE)
    yield made if request.param == "itself" else dist.PrefixStore("p", made)
    made.lines.close()


def test_it_answers_as_torchs_own_store_does(store) -> None:
    torchs = dist.HashStore()

    def answers(found: dist.Store) -> list:
        found.set("a", "1")
        found.set("b", b"\x00\xff")
        said = [found.get("a"), found.get("b"), found.add("n", 5), found.add("n", -7)]
        said += [found.check(["a", "b"]), found.check(["a", "missing"])]
        said += [found.compare_set("a", "2", "3"), found.compare_set("a", "1", "3")]
        said += [found.compare_set("new", "", "x"), found.compare_set("none", "y", "x")]
        said += [found.delete_key("a"), found.delete_key("a"), found.num_keys()]
        found.append("b", "z")
        found.multi_set(["c", "d"], ["4", "5"])
        found.wait(["c", "d"])
        return [*said, found.multi_get(["b", "c", "d"]), found.has_extended_api()]

    assert answers(store) == answers(torchs)


def test_a_key_that_does_not_come_ends_the_wait_in_time_as_torch_says_it(store) -> None:
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="wait timeout after 50ms"):
        store.wait(["never"], timedelta(milliseconds=50))
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError, match="never"):
        store.get("never")
    assert time.monotonic() - began < 30


def test_one_that_is_closed_at_once_leaves_no_door_open(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", lambda thread: None)
        host = StoreHost(tmp_path / "store" / "socket")
        patches.setattr(threading.Thread, "join", lambda thread, seconds: None)
        host.close()  # before its thread has run
    host._thread.start()
    host._thread.join(120)
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as late:
        late.connect(host.path)


def test_who_comes_while_it_closes_is_hung_up_on(tmp_path, monkeypatch) -> None:
    host, go_on = StoreHost(tmp_path / "store" / "socket"), threading.Event()
    host.begin(1)
    join = host._thread.join

    def let_it_go_on(seconds: float) -> None:
        go_on.set()
        join(120)

    monkeypatch.setattr(host._thread, "join", let_it_go_on)
    host._loop.call_soon_threadsafe(go_on.wait, 120)
    with socket.socket(socket.AF_UNIX) as late:
        late.settimeout(120)
        late.connect(host.path)  # it is let in in the turn in which the loop stops
        host.close()
        host.close()
        with contextlib.suppress(ConnectionResetError):  # it was still at the door
            assert late.recv(1) == b""
    gc.collect()  # and nothing is left open, which would be a warning


def test_who_waits_holds_up_no_other_thread(store) -> None:
    got = []
    waiter = threading.Thread(target=lambda: got.append(store.get("late")), daemon=True)
    waiter.start()
    for number in range(20):
        store.set(f"k{number}", "x")
    store.set("late", "now")
    waiter.join(120)
    assert got == [b"now"]


def test_queues_are_there(host) -> None:
    store = SocketStore(Lines(host.path), 1, MINUTE)
    store.queue_push("q", "one")
    store.queue_push("q", "two")
    assert (store.queue_len("q"), store.queue_pop("q"), store.queue_pop("q")) == (2, b"one", b"two")
    with pytest.raises(dist.DistStoreError):
        store.queue_pop("q", block=False)
    store.lines.close()


def test_a_new_start_of_the_ranks_has_no_keys_and_frees_those_who_wait(host) -> None:
    old = SocketStore(Lines(host.path), 1, MINUTE)
    old.set("stale", "x")
    caught = []

    def wait() -> None:
        try:
            old.get("never")
        except dist.DistStoreError as error:
            caught.append(str(error))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    old.set("ready", "x")
    while not caught:
        host.begin(2)
        waiter.join(0.05)
    assert "started again" in caught[0] or "is over" in caught[0]  # if it asked after that
    fresh = SocketStore(Lines(host.path), 2, MINUTE)
    assert fresh.num_keys() == 0
    with pytest.raises(dist.DistStoreError):
        old.set("late", "x")
    assert fresh.num_keys() == 0
    old.lines.close(), fresh.lines.close()


def test_a_store_whose_launcher_is_gone_says_so(host) -> None:
    store = SocketStore(Lines(host.path), 1, MINUTE)
    store.set("a", "b")
    host.close()
    with pytest.raises(dist.DistNetworkError, match="cannot be reached"):
        store.get("a")


def test_a_forked_child_has_connections_of_its_own(host) -> None:
    store = SocketStore(Lines(host.path), 1, MINUTE)
    store.set("a", "b")
    child = os.fork()
    if child == 0:
        try:
            ok = store.get("a") == b"b" and store.add("n", 1) == 1
        finally:
            os._exit(0 if ok else 1)
    for _ in range(100):
        assert store.get("a") == b"b"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get("n") == b"1"
    store.lines.close()


NO_QUESTIONS = [b"\xff\xff\xff\xffx", b"\x00\x00\x00\x03abc", bytes(range(7, 71))]


@pytest.mark.parametrize("said", NO_QUESTIONS)
def test_bytes_that_are_no_question_end_that_connection_alone(host, said) -> None:
    store = SocketStore(Lines(host.path), 1, MINUTE)
    store.set("a", "b")
    with socket.socket(socket.AF_UNIX) as talk:
        talk.settimeout(30)
        talk.connect(host.path)
        talk.sendall(said)
        talk.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert talk.recv(1) == b""
    assert store.get("a") == b"b"
    store.lines.close()


def test_a_client_that_reads_nothing_holds_up_nobody(host) -> None:
    store = SocketStore(Lines(host.path), 1, MINUTE)
    store.set("large", b"x" * 1_000_000)
    from paceline._members.frames import pack
    from paceline._members.keys import AskKeys

    with socket.socket(socket.AF_UNIX) as talk:
        talk.connect(host.path)
        for number in range(20):
            talk.sendall(pack(AskKeys(number, 1, "get", ("large",))))
        for number in range(20):
            assert store.add("n", 1) == number + 1
    store.lines.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_sent_away_even_where_the_folder_lets_it_in(host, tmp_path) -> None:
    from tests.doors.test_strangers import as_another_user

    os.chmod(host.path, 0o666)
    for folder in [tmp_path / "store", *(tmp_path / "store").parents][:-1]:
        folder.chmod(folder.stat().st_mode | 0o005)
    assert as_another_user(host.path) == "hung up"


def all_reduce_in(_: object, place: str) -> float:
    import torch

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store_at(place, MINUTE), rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group())
    dist.destroy_process_group()
    return float(total)


@pytest.mark.parametrize("kind", ["unix", "file"])
def test_torchs_groups_form_in_it(tmp_path, kind) -> None:
    host = StoreHost(tmp_path / "store" / "socket")
    host.begin(3)
    place = f"unix:3:{host.path}" if kind == "unix" else f"file:{tmp_path / 'file'}"
    try:
        assert spawn_ranks(3, all_reduce_in, place) == [3.0] * 3
    finally:
        host.close()
