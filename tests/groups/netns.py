"""Hosts for tests: network namespaces of this machine, joined by a cable.

Abstract Unix sockets and interfaces belong to a namespace, so ranks in two of them cannot see each
other but through the cable, as on two machines.
"""

import ctypes
import functools
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """A namespace with one interface to the other host."""

    namespace: str
    interface: str
    address: str

    def enter(self) -> None:
        """Put this process there, for good, and have gloo use the cable."""
        with Path("/run/netns", self.namespace).open() as place:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(place.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def sent(self) -> int:
        """Bytes this host has put on the cable."""
        # /sys shows the namespace that mounted it; the process's own table is always right.
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                return int(numbers.split()[8])
        raise LookupError(f"{self.interface} is not in the namespace of this process")


@contextmanager
def two_hosts(megabits: int = 0) -> Iterator[tuple[Host, Host]]:
    """Two hosts; with ``megabits``, their cable carries no more than that each way."""
    name = f"pl{secrets.token_hex(4)}"
    hosts = tuple(Host(f"{name}{x}", f"{name}{x}", f"192.0.2.{n}") for n, x in ((1, "a"), (2, "b")))
    made = []
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            made.append(host.namespace)
        a, b = hosts
        _ip("link", "add", a.interface, "netns", a.namespace,
            "type", "veth", "peer", "name", b.interface, "netns", b.namespace)  # fmt: skip
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            if megabits:
                _limit(host, megabits)
        yield a, b
    finally:
        for namespace in made:  # its interface goes with it
            _ip("netns", "delete", namespace)


def _limit(host: Host, megabits: int) -> None:
    bucket = ("rate", f"{megabits}mbit", "burst", "128kb", "latency", "100ms")
    _run("tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, "root", "tbf", *bucket)


@functools.cache
def unable(megabits: int = 0) -> str:
    """Why there can be no hosts, or no limit on their cable, here; empty if there can."""
    if not shutil.which("ip"):
        return "there is no ip command"
    try:
        with two_hosts(megabits):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"network namespaces cannot be made: {said.strip()}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
