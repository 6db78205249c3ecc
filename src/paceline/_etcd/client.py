"""The calls of etcd that an election needs: leases, reading keys, and writing under conditions.

Each has a deadline for all servers together; they are asked in turn until one answers, and one
that did not comes last from then on. A write whose answer was lost may have happened:
:class:`Etcd` does not send it again, and who wrote looks.
"""

from __future__ import annotations

import socket
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from ..errors import StoreAnswerError, StoreLostError
from .address import StoreAddress
from .http import post

PATIENCE = 3.0  # seconds for one question
_SHORTEST = 0.5  # seconds that one of several servers gets
_NOT_FOUND = 5  # gRPC's code for a lease that has ended
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class KeptKey:
    """The value of a key, and when it was last changed."""

    value: bytes
    created: int  # the store's revision that made the key
    changed: int  # …and the last one that changed it


@dataclass(frozen=True)
class Put:
    """A value for a key; with a lease it goes when the lease does."""

    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Condition:
    """A key has to be as it was seen; 0: it must not be there."""

    key: str
    created: int | None = None
    changed: int | None = None


class _TxnHeader(msgspec.Struct):
    revision: int = 0


class _Granted(msgspec.Struct):
    ID: int
    TTL: int


class _Beat(msgspec.Struct):
    TTL: int = 0  # left out when it is 0


class _Beats(msgspec.Struct):
    result: _Beat


class _KeyValue(msgspec.Struct):
    key: bytes  # base64, which msgspec reads
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0


class _KeyRange(msgspec.Struct):
    kvs: list[_KeyValue] = []


class _TxnResponse(msgspec.Struct):
    response_range: _KeyRange | None = None


class _TxnDone(msgspec.Struct):
    header: _TxnHeader
    succeeded: bool = False
    responses: list[_TxnResponse] = []


class _Refusal(msgspec.Struct):
    code: int = 0
    message: str = ""
    error: str = ""


class _Nothing(msgspec.Struct):
    """An answer whose contents are not used."""


# msgspec looks at each of them here, in the thread that imports: two threads that have it look at
# a class at once crash the process.
_READ = [msgspec.json.Decoder(kind) for kind in (_Granted, _Beats, _TxnDone, _Refusal, _Nothing)]


class Etcd:
    """One etcd, from one process. Any thread may call."""

    def __init__(self, address: StoreAddress, patience: float = PATIENCE) -> None:
        self.address = address
        self._patience = patience
        self._tls = address.context()
        self._servers = list(address.servers)

    def local_address(self) -> str:
        """The address of this host on the way to the store."""
        until = time.monotonic() + self._patience
        trouble: OSError = OSError("no server")
        for server in self._servers:
            try:
                with socket.create_connection(server, max(0.001, until - time.monotonic())) as made:
                    return str(made.getsockname()[0])
            except OSError as error:
                trouble = error
        raise StoreLostError(str(self.address), str(trouble))

    def grant(self, seconds: int) -> int:
        """A new lease, which ends after so many seconds unless it is kept."""
        return self._ask("lease/grant", {"TTL": str(seconds)}, _Granted).ID

    def keep(self, lease: int) -> bool:
        """Let a lease begin again; False if it has ended."""
        try:
            answer = self._ask("lease/keepalive", {"ID": str(lease)}, _Beats)
        except _LeaseOverError:
            return False
        return answer.result.TTL > 0

    def revoke(self, lease: int) -> None:
        """End a lease, and the keys that hang on it."""
        with suppress(_LeaseOverError):
            self._ask("lease/revoke", {"ID": str(lease)}, _Nothing)

    def read(self, *keys: str) -> dict[str, KeptKey]:
        """Those of ``keys`` that are there, all at the same moment."""
        wanted = [{"request_range": {"key": _text(key)}} for key in keys]
        done = self._ask("kv/txn", {"success": wanted}, _TxnDone)
        found = [
            kv for one in done.responses if one.response_range for kv in one.response_range.kvs
        ]
        return {
            kv.key.decode(errors="replace"): KeptKey(kv.value, kv.create_revision, kv.mod_revision)
            for kv in found
        }

    def write(self, puts: Mapping[str, Put], conditions: Sequence[Condition]) -> int | None:
        """Write all of it if all conditions hold; gives the revision, or None if they do not.

        Raises StoreLostError where there was no answer: it may be written or not.
        """
        asked = {
            "compare": [_compare(one) for one in conditions],
            "success": [{"request_put": _put(key, put)} for key, put in puts.items()],
        }
        try:
            done = self._ask("kv/txn", asked, _TxnDone, once=True)
        except _LeaseOverError:
            return None
        return done.header.revision if done.succeeded else None

    def _ask(self, call: str, asked: Any, kind: type[Answer], once: bool = False) -> Answer:
        """Ask servers in turn until one answers; ``once``: the first that took the question."""
        body = msgspec.json.encode(asked)
        until = time.monotonic() + self._patience
        trouble = "no server"
        for server in list(self._servers):
            share = max(_SHORTEST, (until - time.monotonic()) / len(self._servers))
            try:
                status, text = post(
                    server, f"/v3/{call}", body, time.monotonic() + share, self._tls
                )
                answer = _decoded(status, text, kind)
                return answer
            except OSError as error:
                trouble = f"{server[0]}:{server[1]}: {error}"
                self._servers = [*(one for one in self._servers if one != server), server]
                if once and not isinstance(error, ConnectionRefusedError):
                    break  # it may have been asked
        raise StoreLostError(str(self.address), trouble)


class _LeaseOverError(Exception):
    """The lease has ended."""


def _decoded(status: int, text: bytes, kind: type[Answer]) -> Answer:
    try:
        if status == HTTPStatus.OK:
            return msgspec.json.decode(text, type=kind, strict=False)
        refusal = msgspec.json.decode(text, type=_Refusal)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreAnswerError(f"status {status} and {text[:80]!r} ({error})") from None
    if refusal.code == _NOT_FOUND and "lease" in refusal.message:
        raise _LeaseOverError
    raise StoreAnswerError(f"status {status}: {refusal.message or refusal.error}")


def _compare(condition: Condition) -> dict[str, str]:
    key = {"key": _text(condition.key), "result": "EQUAL"}
    if condition.changed is not None:
        return {**key, "target": "MOD", "mod_revision": str(condition.changed)}
    return {**key, "target": "CREATE", "create_revision": str(condition.created or 0)}


def _put(key: str, put: Put) -> dict[str, str]:
    return {
        "key": _text(key),
        "value": b64encode(put.value).decode(),
        "lease": str(put.lease),
    }


def _text(key: str) -> str:
    return b64encode(key.encode()).decode()
