"""Sockets of one folder, by name: what is said before a talk with one of them.

Who comes from another host names the socket that it wants. Who asks its own launcher to be led to
another host names that host's port too, and says whether it waits for an answer: ``ask``, and it
hears whether somebody listens there, or ``tell``, and it may hang up at once.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path

GONE = b"\x07"  # said instead of a welcome: nobody listens at that socket
LONGEST = 255  # bytes
_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")


@dataclass(frozen=True)
class Wanted:
    """A socket of another host, and the port that leads to it."""

    answer: bool
    address: tuple[str, int]
    name: str

    def pack(self) -> bytes:
        """As it is said to one's own launcher."""
        host, port = self.address
        return frame(f"{'ask' if self.answer else 'tell'} {host} {port} {self.name}")

    @classmethod
    def read(cls, text: str) -> Wanted:
        """Raises ValueError for what is none."""
        kind, host, port, name = text.split(" ")
        if kind not in ("ask", "tell") or not 0 < int(port) < 65536:
            raise ValueError(f"{kind} at port {port}")
        return cls(kind == "ask", (host, int(port)), checked(name))


def frame(text: str) -> bytes:
    """One word of at most 255 bytes."""
    data = text.encode()
    if len(data) > LONGEST:
        raise ValueError(f"{len(data)} bytes instead of {LONGEST} at most")
    return bytes([len(data)]) + data


async def read_frame(reader: asyncio.StreamReader) -> str:
    """One word. Raises ValueError, or EOFError if it is not whole."""
    (size,) = await reader.readexactly(1)
    return (await reader.readexactly(size)).decode()


def socket_in(folder: str, name: str) -> str:
    """The path of a socket; a name leads nowhere else. Raises ValueError for what is none."""
    return str(Path(folder) / checked(name))


def checked(name: str) -> str:
    """Refuse a name that no socket can have (ValueError), such as one with a slash."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} names no socket")
    return name
