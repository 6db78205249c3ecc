"""The side channel: questions and answers between the recorders of two processes.

Each process listens on one port, on loopback unless the job spans hosts, and answers in a thread
of its own, so also while the rank is stuck. Both sides prove by HMAC that they know the key, which
only the ranks of the job can read (it lies in their store). Messages are msgpack, never pickle, of
bounded size, and every step has a deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable

import msgspec

MOST = 1 << 20  # bytes of a message
PATIENCE = 1.0  # seconds for each step of a talk
AT_ONCE = 16  # talks
_NONCE = 16
LETTER = 60_000  # bytes
_LENGTH = struct.Struct("!I")


class Address(msgspec.Struct, frozen=True):
    """Where a process answers; ``board`` is what it calls its end of the group."""

    process: str  # a word that no other process has
    host: str
    port: int
    key: bytes
    machine: str  # what has one clock
    network: str  # what has one loopback
    board: int


class Listener:
    """The answering end.

    ``answer`` is called with each question, ``hear`` with each letter (what is told and needs no
    answer), both in threads.
    """

    def __init__(
        self, answer: Callable[[bytes], bytes], hear: Callable[[bytes], None], meeting: str = ""
    ) -> None:
        self.key = secrets.token_bytes(32)
        self._answer, self._hear = answer, hear
        self._talks, self._letters = _open_pair(interface(meeting))
        self.host, self.port = self._talks.getsockname()[:2]
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self._marks: dict[bytes, threading.Event] = {}  # letters to itself
        self._closed = False
        self._thread = threading.Thread(
            target=self._serve, name="paceline-recorder-answers", daemon=True
        )
        self._thread.start()

    def _serve(self) -> None:
        ready = select.poll()  # select() refuses descriptors from 1024 on
        letters = self._letters.fileno()
        ready.register(letters, select.POLLIN)
        ready.register(self._talks.fileno(), select.POLLIN)
        while not self._closed:
            found = dict(ready.poll())
            with contextlib.suppress(OSError):
                if letters in found:
                    self._open_letter(self._letters.recv(LETTER))
                else:
                    self._take(self._talks.accept()[0])

    def read_all(self, seconds: float) -> bool:
        """Wait until all letters are read that have come by now; False: it took longer."""
        mark, read = secrets.token_bytes(32), threading.Event()
        self._marks[mark] = read
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as letters:
                letters.sendto(mark, (self.host, self.port))
            return read.wait(seconds)
        finally:
            self._marks.pop(mark, None)

    def _open_letter(self, letter: bytes) -> None:
        if (read := self._marks.get(letter)) is not None:
            read.set()
            return
        proof, message = letter[:32], letter[32:]
        if hmac.compare_digest(proof, _proof(self.key, b"tell", b"", b"", message)):
            with contextlib.suppress(Exception):
                self._hear(message)

    def _take(self, talk: socket.socket) -> None:
        self._room.acquire()
        threading.Thread(target=self._talk, args=(talk,), daemon=True).start()

    def _talk(self, talk: socket.socket) -> None:
        try:
            with talk, contextlib.suppress(OSError, ValueError):
                talk.settimeout(PATIENCE)
                self._reply(talk)
        finally:
            self._room.release()

    def _reply(self, talk: socket.socket) -> None:
        mine = secrets.token_bytes(_NONCE)
        talk.sendall(mine)
        theirs, proof = _read(talk, _NONCE), _read(talk, 32)
        question = _read_message(talk)
        if not hmac.compare_digest(proof, _proof(self.key, b"ask", mine, theirs, question)):
            return
        answer = self._answer(question)
        talk.sendall(_proof(self.key, b"say", theirs, mine, answer))
        talk.sendall(_LENGTH.pack(len(answer)) + answer)

    def close(self) -> None:
        """Answer no more, and give the port back."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._letters.sendto(b"", (self.host, self.port))  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE)
        self.drop()

    def drop(self) -> None:
        """Let go of the sockets; those of a process this one was forked from stay open there."""
        self._talks.close()
        self._letters.close()


def ask(address: Address, question: bytes, patience: float = PATIENCE) -> bytes:
    """The answer of another process.

    Raises ConnectionError when nobody listens there any more, another OSError when it is silent.
    """
    with socket.create_connection((address.host, address.port), timeout=patience) as talk:
        talk.settimeout(patience)
        theirs, mine = _read(talk, _NONCE), secrets.token_bytes(_NONCE)
        proof = _proof(address.key, b"ask", theirs, mine, question)
        talk.sendall(mine + proof + _LENGTH.pack(len(question)) + question)
        said = _read(talk, 32)
        answer = _read_message(talk)
    if not hmac.compare_digest(said, _proof(address.key, b"say", mine, theirs, answer)):
        raise OSError("an answer that is not of the job")
    return answer


def tell(address: Address, message: bytes) -> None:
    """Send ``message`` to another process; on one host it is there when this returns."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as letters:
        proof = _proof(address.key, b"tell", b"", b"", message)
        letters.sendto(proof + message, (address.host, address.port))


def _proof(key: bytes, purpose: bytes, first: bytes, second: bytes, message: bytes) -> bytes:
    return hmac.digest(key, purpose + first + second + message, hashlib.sha256)


def _read_message(talk: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_read(talk, _LENGTH.size))
    if length > MOST:
        raise ValueError(f"a message of {length} bytes")
    return _read(talk, length)


def _read(talk: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = talk.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        parts += part
    return bytes(parts)


def _open_pair(host: str) -> tuple[socket.socket, socket.socket]:
    """A socket for talks and one for letters, on the same port."""
    for _ in range(20):
        talks = socket.create_server((host, 0), backlog=64)
        letters = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            letters.bind(talks.getsockname()[:2])
            return talks, letters
        except OSError:  # somebody else has that one
            talks.close()
            letters.close()
    raise OSError(f"no free port on {host}")


def interface(meeting: str) -> str:
    """Loopback on one host; else the interface that leads to where the ranks meet."""
    if chosen := os.environ.get("PACELINE_RECORDER_HOST"):
        return chosen
    if os.environ.get("WORLD_SIZE", "") == os.environ.get("LOCAL_WORLD_SIZE", "?"):
        return "127.0.0.1"
    meeting = meeting or os.environ.get("MASTER_ADDR", "")
    if not meeting:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((meeting, 9))  # sends nothing; the kernel picks the way
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
