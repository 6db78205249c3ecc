"""The side channel: who is answered, who is not, and what becomes of those who never speak."""

import contextlib
import dataclasses
import errno
import itertools
import math
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import TCPStore

from paceline._doors import SIDE_DOOR, SideDoor
from paceline.recorder import channel, places
from paceline.recorder import listener as listening
from paceline.recorder.channel import tell
from paceline.recorder.listener import Listener
from paceline.recorder.places import Address, network
from paceline.testing import Meeting, spawn_ranks
from tests.waiting import until

PATIENCE = 300.0  # seconds: the machine may be busy


def ask(address: Address, question: bytes, patience: float = PATIENCE) -> bytes:
    return channel.ask(address, question, patience)


class Office:
    """A listener, and what it was asked and told."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.told: list[bytes] = []
        self.listener = Listener(self._answer, self.told.append)

    def _answer(self, question: bytes) -> bytes:
        self.asked.append(question)
        return b"answer to " + question * (500 if question == b"all" * 300 else 1)

    @property
    def address(self) -> Address:
        return self.listener.address("process", 1)

    def knock(self) -> socket.socket:
        """A connection of somebody who knows where it is, and nothing else."""
        if not self.listener.path:
            return socket.create_connection((self.listener.host, self.listener.port))
        talk = socket.socket(socket.AF_UNIX)
        talk.connect(self.listener.path)
        return talk


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "PATIENCE", PATIENCE)
    monkeypatch.setattr(channel, "TELLING", PATIENCE)


@pytest.fixture(params=["folder", "nameless", "port"])
def office(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Office]:
    """One under a launcher, one without, and one of a job that spans hosts."""
    monkeypatch.delenv(SIDE_DOOR, raising=False)
    if request.param == "folder":
        monkeypatch.setenv(SIDE_DOOR, SideDoor.make(tmp_path).folder)
    if request.param == "port":
        monkeypatch.setenv("PACELINE_RECORDER_HOST", "127.0.0.1")
    office = Office()
    yield office
    office.listener.close()


def with_key(address: Address, key: bytes) -> Address:
    return msgspec.structs.replace(address, key=key)


def test_a_question_is_answered(office: Office) -> None:
    assert ask(office.address, b"where?") == b"answer to where?"


def test_on_one_host_there_is_no_port() -> None:
    office = Office()
    try:
        assert (office.listener.host, office.listener.port) == ("", 0)
        assert office.listener.path
    finally:
        office.listener.close()


def test_letters_are_heard_once_and_in_order_though_who_told_them_is_gone(office: Office) -> None:
    told = [b"%d" % number * 1000 for number in range(50)]
    for letter in told:
        tell(office.address, letter)
    assert office.listener.read_all(60)
    assert office.told == told


def test_a_process_with_many_open_files_answers_too() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this machine allows few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < 1024:
            taken.append(os.dup(taken[0]))
        crowded = Office()
        assert ask(crowded.address, b"where?") == b"answer to where?"
        crowded.listener.close()
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_long_answer_comes_whole(office: Office) -> None:
    assert ask(office.address, b"all" * 300) == b"answer to " + b"all" * 300 * 500


def test_who_waits_for_letters_to_be_read_is_let_go_when_the_listener_closes() -> None:
    """Also where it rings when the thread comes no more to the bell: it has read its last."""
    busy, go_on = threading.Event(), threading.Event()

    def hear(_letter: bytes) -> None:
        busy.set()
        assert go_on.wait(PATIENCE)

    listener = Listener(lambda question: question, hear)
    tell(listener.address("process", 1), b"it takes long to read this")
    assert busy.wait(PATIENCE)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(listener.read_all, 2 * PATIENCE)
        assert until(lambda: not listener._waiting.empty())
        closes = pool.submit(listener.close)
        assert until(lambda: listener._closed)
        go_on.set()
        closes.result(PATIENCE)
        assert not waits.result(PATIENCE)


def test_whoever_lacks_the_key_is_not_heard(office: Office) -> None:
    with pytest.raises(OSError):
        ask(with_key(office.address, b"x" * 32), b"let me in")
    tell(with_key(office.address, b"x" * 32), b"lies")
    tell(office.address, b"truth")
    assert ask(office.address, b"still there?")
    assert office.listener.read_all(60)
    assert office.asked == [b"still there?"]
    assert office.told == [b"truth"]


def test_an_answer_of_somebody_else_is_not_believed(office: Office) -> None:
    impostor = socket.create_server(("127.0.0.1", 0))
    key = office.listener.key

    def answer() -> None:
        talk, _ = impostor.accept()
        talk.sendall(b"n" * 16)
        talk.recv(1 << 16)
        talk.sendall(b"p" * 32 + struct.pack("!I", 4) + b"lies")
        talk.close()

    thread = threading.Thread(target=answer)
    thread.start()
    address = Address("process", *impostor.getsockname(), key, "machine", network(), 1)
    with pytest.raises(OSError, match="from outside the job"):
        ask(address, b"who?")
    thread.join()
    impostor.close()


def test_a_message_that_claims_to_be_huge_is_refused(office: Office) -> None:
    with office.knock() as talk:
        talk.recv(16)
        talk.sendall(b"n" * 16 + b"p" * 32 + struct.pack("!I", channel.LETTER + 1))
        assert talk.recv(1) == b"", "it hangs up"
    assert ask(office.address, b"fine?")


def test_those_who_never_speak_keep_nobody_else_waiting(office: Office) -> None:
    silent = [office.knock() for _ in range(3)]
    assert ask(office.address, b"busy?") == b"answer to busy?"
    for talk in silent:
        talk.close()


def strangers(office: Office, count: int) -> list[socket.socket]:
    """So many connections, each of which has said a byte and says no more."""
    found = []
    for _ in range(count):
        talk = office.knock()
        talk.sendall(b"n")
        found.append(talk)
    return found


def test_many_slow_strangers_do_not_silence_it(office: Office) -> None:
    slow = strangers(office, 3 * listening.AT_ONCE)
    assert ask(office.address, b"still there?") == b"answer to still there?"
    for talk in slow:
        talk.close()


def test_when_there_are_too_many_strangers_the_oldest_goes_first(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "CALLERS", 4)
    slow = strangers(office, 12)
    assert ask(office.address, b"still there?") == b"answer to still there?"
    slow[0].settimeout(PATIENCE)
    slow[0].recv(16)
    with contextlib.suppress(ConnectionError):  # what it said was not all read
        assert slow[0].recv(1) == b"", "it was hung up on"
    for talk in slow:
        talk.close()


def test_a_stranger_that_says_a_little_all_the_time_is_hung_up_on(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "PATIENCE", 1.0)
    with office.knock() as talk:
        talk.settimeout(PATIENCE)
        assert talk.recv(16)
        talk.settimeout(0.4)
        for _ in range(40):  # each step is in time, the whole is not, nor is it a question
            try:
                talk.sendall(b"n")
                if talk.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it was listened to all the time")
    assert office.asked == []


def test_a_listener_that_says_a_little_all_the_time_is_given_up() -> None:
    slow = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def dribble() -> None:
        talk, _ = slow.accept()
        with talk, contextlib.suppress(OSError):
            while not stop.wait(0.05):
                talk.sendall(b"n")

    thread = threading.Thread(target=dribble)
    thread.start()
    address = Address("process", *slow.getsockname(), b"k", "machine", network(), 1)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        ask(address, b"?", patience=0.3)
    assert time.monotonic() - began < PATIENCE
    stop.set()
    thread.join()
    slow.close()


def test_more_ranks_than_are_answered_at_once_are_all_answered(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(4 * listening.AT_ONCE) as pool:
        asked = [pool.submit(ask, office.address, b"%d" % n, 30.0) for n in range(100)]
        assert [a.result() for a in asked] == [b"answer to %d" % n for n in range(100)]


def test_without_descriptors_it_rests_and_then_answers(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if accept found none: it fails, and the caller stays at the door."""
    tries: list[float] = []
    door = office.listener._door

    class Door:
        def accept(self) -> tuple[socket.socket, object]:
            tries.append(time.monotonic())
            if len(tries) < 4:
                raise OSError(errno.EMFILE, "Too many open files")
            return door.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(door, name)

    monkeypatch.setattr(office.listener, "_door", Door())
    monkeypatch.setattr(listening, "REST", 0.1)
    assert ask(office.address, b"there?", patience=30.0) == b"answer to there?"
    assert all(b - a >= 0.1 for a, b in itertools.pairwise(tries)), "no busy loop"
    tell(office.address, b"letters come all the same")


