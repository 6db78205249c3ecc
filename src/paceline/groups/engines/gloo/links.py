"""Links: the connections that gloo opened, so that they can be cut.

gloo has no abort: whoever waits in it waits for its timeout. Shutting its sockets down frees both
ends at once. gloo does not say which sockets are its own, so they are found: what this process
opened meanwhile, accepted at a port that was opened meanwhile or connected to one that another
rank opened meanwhile.
"""

from __future__ import annotations

import os
import re
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec
from torch.distributed import Store

from ...._transport import Clock, fetch

Address = tuple[str, int]


class Links:
    """This rank's connections in the gloo groups that were opened inside :meth:`watch`."""

    def __init__(self, fds: Sequence[int], listeners: Sequence[Sequence[Address]]) -> None:
        # Copies: a number that gloo has closed may by now be another file of this process.
        self._fds = list(fds)
        self._pid = os.getpid()
        self._close = weakref.finalize(self, _close_all, self._fds)
        self._close.atexit = False
        self._listeners = listeners

    @classmethod
    @contextmanager
    def watch(cls, store: Store, rank: int, size: int, clock: Clock) -> Iterator[list[Links]]:
        """Open gloo groups inside; the list has the links after it. Every rank calls it."""
        before, found = set(_sockets()), list[Links]()
        yield found
        new = [fd for fd in _sockets() if fd not in before]
        ports = [port for port in map(_listening_at, new) if port]
        store.set(f"ports/{rank}", msgspec.msgpack.encode(ports))  # type: ignore[arg-type]
        keys = [f"ports/{r}" for r in range(size)]
        listeners = [
            msgspec.msgpack.decode(data, type=list[Address])
            for data in fetch(store, keys, rank, clock)
        ]
        theirs = {address for r, own in enumerate(listeners) if r != rank for address in own}
        copies = (_copy_of_link(fd, set(ports), theirs) for fd in new)
        fds = [copy for copy in copies if copy is not None]
        found.append(cls(fds, listeners))

    def cut(self) -> None:
        """Shut every connection down; both ends notice at once. Safe from any thread."""
        if self._pid != os.getpid():  # a forked child shares its parent's connections
            return
        for fd in self._fds:
            with suppress(OSError):
                _use(fd, lambda link: link.shutdown(socket.SHUT_RDWR))

    def close(self) -> None:
        """Let go of the connections, which gloo closes when it is done."""
        self._close()

    def ranks_in(self, text: str) -> list[int]:
        """The ranks at the addresses that an error of gloo's speaks of."""
        told = {ip for ip, _ in re.findall(r"\[([0-9A-Fa-f.:]+)\]:(\d+)", text)}
        return [r for r, own in enumerate(self._listeners) if any(ip in told for ip, _ in own)]


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _sockets() -> list[int]:
    """This process's TCP sockets."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") and _is_tcp(fd):
                found.append(fd)
    return found


def _use(fd: int, question):  # type: ignore[no-untyped-def]
    """Ask a descriptor that is not ours a question about its socket."""
    borrowed = socket.socket(fileno=fd)
    try:
        return question(borrowed)
    finally:
        borrowed.detach()


def _is_tcp(fd: int) -> bool:
    families = (socket.AF_INET, socket.AF_INET6)
    return bool(_use(fd, lambda s: s.family in families and s.type == socket.SOCK_STREAM))


def _listens(fd: int) -> bool:
    return bool(_use(fd, lambda s: s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))


def _listening_at(fd: int) -> Address | None:
    """The address that a descriptor listens at; None also where its owner closed it meanwhile."""
    with suppress(OSError):
        if _listens(fd):
            return _name(fd, "getsockname")
    return None


def _copy_of_link(fd: int, ours: set[Address], theirs: set[Address]) -> int | None:
    """A copy of a connection that was accepted at one of our ports or made to one of theirs.

    The copy is made first and then looked at: gloo or another thread may close the original, and
    its number may become another file, at any moment. gloo ends the process when a socket that it
    listens with is shut down, so those are left alone.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    with suppress(OSError):
        if not _listens(copy) and (
            _name(copy, "getsockname") in ours or _name(copy, "getpeername") in theirs
        ):
            return copy
    os.close(copy)
    return None


def _name(fd: int, end: str) -> Address | None:
    try:
        ip, port = _use(fd, lambda s: getattr(s, end)())[:2]
        return str(ip), int(port)
    except OSError:  # not connected
        return None
