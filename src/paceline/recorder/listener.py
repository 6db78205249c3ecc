"""The answering end of the side channel (``channel.py`` has the other one, and what is said).

One thread takes in letters and questions, of many at once. A stranger cannot keep it from that: at
a Unix socket another user's process is hung up on before it is heard; who has not shown within a
second that it knows the key is hung up on too, and when there are many such, the oldest goes first.
Only a question that was proven is answered, in a thread of its own, since looking around may take a
moment. Without a free descriptor it rests before it tries again.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

from .._doors import check_user
from .channel import LENGTH, LETTER, NONCE, PATIENCE, PROOF, QUESTION, prove
from .places import Address, machine, network, open_ports, open_socket, port_on
from .threads import one_of_ours

NOTHING = b"\xc0"  # an answer that says nothing: None in MessagePack
AT_ONCE = 16  # answers; ranks that ask beyond that wait
CALLERS = 256  # connections that have not shown yet who they are
REST = 0.5  # seconds until another is taken in, when there was no descriptor for one
_AT_MOST = 1024  # letters that are read at once, so that an end comes of it
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class _Caller:
    """A connection until its question, or its letter, is complete."""

    def __init__(self, talk: socket.socket, most: int) -> None:
        self.talk, self.nonce = talk, secrets.token_bytes(NONCE)
        self.until = time.monotonic() + PATIENCE
        self._most, self._said = most, bytearray()
        talk.setblocking(False)
        with contextlib.suppress(OSError):  # who had a letter may have hung up, and is heard
            talk.sendall(self.nonce)  # a new connection has room for it

    def listen(self) -> bool:
        """Take in what has come; whether all of it has. Raises if it cannot become so.

        Not a byte is read beyond what it may have.
        """
        part = self.talk.recv(self._wanted() - len(self._said))
        if not part:
            raise ConnectionResetError("the connection was closed")
        self._said += part
        return len(self._said) == self._wanted()

    def _wanted(self) -> int:
        head = NONCE + PROOF + LENGTH.size
        if len(self._said) < head:
            return head
        (length,) = LENGTH.unpack(self._said[head - LENGTH.size : head])
        if not 0 < length <= self._most:
            raise ValueError(f"a question of {length} bytes")
        return head + int(length)

    def question(self, key: bytes) -> tuple[bytes, bytes]:
        """The caller's nonce and its question; raises if it does not know the key."""
        theirs, proof, question = self._parts()
        if not hmac.compare_digest(proof, prove(key, b"ask", self.nonce, theirs, question)):
            raise ValueError("a stranger")
        return theirs, question

    def letter(self, key: bytes) -> bytes:
        """The letter that it brought; empty if it brought none."""
        theirs, proof, letter = self._parts()
        ours = hmac.compare_digest(proof, prove(key, b"tell", theirs, b"", letter))
        return letter if ours else b""

    def _parts(self) -> tuple[bytes, bytes, bytes]:
        """Its nonce, its proof, and what it said."""
        said = bytes(self._said)
        return said[:NONCE], said[NONCE : NONCE + PROOF], said[NONCE + PROOF + LENGTH.size :]


_Asked = tuple[socket.socket, bytes, bytes, bytes]  # its connection, both nonces, its question