def fill_up() -> list[int]:
    """Leave this process no descriptor at all."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    taken: list[int] = []
    with pytest.raises(OSError, match="Too many open files"):
        while True:
            taken.append(os.dup(2))
    return taken


def ask_one_without_descriptors(meeting: Meeting) -> float:
    store, call = meeting.store(), signal.SIGUSR1
    if meeting.rank == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, {call})
        store.set("pid", str(os.getpid()))
        address = msgspec.msgpack.decode(store.get("address"), type=Address)
        signal.sigwait({call})  # a store needs a descriptor, too
        assert ask(address, b"there?", patience=60.0) == b"answer to there?"
        store.set("answered", "yes")
        return 0.0
    office, rests = Office(), set[float]()
    store.set("address", msgspec.msgpack.encode(office.address))  # type: ignore[arg-type]
    pid, before = int(store.get("pid")), resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = fill_up()
    os.kill(pid, call)
    busy, until = time.process_time(), time.monotonic() + 60
    began = time.monotonic()
    while len(rests) < 4 and time.monotonic() < until:  # it has tried so often
        rests |= {office.listener._shut_until} - {0.0}
        time.sleep(0.01)
    share = (time.process_time() - busy) / (time.monotonic() - began)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for number in taken:
        os.close(number)
    store.get("answered")
    office.listener.close()
    return share if len(rests) == 4 else math.inf


def test_a_process_out_of_descriptors_spends_little_on_callers_and_answers_later() -> None:
    assert spawn_ranks(2, ask_one_without_descriptors)[0] < 0.5, "no busy loop"


def test_after_the_end_nobody_listens(office: Office) -> None:
    address = office.address
    office.listener.close()
    with pytest.raises(ConnectionRefusedError):
        ask(address, b"hello?")
    assert not Path(office.listener.path or "/none").exists(), "nor is a socket left"


def test_a_job_on_several_hosts_listens_on_the_way_to_its_meeting_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert places.interface("") == "127.0.0.1"
    assert places.interface("127.0.0.9") == "127.0.0.1", "the way there, not the other end of it"
    monkeypatch.setenv("PACELINE_RECORDER_HOST", "127.0.0.5")
    assert places.interface("") == "127.0.0.5"
    monkeypatch.delenv("PACELINE_RECORDER_HOST")
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert places.interface("") == "127.0.0.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert places.interface("10.9.8.7") == "127.0.0.1", "all ranks are on this host"


def test_addresses_are_plain_data() -> None:
    address = Address("p", "127.0.0.1", 1, b"k", "m", "n", 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(address), type=Address) == address
    assert not dataclasses.is_dataclass(address)


def test_whoever_reaches_the_store_has_the_key_as_the_page_on_security_says(office: Office) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("recorder/1/0", msgspec.msgpack.encode(office.address))
    stranger = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    found = msgspec.msgpack.decode(stranger.get("recorder/1/0"), type=Address)
    assert ask(found, b"who are you?") == b"answer to who are you?"
