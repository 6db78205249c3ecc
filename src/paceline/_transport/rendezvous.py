"""How the ranks of a group find each other, and which of them share a host.

Everything goes through a torch ``Store``. That two ranks share a host is proven, never inferred:
each rank listens on a Unix socket with a random abstract name; whoever can connect to it and shows
the listener's token gets a file descriptor of its memory, and reads there the nonce that the store
holds. Names, tokens and nonces are random, and the other side must run under the same user, so a
stranger on the host gets nothing. The same descriptors are the segments that ``shm.py`` maps.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
from torch.distributed import Store

from ..errors import RendezvousError

_HELLO = struct.Struct("16si?")  # token of the listener, rank, whether the sender has a pidfd
NONCE_BYTES = 32


class Card(msgspec.Struct, frozen=True):
    """What a rank tells all others through the store."""

    address: bytes
    token: bytes
    nonce: bytes
    unable: str  # why this rank cannot use shared memory; empty when it can


class Clock:
    """Time left until a deadline."""

    def __init__(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds left, never zero or less: torch's stores read that as "for ever"."""
        return max(self._end - time.monotonic(), 0.001)


def _put(store: Store, key: str, value: object) -> None:
    store.set(key, msgspec.msgpack.encode(value))  # type: ignore[arg-type]  # the stub says str


def fetch(store: Store, keys: Sequence[str], rank: int, clock: Clock) -> list[bytes]:
    """The values of ``keys``, one for each rank in order; names the ranks that did not come."""
    try:
        store.wait(list(keys), timedelta(seconds=clock.left()))
    except (RuntimeError, ValueError) as error:
        late = [str(r) for r, key in enumerate(keys) if not store.check([key])]
        if not late:
            raise
        raise RendezvousError(
            f"after {clock.seconds:g} s no sign of rank {', '.join(late)} of {len(keys)}",
            "Start every rank with the same world size, store and arguments, "
            "or give new_group a longer timeout.",
            rank,
        ) from error
    return [store.get(key) for key in keys]


@dataclass
class Neighbours:
    """The ranks that share this rank's host: descriptors of their memory and of their lives.

    The caller owns the descriptors. ``components`` holds all ranks of the group by host; every
    rank of the group computes the same.
    """

    segments: dict[int, int] = field(default_factory=dict)
    watches: dict[int, int] = field(default_factory=dict)
    nonces: dict[int, bytes] = field(default_factory=dict)
    components: list[list[int]] = field(default_factory=list)
    unable: dict[int, str] = field(default_factory=dict)

    def close(self) -> None:
        """Close every descriptor that is still open."""
        for fd in (*self.segments.values(), *self.watches.values()):
            os.close(fd)
        self.segments.clear()
        self.watches.clear()


def meet_neighbours(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    segment: int,
    nonce: bytes,
    unable: str = "",
) -> Neighbours:
    """Find out who shares this host and swap memory with them; every rank calls it.

    ``segment`` is this rank's memory, with ``nonce`` somewhere in it for the others to check.
    """
    clock = Clock(timeout)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0paceline-" + secrets.token_hex(16).encode())
        listener.listen(socket.SOMAXCONN)  # strangers in the queue must not keep ranks out
        card = Card(listener.getsockname(), secrets.token_bytes(16), nonce, unable)
        _put(store, f"card/{rank}", card)
        keys = [f"card/{r}" for r in range(size)]
        cards = [
            msgspec.msgpack.decode(data, type=Card) for data in fetch(store, keys, rank, clock)
        ]
        met = Neighbours(unable={r: c.unable for r, c in enumerate(cards) if c.unable})
        met.nonces = {r: c.nonce for r, c in enumerate(cards)}
        try:
            _Handshake(rank, cards, segment, clock, met).run(store, listener)
        except BaseException:
            met.close()
            raise
    return met


