"""How the ranks of a group find each other, and which of them share a host.

Everything goes through a torch ``Store``. That two ranks share a host is proven, never inferred:
each rank listens on a Unix socket with a random abstract name (``door.py``); whoever can connect
to it and shows the listener's token gets a file descriptor of its memory, and reads there the nonce
that the store holds. Names, tokens and nonces are random, and the other side must run under the
same user, so a stranger on the host gets nothing. The same descriptors are the segments that
``shm.py`` maps.

A rank that cannot go on says so before the others wait for it: in its card, or, after that, in the
word that every rank gives at the end of each part. So a meeting fails on all ranks or on none.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Protocol, TypeVar

import msgspec
from torch.distributed import Store
from typing_extensions import Self

from ..errors import RendezvousError
from .agreement import Clock, SilentError, Word, agree, fetch_all, put, told
from .door import Door, Hello, hear_hello, process_of, say_hello, watch_of
from .terms import Wish

NONCE_BYTES = 32
T = TypeVar("T", bound="Closable")


class Card(msgspec.Struct, frozen=True):
    """What a rank tells all others through the store."""

    wish: Wish
    nonce: bytes
    address: bytes = b""
    token: bytes = b""


_CARDS = msgspec.msgpack.Decoder(Card)  # by the thread that imports; see agreement.py


class Closable(Protocol):
    """What is closed when another rank fails."""

    def close(self) -> None: ...


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

    def adopt(self, other: int, connection: socket.socket, hello: Hello) -> None:
        """Keep a rank's memory and something that tells when its process is gone.

        A process's own descriptor is best: a socket also stays open in children it forked. Without
        one on either side both keep the connection, which hangs up at the end of the process.
        """
        self.segments[other] = hello.memory()
        watch = watch_of(connection)
        if watch is None or not hello.has_pidfd:
            if watch is not None:
                os.close(watch)
            watch = os.dup(connection.fileno())
        self.watches[other] = watch

    def proven(self, rank: int) -> Self:
        """Itself, if the memory of every neighbour holds the nonce that its rank told."""
        for other, fd in self.segments.items():
            if os.pread(fd, NONCE_BYTES, 0) != self.nonces[other]:
                raise RendezvousError(f"the memory of rank {other} is not its own", "Retry.", rank)
        return self

    def close(self) -> None:
        """Close every descriptor that is still open."""
        for fd in (*self.segments.values(), *self.watches.values()):
            os.close(fd)
        self.segments.clear()
        self.watches.clear()


class Rendezvous:
    """One rank's part in a meeting; every rank makes the same calls, in this order."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._store, self._rank, self._size = store, rank, size
        self._clock = Clock(timeout)
        self._door: Door | None = None
        self._calls: dict[int, socket.socket] = {}
        self._cards: list[Card] = []
        self._memory = -1
        self._expected: set[int] = set()

    def exchange(self, wish: Wish) -> list[Wish]:
        """Tell the others what this rank can do; returns what each can."""
        card = Card(wish, self.nonce)
        if not wish.unable:
            try:
                self._door = Door()
                card = Card(wish, self.nonce, self._door.address, self._door.token)
            except OSError as error:
                card = Card(msgspec.structs.replace(wish, unable=told(error)), self.nonce)
        put(self._store, f"card/{self._rank}", card)
        self._cards = fetch_all(self._store, "card", _CARDS, self._rank, self._size, self._clock)
        return [card.wish for card in self._cards]

    def reach(self, memory: Callable[[], int]) -> list[list[int]]:
        """Show ``memory()``, a descriptor, to the ranks of this host; returns all ranks by host.

        The descriptor stays the caller's, and open until :meth:`conclude` is done.
        """

        def call_lower() -> list[int]:
            self._memory = memory()
            for lower in range(self._rank):
                self._call(lower)
            return sorted(self._calls)

        reached = [word.reached for word in self._agree("reach", call_lower)]
        self._expected = {r for r, lower in enumerate(reached) if self._rank in lower}
        return connected(reached)

    def conclude(self, make: Callable[[Neighbours], T]) -> T:
        """``make(neighbours)``, if it succeeds on every rank; else what it made is closed.

        ``make`` owns the descriptors of the neighbours, which are closed too if it fails.
        """
        met = Neighbours(nonces={r: card.nonce for r, card in enumerate(self._cards)})
        made: list[T] = []

        def greet_and_make() -> list[int]:
            self._greet(met)
            made.append(make(met))
            return []

        try:
            self._agree("made", greet_and_make)
        except BaseException:
            for thing in made:
                thing.close()
            met.close()
            raise
        return made[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        for call in self._calls.values():
            call.close()
        self._calls.clear()
        if self._door is not None:
            self._door.close()
            self._door = None

    # -- what all ranks do together -----------------------------------------------------------

    def _agree(self, part: str, step: Callable[[], list[int]]) -> list[Word]:
        at = (self._store, part, self._rank, self._size, self._clock)
        return agree("shm", *at, step, self._hang_up)

    # -- how two of them meet -----------------------------------------------------------------

    def _call(self, other: int) -> None:
        """Connect to a rank and show it our memory, if it is on this host."""
        call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            call.settimeout(self._clock.left())
            call.connect(self._cards[other].address)
            if process_of(call) is None:
                raise PermissionError
            say_hello(call, self._cards[other].token, self._rank, self._memory)
        except (ConnectionError, FileNotFoundError, PermissionError):
            call.close()
            return
        except BaseException:
            call.close()
            raise
        self._calls[other] = call

    def _greet(self, met: Neighbours) -> None:
        """Swap with those who called, then hear those who were called."""
        assert self._door is not None, "exchange opens it"
        guests = self._door.take(self._expected, self._clock.left())
        try:
            for other, (guest, hello) in list(guests.items()):
                say_hello(guest, hello.token, self._rank, self._memory)
                met.adopt(other, guest, hello)
        finally:
            for other, (guest, hello) in guests.items():
                guest.close()
                if other not in met.segments:
                    hello.close()
        for other, call in self._calls.items():
            call.settimeout(self._clock.left())
            try:
                met.adopt(other, call, hear_hello(call))
            except (ConnectionError, TimeoutError) as error:
                raise SilentError(other) from error


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
    """Which ranks share a host (``components``), or which cannot share memory (``unable``).

    Every rank calls it and gets the same answer. No descriptor is left open. When some are unable,
    nobody asks who shares a host.
    """
    with Rendezvous(store, rank, size, timeout) as meeting:
        wishes = meeting.exchange(Wish("", 0, 0, 0, unable))
        if found := {r: wish.unable for r, wish in enumerate(wishes) if wish.unable}:
            return Neighbours(unable=found)
        proofs: list[int] = []

        def proof() -> int:
            proofs.append(os.memfd_create("paceline-proof", os.MFD_CLOEXEC))
            os.write(proofs[0], meeting.nonce)
            return proofs[0]

        try:
            components = meeting.reach(proof)
            meeting.conclude(lambda met: met.proven(rank)).close()
        finally:
            for fd in proofs:
                os.close(fd)
        return Neighbours(components=components)
