"""What anybody who reaches the keeper's socket can do to those who use it: next to nothing."""

import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import torch.distributed as dist
from torch.distributed import Store

from paceline._members import AgentHello, Gone, HowFar, Roster
from paceline._members.client import SocketMember
from paceline._members.frames import LIMIT, pack
from paceline._members.keys import AskKeys, KeysAnswer
from paceline._members.words import Alive, Decided, Enrol, Enrolled, Meet, ProcessId, Refused

from .keepers import WITHIN, KeeperAt, meet

W = TypeVar("W")
LATE = 5.0  # seconds: less than any deadline that a stranger could make others wait for
ONCE = 10.0  # …still, where there is no second try, though others use the machine


def caller(keeper: KeeperAt) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60)
    connection.connect(keeper.path)
    return connection


def is_hung_up_on(connection: socket.socket) -> bool:
    """Whether the keeper ends the connection, after whatever it says."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def answer(connection: socket.socket, kind: type[W]) -> W:
    """The first word that the keeper says."""
    head = connection.recv(4, socket.MSG_WAITALL)
    body = connection.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL)
    return msgspec.msgpack.decode(body, type=kind)


ATTACK = """
import os, socket, sys
path, times = sys.argv[1], int(sys.argv[2])
hello, word = (bytes.fromhex(sys.stdin.readline()) for _ in range(2))
print("begun", flush=True)
while True:
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(60)
            s.connect(path)
            s.sendall(hello or b"")
            for _ in range(times):
                s.sendall(word)
    except OSError:
        pass