@dataclass
class _Handshake:
    """One rank's part in the swap: call every lower rank, be called by every higher one."""

    rank: int
    cards: Sequence[Card]
    segment: int
    clock: Clock
    met: Neighbours

    def run(self, store: Store, listener: socket.socket) -> None:
        calls: dict[int, socket.socket] = {}
        try:
            for lower in range(self.rank):
                if (call := self._call(lower)) is not None:
                    calls[lower] = call
            _put(store, f"reach/{self.rank}", sorted(calls))
            keys = [f"reach/{r}" for r in range(len(self.cards))]
            reach = [
                msgspec.msgpack.decode(data, type=list[int])
                for data in fetch(store, keys, self.rank, self.clock)
            ]
            self._be_called(listener, {r for r, lower in enumerate(reach) if self.rank in lower})
            while calls:
                lower, call = calls.popitem()
                with call:
                    _, _, has_pidfd, fd = self._receive(call)
                    self._adopt(lower, call, fd, has_pidfd)
        except (TimeoutError, ConnectionError) as error:
            raise RendezvousError(
                f"a rank on this host did not answer within {self.clock.seconds:g} s",
                "It may have died: look at its output; or give new_group a longer timeout.",
                self.rank,
            ) from error
        finally:
            for call in calls.values():
                call.close()
        self.met.components = connected(reach)

    def _call(self, other: int) -> socket.socket | None:
        """Connect to a rank and show it our memory; None when it is not on this host."""
        call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            call.settimeout(self.clock.left())
            call.connect(self.cards[other].address)
            if _process_of(call) is None:
                raise PermissionError
            self._send(call, self.cards[other].token)
        except (ConnectionError, FileNotFoundError, PermissionError):
            call.close()
            return None
        except BaseException:
            call.close()
            raise
        return call

    def _be_called(self, listener: socket.socket, expected: set[int]) -> None:
        """Swap with every expected caller; strangers are sent away and the wait goes on."""
        while expected:
            listener.settimeout(self.clock.left())
            guest, _ = listener.accept()
            with guest:
                try:
                    # a rank has said hello before it is let in; who is silent is a stranger
                    token, who, has_pidfd, fd = self._receive(guest, 1.0)
                except (ConnectionError, TimeoutError):
                    continue
                known = secrets.compare_digest(token, self.cards[self.rank].token)
                if not known or who not in expected or _process_of(guest) is None:
                    os.close(fd)
                    continue
                self._send(guest, token)
                self._adopt(who, guest, fd, has_pidfd)
                expected.discard(who)

    def _send(self, connection: socket.socket, token: bytes) -> None:
        watch = _watch(connection)
        if watch is not None:
            os.close(watch)
        hello = _HELLO.pack(token, self.rank, watch is not None)
        socket.send_fds(connection, [hello], [self.segment])

    def _receive(
        self, connection: socket.socket, patience: float = math.inf
    ) -> tuple[bytes, int, bool, int]:
        connection.settimeout(min(self.clock.left(), patience))
        data, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
        if len(data) != _HELLO.size or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise ConnectionError("not one of ours")
        token, who, has_pidfd = _HELLO.unpack(data)
        return token, who, has_pidfd, fds[0]

    def _adopt(self, other: int, connection: socket.socket, fd: int, has_pidfd: bool) -> None:
        """Keep a rank's memory and something that tells when its process is gone.

        A process's own descriptor is best: a socket also stays open in children it forked. Without
        one on either side both keep the connection, which hangs up at the end of the process.
        """
        self.met.segments[other] = fd
        watch = _watch(connection)
        if watch is None or not has_pidfd:
            if watch is not None:
                os.close(watch)
            watch = os.dup(connection.fileno())
        self.met.watches[other] = watch


def _process_of(connection: socket.socket) -> int | None:
    """The process id at the other end (0: not visible), or None when another user owns it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", raw)
    return int(pid) if user == os.getuid() else None


def _watch(connection: socket.socket) -> int | None:
    """A descriptor that becomes readable when the process at the other end is gone."""
    pid = _process_of(connection)
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:  # an old kernel, or a process of another namespace
        return None


def connected(reach: Sequence[Sequence[int]]) -> list[list[int]]:
    """Ranks by host, given for each rank the lower ranks it reached.

    >>> connected([[], [0], [], [2]])
    [[0, 1], [2, 3]]
    """
    root = list(range(len(reach)))
    for r, lower in enumerate(reach):
        for other in lower:
            old, new = max(root[r], root[other]), min(root[r], root[other])
            root = [new if x == old else x for x in root]
    return [[r for r, x in enumerate(root) if x == first] for first in sorted(set(root))]


def prove_hosts(
    store: Store, rank: int, size: int, timeout: timedelta, unable: str = ""
) -> Neighbours:
    """Which ranks share a host (``components``) and which cannot use shared memory (``unable``).

    Every rank calls it and gets the same answer. No descriptor is left open.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    proof = os.memfd_create("paceline-proof", os.MFD_CLOEXEC)
    try:
        os.write(proof, nonce)
        met = meet_neighbours(store, rank, size, timeout, proof, nonce, unable)
        for other, fd in met.segments.items():
            if os.pread(fd, NONCE_BYTES, 0) != met.nonces[other]:
                met.close()
                raise RendezvousError(f"the memory of rank {other} is not its own", "Retry.", rank)
        met.close()
    finally:
        os.close(proof)
    return met
