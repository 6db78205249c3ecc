"""The side channel: questions and answers between the recorders of two processes.

Each process listens (``listener.py``) at a Unix socket, or at a port where the job spans hosts that
no launcher of ours joins (``places.py``), and answers in a thread of its own, so also while the
rank is stuck. Both sides prove by HMAC that they know the listener's key, a random one that its
rank leaves in the group's store. At a port that is all that keeps strangers out, and it keeps out
nobody who reaches the store: torch's TCPStore gives every key to whoever connects. Such a stranger
can read what a rank tells of itself (lines of code, names of parameters, shapes) and can tell lies
about ranks; it cannot run anything, since messages are msgpack of known types, never pickle.
``docs/security.md`` says who reaches what.

A talk as a whole has a deadline, and what is longer than it may be is not read. A letter is told
without an answer: at a Unix socket it is a connection that says it and hangs up, at a port a
datagram.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time

from .places import Address, call

QUESTION, ANSWER, LETTER = 4096, 1 << 20, 60_000  # bytes, at most
PATIENCE = 1.0  # seconds for a whole talk
TELLING = 0.1  # seconds that a rank waits until a letter can be left with who is to have it
NONCE, PROOF = 16, 32  # bytes
LENGTH = struct.Struct("!I")


def ask(address: Address, question: bytes, patience: float = PATIENCE) -> bytes:
    """The answer of another process, within ``patience`` seconds.

    Raises ConnectionError when it no longer listens, another OSError when it is silent.
    """
    until = time.monotonic() + patience
    with call(address, patience) as talk:
        theirs, mine = _read(talk, NONCE, until), secrets.token_bytes(NONCE)
        proof = prove(address.key, b"ask", theirs, mine, question)
        talk.sendall(mine + proof + LENGTH.pack(len(question)) + question)
        said = _read(talk, PROOF, until)
        (length,) = LENGTH.unpack(_read(talk, LENGTH.size, until))
        if length > ANSWER:
            raise OSError(f"an answer of {length} bytes")
        answer = _read(talk, length, until)
    if not hmac.compare_digest(said, prove(address.key, b"say", mine, theirs, answer)):
        raise OSError("an answer from outside the job")
    return answer


def tell(address: Address, message: bytes) -> None:
    """Send ``message`` to another process; on one host it is there when this returns."""
    if not address.path:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as letters:
            proof = prove(address.key, b"tell", b"", b"", message)
            letters.sendto(proof + message, (address.host, address.port))
        return
    nonce = secrets.token_bytes(NONCE)
    proof = prove(address.key, b"tell", nonce, b"", message)
    with call(address, TELLING, answer=False) as talk:
        talk.settimeout(TELLING)
        talk.sendall(nonce + proof + LENGTH.pack(len(message)) + message)


def prove(key: bytes, purpose: bytes, first: bytes, second: bytes, message: bytes) -> bytes:
    """What only those who know ``key`` can say about ``message``."""
    return hmac.digest(key, purpose + first + second + message, hashlib.sha256)


def _read(talk: socket.socket, size: int, until: float) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("it was too slow to send all of it")
        talk.settimeout(left)
        part = talk.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts += part
    return bytes(parts)