"""


@contextmanager
def attacked(keeper: KeeperAt, hello: bytes = b"", word: bytes = b"", times: int = 0) -> Iterator:
    """Another process connects, says hello and a word so many times, and does it again."""
    command = [sys.executable, "-c", ATTACK, keeper.path, str(times)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        try:
            process.stdin.write(f"{hello.hex()}\n{word.hex()}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline() == b"begun\n"
            yield
        finally:
            process.kill()


def longest_delay(member: SocketMember) -> float:
    """How long a question takes at most; the best of three rounds, since others use the machine."""
    store = member.store(1)
    return min(max(_seconds(store) for _ in range(30)) for _ in range(3))


def _seconds(store: Store) -> float:
    begun = time.perf_counter()
    store.set("k", "v")
    return time.perf_counter() - begun


def test_400_idle_sockets_delay_nobody() -> None:
    with KeeperAt() as keeper, ExitStack() as held:
        (member,) = keeper.begin(1)
        for _ in range(400):
            held.enter_context(caller(keeper))
        assert longest_delay(member) < LATE
        begun = time.perf_counter()
        keeper.join()
        assert time.perf_counter() - begun < ONCE


def test_idle_sockets_are_hung_up_on() -> None:
    with KeeperAt() as keeper:
        keeper.begin(1)
        with caller(keeper) as connection:
            assert is_hung_up_on(connection)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        random.Random(1).randbytes(1000),
        b"\xff\xff\xff\xff",
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 1) + b"\x90",
        b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR." * 9,
        pack(AskKeys(1, 1, "get", ("k",))),
        pack(Meet(HowFar(), 1)),
        pack(Gone(0, "said by a stranger")),
        pack(Alive()),
    ],
)
def test_garbage_ends_the_connection_it_came_on_and_nothing_else(garbage: bytes) -> None:
    with KeeperAt() as keeper:
        (member,) = keeper.begin(1)
        with caller(keeper) as connection:
            connection.sendall(garbage)
            assert is_hung_up_on(connection)
        member.store(1).set("k", "v")
        assert member.store(1).get("k") == b"v"


def test_every_byte_of_a_word_changed_harms_nobody() -> None:
    word = pack(Enrol(ProcessId("h", 1), 0, Roster(1, (0,), (HowFar(),)), True))
    with KeeperAt() as keeper:
        (member,) = keeper.begin(1)
        for place in range(len(word)):
            for change in (0x01, 0x02, 0x80, 0xFF):
                with caller(keeper) as connection:
                    at = bytearray(word)
                    at[place] ^= change
                    connection.sendall(at)
        member.store(1).set("k", "v")
        assert member.store(1).get("k") == b"v"
        assert keeper.process.poll() is None


def test_half_a_word_is_not_waited_for() -> None:
    with KeeperAt() as keeper:
        (member,) = keeper.begin(1)
        with caller(keeper) as connection:
            connection.sendall(struct.pack(">I", 1000) + b"half")
            assert longest_delay(member) < LATE
            assert is_hung_up_on(connection)


def test_a_word_that_is_too_long_is_not_held() -> None:
    with KeeperAt() as keeper:
        keeper.begin(1)
        with caller(keeper) as connection:
            connection.sendall(struct.pack(">I", LIMIT + 1))
            assert is_hung_up_on(connection)


HELLO = pack(Enrol(ProcessId("h", 1)))


@pytest.mark.parametrize(
    ("hello", "word", "times"),
    [
        pytest.param(b"", b"", 0, id="of connections"),
        pytest.param(b"", random.Random(2).randbytes(1 << 15), 1, id="of garbage"),
        pytest.param(HELLO, b"", 0, id="of members"),
        pytest.param(HELLO, pack(Alive()) * 500, 50, id="of words"),
        pytest.param(HELLO, pack(AskKeys(1, 1, "get", ("k",))) * 200, 50, id="of questions"),
        pytest.param(
            HELLO, pack(AskKeys(1, 1, "set", ("k",), (bytes(1 << 20),))), 20, id="of bytes"
        ),
    ],
)
def test_a_flood_delays_nobody(hello: bytes, word: bytes, times: int) -> None:
    with KeeperAt() as keeper:
        (member,) = keeper.begin(1)
        with attacked(keeper, hello, word, times):
            assert longest_delay(member) < LATE
        assert keeper.process.poll() is None


def test_one_that_reads_nothing_is_hung_up_on_before_it_costs_memory() -> None:
    with KeeperAt() as keeper, ExitStack() as held:
        keeper.join()  # so it listens
        connection = held.enter_context(caller(keeper))
        connection.sendall(HELLO + pack(Meet(HowFar(), 1)))
        big = AskKeys(1, 1, "set", ("big",), (bytes(1 << 22),))
        connection.sendall(pack(big))
        with pytest.raises(OSError):
            for number in range(2, 20_000):
                connection.sendall(pack(AskKeys(number, 1, "get", ("big",))))
        status = Path(f"/proc/{keeper.process.pid}/status").read_text()
        held = int(next(line for line in status.splitlines() if "VmHWM" in line).split()[1])
        assert held < 300_000  # kB


def test_questions_that_make_no_sense_are_answered_and_harm_nobody() -> None:
    with KeeperAt() as keeper, ExitStack() as held:
        keeper.join()  # so it listens
        connection = held.enter_context(caller(keeper))
        connection.sendall(HELLO + pack(Meet(HowFar(), 1)))
        answer(connection, Enrolled), answer(connection, Decided)
        ops = ["add", "compare_set", "delete", "append", "push", "pop", "length", "set", "get"]
        for number, op in enumerate(ops):
            senseless = AskKeys(number, 1, op, (), (b"1", b"2", b"3"))
            connection.sendall(pack(senseless))
            found = answer(connection, KeysAnswer)
            assert (found.id, found.error) == (number, "" if op == "get" else "value")
        assert keeper.process.poll() is None


def test_keys_are_those_of_the_rosters_members_alone() -> None:
    with KeeperAt("--most", "1") as keeper:
        (member,) = keeper.begin(1)
        member.store(1).set("k", "v")
        other = keeper.join()
        for call in (lambda: other.store(1).get("k"), lambda: other.store(1).set("k", "mine")):
            with pytest.raises(dist.DistStoreError, match="member 1 is not in roster 1"):
                call()
        assert member.store(1).get("k") == b"v"


def test_a_process_that_says_it_is_another_members_is_refused() -> None:
    with KeeperAt("--first", "2") as keeper:
        members = keeper.begin(2)
        roster = Roster(1, (0, 1), (HowFar(), HowFar()))
        here = ProcessId(os.uname().nodename, os.getpid())
        lies = [
            Enrol(ProcessId(here.host, 1), 0, roster, True),
            Enrol(here, 7),
            Enrol(here, 0, Roster(9, (0,), (HowFar(),)), True),
            Enrol(here, None, roster),
            Enrol(here, 0, Roster(1, (), ()), True),
            Enrol(here, 0, Roster(1, (0, 0), (HowFar(), HowFar())), True),
            Enrol(here, 0, Roster(1, (0, 1), (HowFar(),)), True),
        ]
        for lie in lies:
            with caller(keeper) as connection:
                connection.sendall(pack(lie))
                assert isinstance(answer(connection, Refused), Refused)
                assert is_hung_up_on(connection)
        members[0].store(1).set("k", "v")
        assert meet(members, 3).members == (0, 1)


IMPOSTOR = """
import socket, sys
s = socket.socket(socket.AF_UNIX); s.settimeout(60); s.connect(sys.argv[1])
s.sendall(bytes.fromhex(sys.argv[2]))
print(b"process of its own" in s.recv(1000))
"""


def test_another_process_cannot_take_a_members_place_by_its_process_id() -> None:
    """The kernel says which process it is; a word that was heard and said again is no proof."""
    with KeeperAt() as keeper:
        (member,) = keeper.begin(1)
        word = pack(Enrol(ProcessId(os.uname().nodename, os.getpid()), 0))
        said = subprocess.run(
            [sys.executable, "-c", IMPOSTOR, keeper.path, word.hex()],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert said.stdout == "True\n", said.stderr
        member.store(1).set("k", "v")


def test_an_agent_says_who_it_is_once_and_a_member_is_no_agent() -> None:
    with KeeperAt() as keeper:
        keeper.begin(1)
        for words in (
            pack(AgentHello("h", 1)) * 2,
            pack(Enrol(ProcessId("h", os.getpid()))) + pack(Gone(0, "a lie")),
        ):
            with caller(keeper) as connection:
                connection.sendall(words)
                assert is_hung_up_on(connection)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_hung_up_on() -> None:
    with KeeperAt() as keeper:
        keeper.begin(1)
        for folder in (Path(keeper.folder.name), Path(keeper.path).parent):
            folder.chmod(0o755)
        Path(keeper.path).chmod(0o666)
        program = (
            "import os, socket, sys; os.setgid(65534); os.setuid(65534);"
            "s = socket.socket(socket.AF_UNIX); s.settimeout(60); s.connect(sys.argv[1]);"
            "print(s.recv(1) == b'')"
        )
        said = subprocess.run(
            [sys.executable, "-c", program, keeper.path],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert said.stdout == "True\n", said.stderr


def test_keys_of_an_older_attempt_reach_nobody() -> None:
    with KeeperAt() as keeper:
        (member,) = keeper.begin(1)
        old = member.store(1)
        old.set("address", "of yesterday")
        assert member.meet(HowFar(1), 10).number == 2
        assert member.ready(2)
        assert not member.store(2).check(["address"])
        with pytest.raises(dist.DistStoreError):
            old.set("address", "late")
        keeper.replace()
        assert not member.store(2).check(["address"])
        assert member.store(2).num_keys() == 0


def test_a_journal_that_was_cut_off_or_garbled_is_read_as_far_as_it_is_whole() -> None:
    with KeeperAt() as keeper:
        (member,) = keeper.begin(1)
        member.store(1).set("k", "v")
        keeper.kill()
        journal = Path(keeper.path).with_suffix(".journal")
        whole = journal.read_bytes()
        journal.write_bytes(whole + pack(AskKeys(1, 1, "set"))[:-3] + os.urandom(5))
        keeper.start()
        assert member.store(1).get("k") == b"v"
        assert member.meet(HowFar(1), WITHIN).number == 2
