"""The side door: how processes of a job ask each other what they do, on one host and on several.

A launcher has a folder for the sockets of its processes, and says in ``PACELINE_SIDE_DOOR`` where
it is. On several hosts it lets the other launchers in there (:meth:`Porter.serve`), and leads its
own processes to theirs (:meth:`Porter.lead`); a file in the folder has its address for them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from .certificates import Identity
from .porter import Porter
from .tls import listen
from .unix import bind_private

SIDE_DOOR = "PACELINE_SIDE_DOOR"
SIDE = "side"
OUT = "out"  # the socket that leads to other hosts
_ADDRESS = "address"  # of this host, for others


@dataclass(frozen=True)
class SideDoor:
    """The folder for the sockets of this host, and where others come in if there are any."""

    folder: str
    host: str = ""
    port: int = 0

    @classmethod
    def of_launcher(cls) -> SideDoor | None:
        """The one that this process's launcher has; None if it has none."""
        folder = os.environ.get(SIDE_DOOR, "")
        if not folder or not os.path.isdir(folder):
            return None
        with contextlib.suppress(OSError, ValueError):
            host, _, port = Path(folder, _ADDRESS).read_text().rpartition(":")
            return cls(folder, host, int(port))
        return cls(folder)

    @classmethod
    def make(cls, folder: Path) -> SideDoor:
        """One inside ``folder``, for the processes of one host."""
        made = folder / SIDE
        made.mkdir(mode=0o700)
        return cls(str(made))

    def join(self, porter: Porter, identity: Identity, host: str, port: int) -> None:
        """Lead to other hosts, which come in at that port."""
        porter.lead(bind_private(Path(self.folder, OUT)), identity, SIDE)
        Path(self.folder, _ADDRESS).write_text(f"{host}:{port}")

    def open(self, porter: Porter, identity: Identity, first: str) -> None:
        """Open a port for other hosts, on the interface to the first, and lead to them."""
        host = os.environ.get("PACELINE_RECORDER_HOST") or way_to(first)
        listener = listen(host, 0)
        self.join(porter, identity, host, listener.getsockname()[1])
        porter.serve(listener, identity, {SIDE: self.folder})


def way_to(host: str) -> str:
    """The address of this host on the interface that leads to another; loopback if none does."""
    for family, _, _, _, where in _found(host):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing; the kernel picks the way
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _found(host: str) -> list[tuple[socket.AddressFamily, object, object, object, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else []  # type: ignore[return-value]
    except OSError:
        return []
