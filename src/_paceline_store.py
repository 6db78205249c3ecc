"""The store of a run on one machine, as its ranks see it: a Unix socket instead of a port.

``paceline run`` answers there (``paceline/_members/store_host.py``); only processes of its user can
connect. It lies beside the package since every rank needs it, also one whose script does not use
paceline: to import anything from the package is to import all of it.

C++ asks a store from threads of its own, through these methods. Each question goes out on a
connection that no other thread uses, so one that waits holds up nobody. There is no thread here.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed import Store

_EmptyError: Any = getattr(dist, "QueueEmptyError", dist.DistStoreError)
_MARGIN = 5.0  # seconds that the answer to a question that never waits may take at least


class Answer(msgspec.Struct):
    """What was asked for, or why there is none."""

    values: tuple[bytes, ...] = ()
    number: int = 0
    keys: tuple[str, ...] = ()
    error: str = ""
    why: str = ""


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Answer)


class Lines:
    """Connections to one socket; a thread takes a free one, or opens another."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._free: list[socket.socket] = []
        self._lock = threading.Lock()
        self._process = os.getpid()

    def ask(self, question: dict[str, Any], seconds: float) -> Answer | None:
        """The answer; None if it does not come in time. Raises OSError when nobody is there."""
        data = _ENCODER.encode(question)
        line = self._take()
        try:
            line.settimeout(seconds)
            line.sendall(len(data).to_bytes(4, "big") + data)
            until = time.monotonic() + seconds
            size = int.from_bytes(_read(line, 4, until), "big")
            answer = _DECODER.decode(_read(line, size, until))
        except TimeoutError:
            line.close()  # nobody waits for that answer any more
            return None
        except BaseException:
            line.close()
            raise
        with self._lock:
            self._free.append(line)
        return answer

    def _take(self) -> socket.socket:
        if os.getpid() != self._process:  # forked: the parent's connections are its own
            self._lock, self._process = threading.Lock(), os.getpid()
            while self._free:
                self._free.pop().close()
        with self._lock:
            if self._free:
                return self._free.pop()
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(self.path)
        except BaseException:
            line.close()
            raise
        return line

    def close(self) -> None:
        """Close what nobody uses now."""
        with self._lock:
            while self._free:
                self._free.pop().close()


def _read(line: socket.socket, size: int, until: float) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        line.settimeout(max(1e-6, until - time.monotonic()))
        part = line.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("the launcher has hung up")
        parts += part
    return bytes(parts)


class AskingStore(Store):
    """A torch store whose keys lie elsewhere: every method asks for them there.

    C++ looks up some methods by other names than Python does; both are here. The queues cannot be
    reached through a ``PrefixStore``, which torch has only for stores of its own.
    """

    timeout: timedelta  # torch's own, which C++ sets too

    def ask(
        self,
        op: Any,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        number: int = 0,
        timeout: timedelta | None = None,
    ) -> Any:
        """Do what ``op`` says to ``keys``; the answer has ``values``, a ``number`` and ``keys``."""
        raise NotImplementedError

    def seconds_for(self, op: str, timeout: timedelta | None) -> float:
        """How long the answer may take; one that no other rank delays always has some time."""
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        return seconds if op in ("get", "wait", "pop") else max(seconds, _MARGIN)

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a value."""
        self.ask("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self._value("get", [key])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self.ask("wait", keys, timeout=timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._number("check", keys))

    def add(self, key: str, value: int) -> int:
        """Add to a number, which begins with 0; the sum."""
        return self._number("add", [key], number=value)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Replace a value if it is the expected one, none if that is empty; what is there then."""
        return self._value("compare_set", [key], [_bytes(expected_value), _bytes(desired_value)])

    def delete_key(self, key: str) -> bool:
        """Drop a key; whether it was there."""
        return bool(self._number("delete", [key]))

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._number("count")

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes at the end of a value."""
        self.ask("append", [key], [_bytes(value)])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values."""
        return list(self.ask("get", keys).values)

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Leave several values at once."""
        if len(keys) != len(values):
            raise dist.DistStoreError("multi_set needs as many values as keys")
        self.ask("set", keys, [_bytes(value) for value in values])

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self.ask("push", [key], [_bytes(value)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue."""
        return self._value("pop", [key], number=int(block))

    def queue_len(self, key: str) -> int:
        """How many values a queue has."""
        return self._number("length", [key])

    def list_keys(self) -> list[str]:
        """All keys."""
        return list(self.ask("list").keys)

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set are there: they are."""
        return True

    deleteKey = delete_key
    getNumKeys = num_keys

    def _value(
        self, op: str, keys: Sequence[str], values: Sequence[bytes] = (), number: int = 0
    ) -> bytes:
        found: bytes = self.ask(op, keys, values, number).values[0]
        return found

    def _number(self, op: str, keys: Sequence[str] = (), number: int = 0) -> int:
        return int(self.ask(op, keys, number=number).number)


class SocketStore(AskingStore):
    """A torch store whose keys lie with the launcher, behind a Unix socket."""

    def __init__(self, lines: Lines, attempt: int, timeout: timedelta) -> None:
        super().__init__()
        self.lines, self.attempt = lines, attempt
        self.set_timeout(timeout)
        if not _kept:
            atexit.register(_close_lines)
        _kept.append(self)

    def clone(self) -> Store:
        """Give a store of the same keys; any thread may use either."""
        return SocketStore(self.lines, self.attempt, self.timeout)

    def ask(
        self,
        op: str,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        number: int = 0,
        timeout: timedelta | None = None,
    ) -> Answer:
        """Ask the launcher."""
        limit = self.seconds_for(op, timeout)
        asked = {"type": "AskKeys", "id": 0, "roster": self.attempt, "op": op}
        asked |= {"keys": list(keys), "values": list(values), "number": number}
        try:
            answer = self.lines.ask(asked, max(limit, 0.001))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise dist.DistNetworkError(
                f"the store of paceline run at {self.lines.path} cannot be reached: {error}"
            ) from None
        found: Answer = checked(answer, keys, limit)
        return found


# C++ holds its half of a store, which is nothing without the half that Python would let go of.
_kept: list[SocketStore] = []


def _close_lines() -> None:
    for store in _kept:
        store.lines.close()


def checked(answer: Any, keys: Sequence[str], seconds: float, whose: str = "") -> Any:
    """Return ``answer``; raise what torch's stores do if it is an error, or None: too late."""
    if answer is None:
        waited = f"wait timeout after {round(seconds * 1000)}ms, keys: {', '.join(keys)}"
        raise dist.DistStoreError(waited)
    if answer.error == "empty":
        raise _EmptyError(answer.why)
    if answer.error == "value":
        raise ValueError(answer.why)
    if answer.error:
        raise dist.DistStoreError(f"{whose}{answer.why}")
    return answer


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


# -- where torch looks for it -----------------------------------------------------------------


def store_at(place: str, timeout: timedelta) -> Store:
    """The store at ``place``: ``unix:NUMBER:PATH``, or ``file:PATH``.

    The number is that of this start of the ranks.
    """
    kind, _, path = place.partition(":")
    if kind == "unix":
        number, _, path = path.partition(":")
        return SocketStore(Lines(path), int(number), timeout)
    files = dist.FileStore(path, -1)
    files.set_timeout(timeout)
    return files
