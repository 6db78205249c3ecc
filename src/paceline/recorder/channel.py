"""The side channel: questions and answers between the recorders of two processes.

Each process listens on one port (``listener.py``), on loopback unless the job spans hosts, and
answers in a thread of its own, so also while the rank is stuck. Both sides prove by HMAC that they
know the listener's key, a random one that its rank leaves in the group's store. That keeps out
whoever reaches the port but not the store. **It keeps out nobody who reaches the store**: torch's
TCPStore gives every key to whoever connects. Such a stranger can read what a rank tells of itself
(lines of code, names of parameters, shapes) and can tell lies about ranks; it cannot run anything,
since messages are msgpack of known types, never pickle. ``docs/security.md`` says who reaches what.

A talk as a whole has a deadline, and what is longer than it may be is not read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time

import msgspec

QUESTION, ANSWER, LETTER = 4096, 1 << 20, 60_000  # bytes, at most
PATIENCE = 1.0  # seconds for a whole talk
NONCE, PROOF = 16, 32  # bytes
LENGTH = struct.Struct("!I")


class Address(msgspec.Struct, frozen=True):
    """Where a process answers; ``board`` is what it calls its end of the group."""

    process: str  # a word that no other process has
    host: str
    port: int
    key: bytes
    machine: str  # what has one clock
    network: str  # what has one loopback
    board: int


def ask(address: Address, question: bytes, patience: float = PATIENCE) -> bytes:
    """The answer of another process, within ``patience`` seconds.

    Raises ConnectionError when nobody listens there any more, another OSError when it is silent.
    """
    until = time.monotonic() + patience
    with socket.create_connection((address.host, address.port), timeout=patience) as talk:
        theirs, mine = _read(talk, NONCE, until), secrets.token_bytes(NONCE)
        proof = prove(address.key, b"ask", theirs, mine, question)
        talk.sendall(mine + proof + LENGTH.pack(len(question)) + question)
        said = _read(talk, PROOF, until)
        (length,) = LENGTH.unpack(_read(talk, LENGTH.size, until))
        if length > ANSWER:
            raise OSError(f"an answer of {length} bytes")
        answer = _read(talk, length, until)
    if not hmac.compare_digest(said, prove(address.key, b"say", mine, theirs, answer)):
        raise OSError("an answer that is not of the job")
    return answer


def tell(address: Address, message: bytes) -> None:
    """Send ``message`` to another process; on one host it is there when this returns."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as letters:
        proof = prove(address.key, b"tell", b"", b"", message)
        letters.sendto(proof + message, (address.host, address.port))


def prove(key: bytes, purpose: bytes, first: bytes, second: bytes, message: bytes) -> bytes:
    """What only those who know ``key`` can say about ``message``."""
    return hmac.digest(key, purpose + first + second + message, hashlib.sha256)


def _read(talk: socket.socket, size: int, until: float) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("it has not said all in time")
        talk.settimeout(left)
        part = talk.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        parts += part
    return bytes(parts)


def open_pair(host: str) -> tuple[socket.socket, socket.socket]:
    """A socket for talks and one for letters, on the same port."""
    for _ in range(20):
        talks = socket.create_server((host, 0), backlog=512)
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