class Listener:
    """Listens for this process: at a Unix socket, or at a port for hosts that no launcher joins.

    ``answer`` is called with each question, ``hear`` with each letter (what is told and needs no
    answer), both in threads.
    """

    def __init__(
        self, answer: Callable[[bytes], bytes], hear: Callable[[bytes], None], meeting: str = ""
    ) -> None:
        self.key = secrets.token_bytes(32)
        self._answer, self._hear = answer, hear
        self.host, self.port, self.path = "", 0, ""
        self._letters: socket.socket | None = None  # elsewhere they come as questions do
        self._open(port_on(meeting))
        self._door.setblocking(False)
        self._proven: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self._callers: dict[int, _Caller] = {}  # by descriptor, the oldest first
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        self._poll = select.poll()  # select() refuses descriptors from 1024 on
        self._shut_until = 0.0  # the door, while there are no descriptors
        self._closed = False
        self._thread = threading.Thread(
            target=self._serve, name="paceline-recorder-answers", daemon=True
        )
        self._thread.start()

    def _open(self, host: str) -> None:
        if not host:
            self._door, door = open_socket()
            self.path = os.fsdecode(self._door.getsockname())
            self.host, self.port = (door.host, door.port) if door is not None else ("", 0)
            return
        self._door, self._letters = open_ports(host)
        self._letters.setblocking(False)
        self.host, self.port = self._door.getsockname()[:2]

    def address(self, process: str, board: int) -> Address:
        """Where others find it, to be left in a store."""
        where = (self.host, self.port, self.key, machine(), network())
        return Address(process, *where, board, self.path)

    # -- the thread ---------------------------------------------------------------------------

    @one_of_ours
    def _serve(self) -> None:
        door = self._door.fileno()
        letters = -1 if self._letters is None else self._letters.fileno()
        for number in {door, letters, self._bell} - {-1}:
            self._poll.register(number, select.POLLIN)
        while not self._closed:
            ready = [number for number, _ in self._poll.poll(self._milliseconds())]
            for number in sorted(ready, key=door.__eq__):  # who is in is heard before who comes
                with contextlib.suppress(BlockingIOError):  # another process took it, or nobody
                    if number == letters:
                        self._open_letter()
                    elif number == door:
                        self._take()
                    elif number == self._bell:
                        os.eventfd_read(self._bell)
                        self._catch_up()
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

    def _take(self) -> bool:
        """Let a caller in, for one that has been here for long if it must be; False: none came."""
        try:
            talk = self._door.accept()[0]
        except OSError as error:
            if error.errno in _SHORT and not self._shut_until:  # else poll would come back at once
                self._poll.unregister(self._door.fileno())
                self._shut_until = time.monotonic() + REST
            return False
        if not self._is_ours(talk):
            talk.close()
            return True
        if len(self._callers) >= CALLERS:
            self._hang_up(next(iter(self._callers)))
        self._callers[talk.fileno()] = _Caller(talk, LETTER if self.path else QUESTION)
        self._poll.register(talk.fileno(), select.POLLIN)
        if self.path:
            self._listen(talk.fileno())  # a letter is there when its connection is
        return True

    def _is_ours(self, talk: socket.socket) -> bool:
        """Whether who calls may be heard: at a Unix socket, who is of the same user."""
        try:
            return not self.path or bool(check_user(talk))
        except OSError:
            return False

    def _listen(self, number: int) -> None:
        caller = self._callers[number]
        try:
            while not caller.listen():  # until nothing more has come
                pass
            if self.path and (letter := caller.letter(self.key)):
                self._hang_up(number)
                self._read(letter)
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
            self._start_to_reply()

    def _start_to_reply(self) -> None:
        thread = threading.Thread(target=self._reply_to_all, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is no room for one more: who waits is answered by the next
            self._room.release()

    @one_of_ours
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
            answer = self._say(question)
            talk.settimeout(PATIENCE)  # of sendall as a whole
            proof = prove(self.key, b"say", theirs, mine, answer)
            talk.sendall(proof + LENGTH.pack(len(answer)) + answer)

    def _say(self, question: bytes) -> bytes:
        try:
            return self._answer(question)
        except Exception:  # to hang up would say that this process has ended
            return NOTHING

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
        """Wait until all letters are read that have come by now.

        False: it took longer, or it is closed.
        """
        read = threading.Event()
        self._waiting.put(read)
        try:
            os.eventfd_write(self._bell, 1)
            return read.wait(seconds) and not self._closed
        except (OSError, ValueError):  # it is closed
            return False

    def _catch_up(self) -> None:
        """Read the letters that have come; then say so to those who wait for it."""
        waiting = self._those_who_wait()
        with contextlib.suppress(BlockingIOError):
            for _ in range(_AT_MOST):
                self._open_letter()
        for _ in range(_AT_MOST if self.path else 0):
            for number in list(self._callers):  # who is in may have said all by now
                self._listen(number)
            if not self._take():
                break
        for read in waiting:
            read.set()

    def _those_who_wait(self) -> list[threading.Event]:
        waiting = []
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(self._waiting.get_nowait())
        return waiting

    def _open_letter(self) -> None:
        if self._letters is None:
            return
        letter = self._letters.recv(LETTER)
        proof, message = letter[:PROOF], letter[PROOF:]
        if hmac.compare_digest(proof, prove(self.key, b"tell", b"", b"", message)):
            self._read(message)

    def _read(self, letter: bytes) -> None:
        with contextlib.suppress(Exception):
            self._hear(letter)

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Answer no more, and give the socket back."""
        self._closed = True
        with contextlib.suppress(OSError, ValueError):  # it is closed
            os.eventfd_write(self._bell, 1)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE)
        if self.path and not self.path.startswith("\0"):
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self.drop()
        for read in self._those_who_wait():  # whoever comes from here on finds no bell
            read.set()

    def drop(self) -> None:
        """Let go of the sockets; those of a process this one was forked from stay open there."""
        for caller in list(self._callers.values()):
            caller.talk.close()
        self._door.close()
        if self._letters is not None:
            self._letters.close()
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)
