"""What the demo's ranks tell the process that draws, over a Unix socket of datagrams.

The ranks are never held up: what the drawing process is too busy to take is dropped. When it is
gone, a rank that tells it something fails, and with it all of them.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec
from typing_extensions import Self


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Where a rank is; every rank tells it a few times a second."""

    rank: int
    step: int  # steps done
    progress: float  # from 0 to 1
    loss: float  # of its own batches, on average since the last one
    samples: int  # done by it in all
    seconds: float  # since training began
    own_seconds: float  # for a step, of late, without waiting
    waiting: float  # the share of its time that it waits, of late


class Checked(msgspec.Struct, frozen=True, tag=True):
    """The measure on held-out data."""

    step: int
    value: float


class Stage(msgspec.Struct, frozen=True, tag=True):
    """What comes now, in words."""

    text: str


class MemberStarts(msgspec.Struct, frozen=True, tag=True):
    """A member of an elastic job runs, and is about to take part."""

    member: int
    pid: int


class ShardLoss(msgspec.Struct, frozen=True, tag=True):
    """The loss of one shard of a step, as one member has computed it."""

    member: int
    step: int
    shard: int
    loss: float


class MemberEnds(msgspec.Struct, frozen=True, tag=True):
    """A member has left."""

    member: int
    digest: str  # of its weights; empty if it never had those of the job


Message = Tick | Checked | Stage | MemberStarts | ShardLoss | MemberEnds


class Teller:
    """A rank's end; one that has no address tells nobody."""

    def __init__(self, address: str) -> None:
        self._address = b"\0" + address.encode() if address else b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def tell(self, message: Message) -> None:
        """Send ``message``; ticks are dropped when nobody takes them, other messages wait."""
        if not self._address:
            return
        flags = socket.MSG_DONTWAIT if isinstance(message, Tick) else 0
        with suppress(BlockingIOError):
            self._socket.sendto(msgspec.msgpack.encode(message), flags, self._address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()


class TalkListener:
    """The drawing end: calls ``hear`` with each message on a thread of its own, until closed."""

    def __init__(self, hear: Callable[[Message], None]) -> None:
        self.address = f"paceline-demo-{secrets.token_hex(16)}"
        self._hear = hear
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(b"\0" + self.address.encode())
        self._thread = threading.Thread(target=self._listen, name="demo listener", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait in recv
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while data := self._socket.recv(1 << 16):
            try:
                self._hear(self._decoder.decode(data))
            except msgspec.MsgspecError:  # a stranger's
                continue
            except OSError:  # nobody reads what it shows; the ranks must not wait for that
                self._hear = _ignore


def _ignore(message: Message) -> None:
    """Do nothing with it."""
