"""What this machine offers to ranks: cores by affinity and quota, GPUs, loopback."""

from __future__ import annotations

import math
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ..errors import LaunchError

_CGROUP = Path("/sys/fs/cgroup")


class Machine(Protocol):
    """What ranks can be spread over."""

    @property
    def cores(self) -> int:
        """Cores that this process may use."""

    @property
    def gpus(self) -> int:
        """GPUs that torch sees."""


class ThisMachine:
    """Counts when asked: torch, which knows the GPUs, takes a while to import."""

    @property
    def cores(self) -> int:
        """Cores by affinity and quota."""
        return cores()

    @property
    def gpus(self) -> int:
        """GPUs that torch sees."""
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cores() -> int:
    """Cores this process may use: those it may run on, less if a container's quota says so."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota())))


def cpu_quota(root: Path = _CGROUP, own: Path = Path("/proc/self/cgroup")) -> float:
    """The smallest quota of this process's control group and of those above it, in cores."""
    groups = [Path()]
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "cpu,cpuacct", "cpu"):
            mine = Path(path.lstrip("/"))
            groups += [mine, *mine.parents]
    places = [root / base / group for group in groups for base in ("", "cpu", "cpu,cpuacct")]
    return min(map(_quota_in, places), default=math.inf)


def _quota_in(group: Path) -> float:
    limit, _, period = _read(group / "cpu.max").partition(" ")  # version 2
    if not period:
        limit = _read(group / "cpu.cfs_quota_us")
        period = _read(group / "cpu.cfs_period_us")
    try:
        cores = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return math.inf
    return cores if cores > 0 else math.inf  # -1 means no limit


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def threads_per_rank(
    asked: int | None, nproc: int, cores: int, environ: Mapping[str, str]
) -> int | None:
    """Threads for each rank's arithmetic; None when the user's environment has settled it."""
    if asked is not None:
        return asked
    if "OMP_NUM_THREADS" in environ:
        return None
    return max(1, cores // nproc)


def allow_open_files(number: int) -> None:
    """Have the kernel let this process open so many files; refuse to start if it does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return
    if hard != resource.RLIM_INFINITY and hard < number:
        raise LaunchError(
            f"this launch needs {number} open files, and {hard} are allowed here",
            "Start fewer ranks, or have the limit raised (ulimit -Hn).",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def loopback() -> str | None:
    """The name of the loopback interface, where this machine has one."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else None
