"""A cable between two network namespaces with the rate and the delay of a real one.

Many kernels come without netem, so the cable is a process: each host has a TUN interface, and what
the kernel of one host sends there arrives at the other when it would over an Ethernet of that rate
and length. TCP runs from end to end over it, with its own windows and losses. Nothing but the
cable is emulated::

    sends ── queue (as long as the cable is busy, at most 50 ms) ── rate ── delay ── arrives

Kernels hand over up to 64 KiB at once (segmentation offload), which is why Python is fast enough:
about 30 us of CPU for each. A frame is charged what its segments would take on Ethernet, with
preamble, checksum and gap. The relay runs ahead of all other processes where it may, so that ranks
that compute do not slow the cable down; the CPU time it took is told at the end.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import secrets
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

QUEUE = 0.05  # seconds a frame may wait for the cable; beyond, it is lost
ETHERNET = 38  # bytes of a segment besides its IP packet: preamble, header, checksum, gap

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x1, 0x2
_VNET = struct.Struct("=BBHHHH")  # what the kernel says of a frame it has left to be cut up
_LARGEST = 1 << 17


@dataclass(frozen=True)
class Link:
    """How fast a cable is each way, and how long."""

    megabits: float
    milliseconds: float

    def __str__(self) -> str:
        rate = f"{self.megabits / 1000:g} Gbit/s" if self.megabits >= 1000 else ""
        return f"{rate or f'{self.megabits:g} Mbit/s'}, {self.milliseconds:g} ms"


@dataclass(frozen=True)
class Host:
    """A namespace with one interface to the other host."""

    namespace: str
    interface: str
    address: str

    def enter(self) -> None:
        """Put this process there, for good, and have gloo use the cable."""
        enter_namespace(self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def sent(self) -> int:
        """Bytes this host has put on the cable, as its own kernel counts them."""
        # /sys shows the namespace that mounted it; the process's own table is always right.
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                return int(numbers.split()[8])
        raise LookupError(f"{self.interface} is not in the namespace of this process")


@dataclass
class Cable:
    """Two hosts and, once the cable is gone, what its relay has to tell."""

    hosts: tuple[Host, Host]
    told: dict[str, float] = field(default_factory=dict)


def enter_namespace(name: str) -> None:
    with Path("/run/netns", name).open() as place:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(place.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


# -- laying a cable ---------------------------------------------------------------------------


@contextmanager
def lay_cable(link: Link) -> Iterator[Cable]:
    """Make two hosts, joined by ``link``; both are gone afterwards."""
    name = f"pw{secrets.token_hex(3)}"
    a, b = (Host(f"{name}{x}", f"{name}{x}", f"192.0.2.{n}") for n, x in ((1, "a"), (2, "b")))
    cable = Cable((a, b))
    made = []
    try:
        for host in cable.hosts:
            _ip("netns", "add", host.namespace)
            made.append(host.namespace)
        with _relay(cable, link):
            for host in cable.hosts:
                _plug_in(host)
            yield cable
    finally:
        for namespace in made:
            _ip("netns", "delete", namespace)


def _plug_in(host: Host) -> None:
    at = ("-n", host.namespace)
    _ip(*at, "address", "add", f"{host.address}/24", "dev", host.interface)
    _ip(*at, "link", "set", host.interface, "up")
    _ip(*at, "link", "set", "lo", "up")


@contextmanager
def _relay(cable: Cable, link: Link) -> Iterator[None]:
    names = [host.namespace for host in cable.hosts]
    command = [sys.executable, __file__, *names, str(link.megabits), str(link.milliseconds)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as relay:
        assert relay.stdin is not None
        assert relay.stdout is not None
        assert relay.stderr is not None
        try:
            if relay.stdout.readline().strip() != "ready":
                raise OSError(f"the cable cannot be laid: {relay.stderr.read().strip()}")
            yield
        finally:
            relay.stdin.close()  # it ends then, and also when this process dies
            with suppress(ValueError):
                cable.told.update(json.loads(relay.stdout.read()))
            relay.wait(timeout=10)


def unable(link: Link | None = None) -> str:
    """Why no cable can be laid here; empty if it can."""
    if not shutil.which("ip"):
        return "there is no ip command (iproute2)"
    try:
        with lay_cable(link or Link(1000, 1)):
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"no network namespaces with a cable: {said.strip().splitlines()[-1]}"


def congestion_control() -> str:
    """What TCP on these hosts goes by: what the machine does."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


# -- the relay, a process of its own ----------------------------------------------------------


def open_tun(namespace: str) -> int:
    """Make the interface named like its namespace, and the file its frames are read from."""
    enter_namespace(namespace)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", namespace.encode(), flags))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return fd


@dataclass
class Way:
    """One direction of the cable."""

    source: int
    target: int
    seconds_per_byte: float
    delay: float
    free_at: float = 0.0  # when the last frame that was accepted has left
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)
    frames: int = 0
    lost: int = 0
    wire_bytes: int = 0

    def accept(self) -> None:
        """Read what the source's kernel has sent, and say when it will arrive."""
        while True:
            try:
                frame = os.read(self.source, _LARGEST)
            except BlockingIOError:
                return
            now = time.monotonic()
            if self.free_at - now > QUEUE:
                self.lost += 1
                continue
            size = size_on_wire(frame)
            self.free_at = max(self.free_at, now) + size * self.seconds_per_byte
            self.under_way.append((self.free_at + self.delay, frame))
            self.frames += 1
            self.wire_bytes += size

    def deliver(self) -> None:
        """Hand over what has arrived by now."""
        waiting = self.under_way
        while waiting and waiting[0][0] <= time.monotonic():
            try:
                os.write(self.target, waiting.popleft()[1])
            except OSError as error:
                if error.errno not in (errno.EIO, errno.EINVAL):  # its interface is not up
                    raise

    @property
    def next_arrival(self) -> float:
        return self.under_way[0][0] if self.under_way else float("inf")


def size_on_wire(frame: bytes) -> int:
    """Bytes that the segments of a frame take on an Ethernet."""
    kind, headers, segment = map(int, _VNET.unpack_from(frame)[1:4])
    size = len(frame) - _VNET.size
    if kind == 0 or segment == 0:
        return size + ETHERNET
    count = max(1, -(-(size - headers) // segment))
    return size + (count - 1) * headers + count * ETHERNET


def relay(names: list[str], link: Link) -> None:
    """Carry frames both ways until standard input is closed."""
    a, b = map(open_tun, names)
    per_byte = 8e-6 / link.megabits
    ways = [Way(x, y, per_byte, link.milliseconds / 1e3) for x, y in ((a, b), (b, a))]
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    while True:
        for way in ways:
            way.deliver()
        wait = min(way.next_arrival for way in ways) - time.monotonic()
        ready, _, _ = select.select([a, b, 0], (), (), max(0.0, min(wait, 1.0)))
        if 0 in ready:
            break
        for way in ways:
            if way.source in ready:
                way.accept()
    print(json.dumps(_told(ways)), flush=True)


def _told(ways: list[Way]) -> dict[str, float]:
    return {
        "cpu": time.process_time(),
        "frames": sum(way.frames for way in ways),
        "lost": sum(way.lost for way in ways),
        "wire_bytes": sum(way.wire_bytes for way in ways),
    }


if __name__ == "__main__":
    relay(sys.argv[1:3], Link(float(sys.argv[3]), float(sys.argv[4])))
