"""What the machine is: cores, memory, compiler, network. Reads files and asks the kernel; no torch.

Inside a container or a batch job a process may use less than there is. What counts is what it may
use: the cores of its affinity mask, and of those no more than the quota of its control group.
"""

from __future__ import annotations

import fcntl
import math
import os
import platform
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..machine import cores as usable_cores
from ..machine import cpu_quota

CGROUPS = Path("/sys/fs/cgroup")
_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913
_UP = 1


@dataclass(frozen=True)
class Cores:
    """How many there are, and how many this process may use."""

    installed: int
    allowed: int  # by the affinity mask
    quota: float  # cores' worth of time by the control group; infinity: no limit
    usable: int  # how many ranks of one thread `paceline run` gives a core each


@dataclass(frozen=True)
class Memory:
    """In bytes; what the control group allows is taken into account."""

    total: int
    available: int
    dev_shm: int  # size of /dev/shm; 0: there is none
    dev_shm_free: int
    memfd: bool  # whether nameless shared memory works, which is what shm uses


@dataclass(frozen=True)
class Interface:
    """A network interface that is up."""

    name: str
    address: str  # IPv4; empty if it has none


@dataclass(frozen=True)
class Host:
    """What it is called, and whether that name leads back to it."""

    name: str
    address: str  # that the name resolves to; empty: it does not
    own: bool  # whether that address is one of this machine's


def read_cores() -> Cores:
    """The cores of this process."""
    allowed = len(os.sched_getaffinity(0))
    return Cores(os.cpu_count() or allowed, allowed, cpu_quota(), usable_cores())


def _memory_limit(folder: Path) -> float:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return float((folder / name).read_text())
    return math.inf


def _memory_groups(root: Path, own: Path) -> Iterator[Path]:
    """The folders of this process's control group for memory, and of all above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        top = root if number == "0" else root / controllers
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place == top or top in place.parents:
                yield place


def read_memory() -> Memory:
    """Of the machine, or of the control group where that is less."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(facts[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    groups = _memory_groups(CGROUPS, Path("/proc/self/cgroup"))
    limit = min((_memory_limit(folder) for folder in groups), default=math.inf)
    size, free = _dev_shm()
    return Memory(int(min(total, limit)), int(min(available, limit)), size, free, _memfd_works())


def _dev_shm() -> tuple[int, int]:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _memfd_works() -> bool:
    try:
        os.close(os.memfd_create("paceline-doctor"))
    except (OSError, AttributeError):
        return False
    return True


def cpu_name() -> str:
    """As the kernel tells it, or lscpu: ARM's /proc/cpuinfo has numbers only. Else empty."""
    with suppress(OSError):
        if found := _value_of("model name", Path("/proc/cpuinfo").read_text()):
            return found
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, timeout=10)
        names = (_value_of(name, told.stdout) for name in ("Vendor ID", "Model name"))
        return " ".join(name for name in names if name not in ("", "-"))
    return platform.processor()


def _value_of(name: str, text: str) -> str:
    """What stands after the colon of the first line of that name; empty if there is none."""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def find_compiler() -> str:
    """The C compiler that an install would use; empty if there is none."""
    names = [os.environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang"]
    return next((path for name in names if name and (path := shutil.which(name))), "")


def interfaces() -> list[Interface]:
    """Every interface that is up, in the kernel's order."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        names = [name for _, name in socket.if_nameindex() if _is_up(asking, name)]
        return [Interface(name, _address(asking, name)) for name in names]


def _is_up(asking: socket.socket, name: str) -> bool:
    answer = _ask(asking, name, _SIOCGIFFLAGS)
    return bool(answer) and bool(struct.unpack_from("=H", answer, 16)[0] & _UP)


def _address(asking: socket.socket, name: str) -> str:
    answer = _ask(asking, name, _SIOCGIFADDR)
    return socket.inet_ntoa(answer[20:24]) if answer else ""


def _ask(asking: socket.socket, name: str, question: int) -> bytes:
    try:
        return fcntl.ioctl(asking.fileno(), question, struct.pack("256s", name[:15].encode()))
    except OSError:
        return b""


def read_host(found: list[Interface] | None = None) -> Host:
    """This machine's name, and where it leads."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Host(name, "", False)
    own = {interface.address for interface in (found if found is not None else interfaces())}
    return Host(name, address, address in own or address.startswith("127."))
