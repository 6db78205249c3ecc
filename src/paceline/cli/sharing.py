"""Several ranks on one GPU: what that takes, whether it is here, and what each rank is told.

NCCL refuses two ranks on one GPU up to 2.29. From 2.30 on it takes them where a variable says so.
NVIDIA's MPS lets their kernels run at once; without it the ranks take turns on the GPU, which gives
the same numbers and says nothing about speed.

Each rank sees its own GPU only, as number 0, and finds ``LOCAL_RANK=0``: a script that calls
``torch.cuda.set_device(LOCAL_RANK)`` is right whatever it shares the GPU with. torchrun does the
same under ``--virtual-local-rank``.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..errors import LaunchError

OLDEST_NCCL = (2, 30)  # that takes several ranks on one GPU
SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
START_MPS = "nvidia-cuda-mps-control -d"
_LIBRARY, _DAEMON = "libnccl.so.2", "nvidia-cuda-mps"  # which is how far the kernel keeps its name


class Mps(Enum):
    """NVIDIA's service that lets several processes use a GPU at once."""

    RUNS = "MPS runs"
    STOPPED = f"MPS does not run ({START_MPS} starts it)"
    MISSING = "MPS is not installed"


@dataclass(frozen=True)
class SharingFacts:
    """What ranks that share a GPU depend on."""

    nccl: str = ""  # the version that ranks load, not the one that torch was built with
    mps: Mps = Mps.MISSING

    @property
    def refusal(self) -> str:
        """Why NCCL does not take two ranks on one GPU; empty where it does."""
        if not self.nccl:
            return "there is no NCCL"
        if tuple(map(int, re.findall(r"\d+", self.nccl)[:2])) < OLDEST_NCCL:
            return f"NCCL {self.nccl} takes one rank on each GPU"
        return ""

    def __str__(self) -> str:
        if self.refusal:
            return f"only over gloo: {self.refusal}, {shown(OLDEST_NCCL)} takes several; {REMEDY}"
        return f"paceline run --ranks-per-gpu works: NCCL {self.nccl}, {self.mps.value}"


REMEDY = (
    "install a newer one (for CUDA 13: pip install 'nvidia-nccl-cu13>=2.30'), or set LD_PRELOAD to "
    "its libnccl.so.2"
)


def shown(version: Iterable[int]) -> str:
    """A version as people write it."""
    return ".".join(map(str, version))


# -- what is here -----------------------------------------------------------------------------


def look(environ: Mapping[str, str]) -> SharingFacts:
    """Find out which NCCL ranks will load, and whether MPS runs."""
    return SharingFacts(loaded_nccl(), find_mps(environ, Path("/proc")))


def loaded_nccl() -> str:
    """The version of the NCCL in this process, which is the one that ranks load; empty: none.

    One that is preloaded takes the place of torch's, and torch goes on to tell the version that it
    was built with. So the library itself is asked.
    """
    import torch  # loads it

    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
        return decode(number.value)
    except (OSError, AttributeError):  # it is a part of torch's own library, or not there
        nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        return shown(torch.cuda.nccl.version()) if nccl and torch.cuda.is_available() else ""


def decode(number: int) -> str:
    """NCCL's number for a version as people write it.

    >>> decode(23007)
    '2.30.7'
    """
    return shown((number // 10_000, number // 100 % 100, number % 100))


def find_mps(environ: Mapping[str, str], processes: Path) -> Mps:
    """Whether MPS runs: one of its processes is seen, or its pipe, from inside a container."""
    folder = environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if any(_name(entry).startswith(_DAEMON) for entry in processes.glob("[0-9]*")):
        return Mps.RUNS
    if "CUDA_MPS_PIPE_DIRECTORY" in environ and Path(folder, "control").exists():
        return Mps.RUNS
    return Mps.STOPPED if shutil.which("nvidia-cuda-mps-control") else Mps.MISSING


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text()
    except OSError:  # it has ended
        return ""


# -- who sits where -----------------------------------------------------------------------------


def visible_gpus(environ: Mapping[str, str], count: int) -> list[str]:
    """The names of ``count`` GPUs, as ``CUDA_VISIBLE_DEVICES`` takes them.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-1f"}, 2)
    ['3', 'GPU-1f']
    >>> visible_gpus({}, 2)
    ['0', '1']
    """
    named = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return named[:count] if any(named) else [str(number) for number in range(count)]


def seat(ranks: int, per_gpu: int, gpus: Sequence[str]) -> list[str]:
    """The GPU of each local rank; neighbours share one.

    >>> seat(3, 2, ["0", "1"])
    ['0', '0', '1']
    """
    if ranks > per_gpu * len(gpus):
        raise LaunchError(
            f"{ranks} ranks were asked for, and {per_gpu} on each of {len(gpus)} GPUs are "
            f"{per_gpu * len(gpus)}",
            "Give fewer with --nproc, or more with --ranks-per-gpu.",
        )
    return [gpus[rank // per_gpu] for rank in range(ranks)]


def rank_environment(gpu: str, per_gpu: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What a rank is told that shares ``gpu`` with others; what the user has set is kept."""
    return {
        "CUDA_VISIBLE_DEVICES": gpu,
        "LOCAL_RANK": "0",
        SWITCH: environ.get(SWITCH, "1"),
        PERCENTAGE: environ.get(PERCENTAGE, str(100 // per_gpu)),
    }


def check(facts: SharingFacts, per_gpu: int, backend: str) -> str:
    """Refuse what cannot work; otherwise what a user should know of it."""
    if facts.refusal and backend != "gloo":
        raise LaunchError(
            f"--ranks-per-gpu is {per_gpu}, and {facts.refusal}",
            f"{REMEDY[0].upper()}{REMEDY[1:]}; or go over gloo with --backend gloo.",
        )
    over = "gloo" if backend == "gloo" else f"NCCL {facts.nccl}"
    slow = "" if facts.mps is Mps.RUNS else ", so ranks take turns and timings mean little"
    return f"{per_gpu} ranks on each GPU over {over}; {facts.mps.value}{slow}"
