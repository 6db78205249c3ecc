"""The answering end of the side channel (``channel.py`` has the other one, and what is said).

One thread takes in letters and questions, of many at once. A stranger cannot keep it from that: who
has not shown within a second that it knows the key is hung up on, and when there are many such, the
oldest goes first. Only a question that was proven is answered, in a thread of its own, since
looking around may take a moment. Without a free descriptor it rests before it tries again.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

from .channel import (
    LENGTH,
    LETTER,
    NONCE,
    PATIENCE,
    PROOF,
    QUESTION,
    interface,
    open_pair,
    prove,
)

AT_ONCE = 16  # answers; ranks that ask beyond that wait
CALLERS = 256  # connections that have not shown yet who they are
REST = 0.5  # seconds until another is taken in, when there was no descriptor for one
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class _Caller:
    """A connection until its question is complete."""

    def __init__(self, talk: socket.socket) -> None:
        self.talk, self.nonce = talk, secrets.token_bytes(NONCE)
        self.until = time.monotonic() + PATIENCE
        self._said = bytearray()
        talk.setblocking(False)
        talk.sendall(self.nonce)  # a new connection has room for it

    def listen(self) -> bool:
        """Take in what has come; whether the question is complete. Raises if it cannot become so.

        Not a byte is read beyond what a question may have.
        """
        part = self.talk.recv(self._wanted() - len(self._said))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        self._said += part
        return len(self._said) == self._wanted()

    def _wanted(self) -> int:
        head = NONCE + PROOF + LENGTH.size
        if len(self._said) < head:
            return head
        (length,) = LENGTH.unpack(self._said[head - LENGTH.size : head])
        if not 0 < length <= QUESTION:
            raise ValueError(f"a question of {length} bytes")
        return head + int(length)

    def question(self, key: bytes) -> tuple[bytes, bytes]:
        """The caller's nonce and its question; raises if it does not know the key."""
        said = bytes(self._said)
        theirs, proof = said[:NONCE], said[NONCE : NONCE + PROOF]
        question = said[NONCE + PROOF + LENGTH.size :]
        if not hmac.compare_digest(proof, prove(key, b"ask", self.nonce, theirs, question)):
            raise ValueError("a stranger")
        return theirs, question


_Asked = tuple[socket.socket, bytes, bytes, bytes]  # its connection, both nonces, its question


class Listener:
    """Listens on a port of this process.

    ``answer`` is called with each question, ``hear`` with each letter (what is told and needs no
    answer), both in threads.
    """

    def __init__(
        self, answer: Callable[[bytes], bytes], hear: Callable[[bytes], None], meeting: str = ""
    ) -> None:
        self.key = secrets.token_bytes(32)
        self._answer, self._hear = answer, hear
        self._door, self._letters = open_pair(interface(meeting))
        self._door.setblocking(False)
        self._letters.setblocking(False)
        self.host, self.port = self._door.getsockname()[:2]
        self._proven: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self._callers: dict[int, _Caller] = {}  # by descriptor, the oldest first
        self._marks: dict[bytes, threading.Event] = {}  # letters to itself
        self._poll = select.poll()  # select() refuses descriptors from 1024 on
        self._shut_until = 0.0  # the door, while there are no descriptors
        self._closed = False
        self._thread = threading.Thread(
            target=self._serve, name="paceline-recorder-answers", daemon=True
        )
        self._thread.start()

    # -- the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        door, letters = self._door.fileno(), self._letters.fileno()
        self._poll.register(letters, select.POLLIN)
        self._poll.register(door, select.POLLIN)
        while not self._closed:
            for number, _ in self._poll.poll(self._milliseconds()):
                with contextlib.suppress(BlockingIOError):  # another process took it, or nobody
                    if number == letters:
                        self._open_letter(self._letters.recv(LETTER))
                    elif number == door:
                        self._take()
                    elif number in self._callers:
                        self._listen(number)
            self._hang_up_on_the_late()
            self._open_door()
        for number in list(self._callers):
            self._hang_up(number)

    def _milliseconds(self) -> float | None:
        """Until something is due; None when nothing is."""
        due = [caller.until for caller in self._callers.values()]
        due += [self._shut_until] if self._shut_until else []
        return 1000 * max(0.0, min(due) - time.monotonic()) + 1 if due else None

    def _take(self) -> None:
        """Let a caller in, for one that has been here for long if it must be."""
        try:
            talk = self._door.accept()[0]
        except OSError as error:
            if error.errno in _SHORT:  # the caller stays at the door: poll would come back at once
                self._poll.unregister(self._door.fileno())
                self._shut_until = time.monotonic() + REST
            return
        try:
            caller = _Caller(talk)
        except OSError:
            talk.close()
            return
        if len(self._callers) >= CALLERS:
            self._hang_up(next(iter(self._callers)))
        self._callers[talk.fileno()] = caller
        self._poll.register(talk.fileno(), select.POLLIN)

    def _listen(self, number: int) -> None:
        caller = self._callers[number]
        try:
            if not caller.listen():
                return
            theirs, question = caller.question(self.key)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._hang_up(number)
            return
        self._release(number)
        self._proven.put((caller.talk, caller.nonce, theirs, question))
        if self._room.acquire(blocking=False):
            threading.Thread(target=self._reply_to_all, daemon=True).start()

    def _reply_to_all(self) -> None:
        """Answer until nobody waits for an answer."""
        try:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._reply(*self._proven.get_nowait())
        finally:
            self._room.release()
        if not self._proven.empty() and self._room.acquire(blocking=False):  # it came just now
            self._reply_to_all()

    def _reply(self, talk: socket.socket, mine: bytes, theirs: bytes, question: bytes) -> None:
        with talk, contextlib.suppress(Exception):
            answer = self._answer(question)
            talk.settimeout(PATIENCE)  # of sendall as a whole
            proof = prove(self.key, b"say", theirs, mine, answer)
            talk.sendall(proof + LENGTH.pack(len(answer)) + answer)

    def _hang_up_on_the_late(self) -> None:
        now = time.monotonic()
        for number in [n for n, caller in self._callers.items() if caller.until <= now]:
            self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        talk = self._callers[number].talk
        self._release(number)
        talk.close()

    def _release(self, number: int) -> None:
        """It is no caller any more."""
        del self._callers[number]
        self._poll.unregister(number)

    def _open_door(self) -> None:
        if self._shut_until and time.monotonic() >= self._shut_until:
            self._shut_until = 0.0
            self._poll.register(self._door.fileno(), select.POLLIN)

    # -- letters ------------------------------------------------------------------------------

    def read_all(self, seconds: float) -> bool:
        """Wait until all letters are read that have come by now; False: it took longer."""
        mark, read = secrets.token_bytes(32), threading.Event()
        self._marks[mark] = read
        try:
            self._letters.sendto(mark, (self.host, self.port))
            return read.wait(seconds)
        except OSError:
            return False
        finally:
            self._marks.pop(mark, None)

    def _open_letter(self, letter: bytes) -> None:
        if (read := self._marks.get(letter)) is not None:
            read.set()
            return
        proof, message = letter[:PROOF], letter[PROOF:]
        if hmac.compare_digest(proof, prove(self.key, b"tell", b"", b"", message)):
            with contextlib.suppress(Exception):
                self._hear(message)

    # -- the end ------------------------------------------------------------------------------

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
        for caller in list(self._callers.values()):
            caller.talk.close()
        self._door.close()
        self._letters.close()
