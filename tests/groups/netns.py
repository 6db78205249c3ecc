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


@dataclass(frozen=True)
class Star:
    """Hosts on one switch, each with a cable of its own."""

    switch: str  # a namespace
    hosts: tuple[Host, ...]

    def cut(self, host: Host) -> None:
        """Pull a host's cable."""
        _ip("-n", self.switch, "link", "set", _port(host), "down")

    def heal(self, host: Host) -> None:
        """Put it back."""
        _ip("-n", self.switch, "link", "set", _port(host), "up")

    def part(self, *hosts: Host) -> None:
        """Let these not reach each other, while all of them reach the rest."""
        for host in hosts:
            _run("bridge", "-n", self.switch, "link", "set", "dev", _port(host), "isolated", "on")


def _port(host: Host) -> str:
    return f"p{host.interface}"


@contextmanager
def star(count: int) -> Iterator[Star]:
    """So many hosts on a switch; what a host has open and runs is the caller's."""
    name = f"pl{secrets.token_hex(3)}"
    hosts = tuple(
        Host(f"{name}{x}", f"{name}{x}", f"192.0.2.{n}")
        for n, x in enumerate("abcdefgh"[:count], 1)
    )
    made = []
    try:
        for namespace in (name, *(host.namespace for host in hosts)):
            _ip("netns", "add", namespace)
            made.append(namespace)
        _ip("-n", name, "link", "add", "switch", "type", "bridge")
        _ip("-n", name, "link", "set", "switch", "up")
        for host in hosts:
            _ip("link", "add", host.interface, "netns", host.namespace,
                "type", "veth", "peer", "name", _port(host), "netns", name)  # fmt: skip
            _ip("-n", name, "link", "set", _port(host), "master", "switch")
            _ip("-n", name, "link", "set", _port(host), "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield Star(name, hosts)
    finally:
        for namespace in made:
            _ip("netns", "delete", namespace)


@functools.cache
def no_star() -> str:
    """Why there can be no hosts on a switch here; empty if there can."""
    try:
        with star(2) as made:
            made.part(*made.hosts)
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"network namespaces with a bridge cannot be made: {said.strip()}"


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
