"""One question over HTTP: a connection of its own, all bytes of the answer, and a deadline.

Python's ``http.client`` reads the answer, but only once all of it is here: who sends it byte by
byte, or more than there can be, is hung up on.
"""

from __future__ import annotations

import io
import socket
import ssl
import time
from http.client import HTTPException, HTTPResponse
from typing import Any

from ..errors import StoreAnswerError

LARGEST = 1 << 22  # bytes of an answer; etcd takes no value over 1.5 MB
_CHUNK = 1 << 16


def post(
    server: tuple[str, int], path: str, body: bytes, until: float, tls: ssl.SSLContext | None
) -> tuple[int, bytes]:
    """Ask, and give the status and the body of the answer.

    ``until`` is on the monotonic clock. Raises OSError where nobody answers in time, and
    StoreAnswerError (another one) for what is no HTTP.
    """
    with socket.create_connection(server, _left(until)) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        talk = plain if tls is None else tls.wrap_socket(plain, server_hostname=server[0])
        with talk:
            talk.settimeout(_left(until))
            talk.sendall(_request(server[0], path, body))
            return _parse(_read(talk, until))


def _request(host: str, path: str, body: bytes) -> bytes:
    name = f"[{host}]" if ":" in host else host
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {name}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii", "replace") + body


def _read(talk: socket.socket, until: float) -> bytes:
    """Everything that comes until the other side hangs up."""
    found = bytearray()
    while True:
        talk.settimeout(_left(until))
        piece = talk.recv(_CHUNK)
        if not piece:
            return bytes(found)
        found += piece
        if len(found) > LARGEST:
            raise StoreAnswerError(f"more than {LARGEST} bytes")


class _Received:
    """Bytes that have come, as the socket that ``http.client`` wants to read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: Any, **__: Any) -> io.BytesIO:
        return io.BytesIO(self._data)


def _parse(data: bytes) -> tuple[int, bytes]:
    answer = HTTPResponse(_Received(data), method="POST")  # type: ignore[arg-type]
    try:
        answer.begin()
        return answer.status, answer.read()
    except (HTTPException, ValueError) as error:
        raise StoreAnswerError(f"no HTTP ({type(error).__name__}: {error})") from None


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
