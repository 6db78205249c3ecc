"""Where a process has its end of the side channel, and how another process gets there.

- Under ``paceline run`` it is a Unix socket in a folder of the launcher's, which only the same user
  can look into. On several hosts launchers carry what is said between these folders, with TLS
  (``_doors``); processes open no port.
- Without it, and on one host: a Unix socket with a random name that is no file's. Another user's
  process can call there and is hung up on.
- Without it, on several hosts: a TCP and a UDP port.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path

import msgspec

from .._doors import (
    GONE,
    OUT,
    WELCOME,
    SideDoor,
    Wanted,
    bind_nameless,
    bind_private,
    connect_private,
    way_to,
)

_PAUSE = 0.005  # seconds until a socket is tried again where many call at once


class Address(msgspec.Struct, frozen=True):
    """Where a process answers; ``board`` is what it calls its end of the group.

    With a ``path``, that is its Unix socket, and ``host`` and ``port`` are those of its launcher,
    where it has one that other hosts reach.
    """

    process: str  # a word that no other process has
    host: str
    port: int
    key: bytes
    machine: str  # what has one clock
    network: str  # what has one loopback, and one set of names for sockets
    board: int
    path: str = ""


class UnreachableError(OSError):
    """There is no way to that process from here; it may well be alive."""


def open_socket() -> tuple[socket.socket, SideDoor | None]:
    """A Unix socket for this process, and the door of its launcher if it lies behind that."""
    door = SideDoor.of_launcher()
    if door is not None:
        with contextlib.suppress(OSError):  # the folder is gone, or its name too long
            return bind_private(Path(door.folder, secrets.token_hex(4))), door
    return bind_nameless(), None


def call(address: Address, patience: float, answer: bool = True) -> socket.socket:
    """A connection to the process at ``address``.

    Raises ConnectionError when it no longer listens, UnreachableError when there is no way
    to it, another OSError when it is not to be had in time. Without ``answer`` it is only to be
    told something: then whether it listens is not found out on another host.
    """
    until = time.monotonic() + patience
    if not address.path:
        if address.host.startswith("127.") and address.network != network():
            raise UnreachableError("it is on another host and did not know of ours")
        return socket.create_connection((address.host, address.port), timeout=patience)
    if is_far(address):
        return _call_far(address, until, answer)
    if address.path.startswith("\0") and address.network != network():
        raise UnreachableError("it is on another host and did not know of ours")
    try:
        return _connect(address.path, until)
    except FileNotFoundError:
        raise ConnectionRefusedError("its socket is gone") from None


def _connect(path: str, until: float) -> socket.socket:
    """Connect; waits where so many call at once that there is no room for one more."""
    while True:
        try:
            return connect_private(path, max(0.001, until - time.monotonic()))
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError("too many processes connect to it at once") from None
            time.sleep(_PAUSE)


def _call_far(address: Address, until: float, answer: bool) -> socket.socket:
    """Be led to another host by the launcher of this one."""
    door = SideDoor.of_launcher()
    if door is None or not address.host or not door.host:
        raise UnreachableError("it belongs to another launcher, and no launcher leads there")
    wanted = Wanted(answer, (address.host, address.port), os.path.basename(address.path))
    try:
        talk = _connect(str(Path(door.folder, OUT)), until)
    except OSError as error:
        raise UnreachableError(f"the launcher of this host leads nowhere: {error}") from None
    try:
        talk.sendall(wanted.pack())
        said = talk.recv(1) if answer else WELCOME
    except BaseException:
        talk.close()
        raise
    if said == WELCOME:
        return talk
    talk.close()
    if said == GONE:
        raise ConnectionRefusedError("it no longer listens")
    raise UnreachableError("the launchers do not reach each other")


def open_ports(host: str) -> tuple[socket.socket, socket.socket]:
    """A socket for talks and one for letters, on the same port."""
    for _ in range(20):
        talks = socket.create_server((host, 0), backlog=512)
        letters = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            letters.bind(talks.getsockname()[:2])
            return talks, letters
        except OSError:  # somebody else has that one
            talks.close()
            letters.close()
    raise OSError(f"no free port on {host}")


def interface(meeting: str) -> str:
    """Loopback on one host; else the interface that leads to where the ranks meet."""
    if chosen := os.environ.get("PACELINE_RECORDER_HOST"):
        return chosen
    if os.environ.get("WORLD_SIZE", "") == os.environ.get("LOCAL_WORLD_SIZE", "?"):
        return "127.0.0.1"
    return way_to(meeting or os.environ.get("MASTER_ADDR", ""))


def port_on(meeting: str) -> str:
    """The address to open a port on; empty where a Unix socket will do."""
    if SideDoor.of_launcher() is not None:
        return ""
    host = interface(meeting)
    chosen = "PACELINE_RECORDER_HOST" in os.environ
    return host if chosen or not host.startswith("127.") else ""


def is_far(address: Address) -> bool:
    """Whether launchers have to lead there."""
    if not address.path or address.path.startswith("\0"):
        return False
    door = SideDoor.of_launcher()
    return door is None or door.folder != os.path.dirname(address.path)


def machine() -> str:
    """A name for what has one clock."""
    return f"{socket.gethostname()} {_read('/proc/sys/kernel/random/boot_id')}"


def network() -> str:
    """A name for what has one loopback."""
    try:
        return f"{machine()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
