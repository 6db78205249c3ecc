"""The door of a rank: where other ranks of its host come in, and strangers do not.

It is open from the start of a meeting, on a thread of its own, so that nobody waits for whoever
stands in it. Who comes in under another user is sent away before anything is read; who does not
show the token, as well. A silent one costs a descriptor, and only the latest few are kept.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Collection
from dataclasses import dataclass

_HELLO = struct.Struct("16si?")  # token of the listener, rank, whether the sender has a pidfd
TOKEN_BYTES = 16
_SILENT = 32  # connections that have not said anything yet


@dataclass(frozen=True)
class Hello:
    """What two ranks say to each other; ``fd``, the sender's memory, belongs to the receiver."""

    token: bytes
    rank: int
    has_pidfd: bool
    fd: int  # -1: one was sent, and this process may open no more files

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)

    def memory(self) -> int:
        """The descriptor."""
        if self.fd < 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.fd


class NotOursError(ConnectionError):
    """The other side is not a rank of this group."""


def say_hello(connection: socket.socket, token: bytes, rank: int, segment: int) -> None:
    """Show the other side's token, and this rank's memory."""
    watch = watch_of(connection)
    if watch is not None:
        os.close(watch)
    hello = _HELLO.pack(token, rank, watch is not None)
    socket.send_fds(connection, [hello], [segment])


def hear_hello(connection: socket.socket) -> Hello:
    """What the other side says; waits as long as the connection's timeout."""
    data, fds, flags, _ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
    if len(data) == _HELLO.size and (len(fds) == 1 or flags & socket.MSG_CTRUNC):
        token, rank, has_pidfd = _HELLO.unpack(data)
        return Hello(token, rank, has_pidfd, fds[0] if fds else -1)
    for fd in fds:
        os.close(fd)
    raise NotOursError("not one of ours")


class Door:
    """Lets ranks in that show ``token``, until it is closed."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._changed = threading.Condition()
        self._guests: dict[int, tuple[socket.socket, Hello]] = {}
        self._silent: list[socket.socket] = []
        self._failure: OSError | None = None
        self._selector = selectors.PollSelector()  # epoll would take a descriptor
        self._closing = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="paceline-door", daemon=True)
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except BaseException:
            os.close(self._closing)
            raise
        try:
            self._listener.bind(b"\0paceline-" + secrets.token_hex(16).encode())
            self._listener.listen(socket.SOMAXCONN)
            self._listener.setblocking(False)
            for ready in (self._listener, self._closing):
                self._selector.register(ready, selectors.EVENT_READ)
            self._thread.start()
        except BaseException:
            self._listener.close()
            os.close(self._closing)
            raise

    @property
    def address(self) -> bytes:
        """The address to connect to."""
        return bytes(self._listener.getsockname())

    def take(
        self, expected: Collection[int], seconds: float
    ) -> dict[int, tuple[socket.socket, Hello]]:
        """The expected ranks, once all of them are in; the caller owns their connections."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._guests.keys() >= set(expected) or self._failure, seconds
            )
            if self._failure is not None:
                raise self._failure
            if missing := sorted(set(expected) - self._guests.keys()):
                raise TimeoutError(f"no message from rank {', '.join(map(str, missing))}")
            return {r: self._guests.pop(r) for r in expected}

    def close(self) -> None:
        """Close it, and every connection that was not taken."""
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        self._listener.close()
        os.close(self._closing)
        for connection in self._silent:
            connection.close()
        for connection, hello in self._guests.values():
            connection.close()
            hello.close()

    # The thread.

    def _run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj == self._closing:
                        return
                    if key.fileobj is self._listener:
                        self._admit()
                    else:
                        self._hear(key.fileobj)  # type: ignore[arg-type]
        except OSError as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _admit(self) -> None:
        """Check a new connection, and accept it if it belongs to the group."""
        try:
            guest, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # gone again
            return
        except OSError:  # no more descriptors: the silent ones may be why
            if not self._silent:
                raise
            self._send_away(self._silent[0])
            return
        if process_of(guest) is None:
            guest.close()
            return
        guest.setblocking(False)
        self._selector.register(guest, selectors.EVENT_READ)
        self._silent.append(guest)
        if len(self._silent) > _SILENT:
            self._send_away(self._silent[0])

    def _hear(self, guest: socket.socket) -> None:
        if guest not in self._silent:  # sent away in this very round
            return
        try:
            hello = hear_hello(guest)
        except (NotOursError, BlockingIOError, ConnectionError):
            self._send_away(guest)
            return
        known = secrets.compare_digest(hello.token, self.token)
        if not known or hello.rank in self._guests:
            hello.close()
            self._send_away(guest)
            return
        self._silent.remove(guest)
        self._selector.unregister(guest)
        with self._changed:
            self._guests[hello.rank] = guest, hello
            self._changed.notify_all()

    def _send_away(self, guest: socket.socket) -> None:
        self._silent.remove(guest)
        self._selector.unregister(guest)
        guest.close()


def process_of(connection: socket.socket) -> int | None:
    """The process id at the other end (0: not visible), or None when another user owns it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, user, _ = struct.unpack("iII", raw)
    return int(pid) if user == os.geteuid() else None


def watch_of(connection: socket.socket) -> int | None:
    """A descriptor that becomes readable when the process at the other end is gone."""
    pid = process_of(connection)
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:  # an old kernel, or a process of another namespace
        return None
