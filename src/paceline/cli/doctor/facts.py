"""All that the doctor looks at, in one record: what is installed, and what the machine is."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import paceline

from ...groups import Availability, capabilities
from ..sharing import SharingFacts, look
from . import machine

# Variables that change what a run does, and those by which a launcher is known.
SETTINGS = (
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "TORCH_DISTRIBUTED_DEBUG",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "LD_PRELOAD",
)
OWN = (
    "PACELINE_BACKEND",
    "PACELINE_DROP_IN",
    "PACELINE_METRICS",
    "PACELINE_RECORD",
    "PACELINE_RECORDER",
    "PACELINE_RECORDER_HOST",
    "PACELINE_NATIVE",
    "PACELINE_SKIP_ALONE",
    "PACELINE_WARN_AFTER",
)
BETWEEN_US = (
    "PACELINE_AGENT",
    "PACELINE_LAUNCHER",
    "PACELINE_MASTER",
    "PACELINE_MEMBER",
    "PACELINE_MEMBERS",
    "PACELINE_NOTES",
    "PACELINE_SIDE_DOOR",
    "PACELINE_STORE",
)  # that our own processes tell each other
LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "SLURM": ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NODELIST"),
    "OpenMPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPI": ("PMI_RANK", "PMI_SIZE"),
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
}


@dataclass(frozen=True)
class MachineFacts:
    """What is here."""

    paceline: str
    torch: str
    python: str
    system: str
    cpu: str
    cores: machine.Cores
    load: float  # how many processes wanted a core over the last minute
    memory: machine.Memory
    compiler: str  # its path; empty: none
    engines: Mapping[str, Availability]
    host: machine.Host
    interfaces: list[machine.Interface]
    gpus: list[str]
    gpu_device: bool  # whether the kernel has an NVIDIA GPU, be it that torch sees it or not
    nccl: str  # its version; empty: this build of torch has none
    launchers: Mapping[str, Mapping[str, str]]  # by name, with their variables
    settings: Mapping[str, str]
    sharing: SharingFacts = field(
        default_factory=SharingFacts
    )  # whether several ranks may use one GPU


def gather() -> MachineFacts:
    """Look at everything."""
    found = machine.interfaces()
    return MachineFacts(
        paceline=paceline.__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cpu=machine.cpu_name(),
        cores=machine.read_cores(),
        load=os.getloadavg()[0],
        memory=machine.read_memory(),
        compiler=machine.find_compiler(),
        engines=capabilities(),
        host=machine.read_host(found),
        interfaces=found,
        gpus=gpu_names(),
        gpu_device=Path("/dev/nvidia0").exists(),
        nccl=nccl_version(),
        launchers=launchers_in(os.environ),
        settings=settings_in(os.environ),
        sharing=look(os.environ),
    )


def launchers_in(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Those that started this process, as far as the environment tells."""
    set_by = {
        name: {key: environ[key] for key in keys if key in environ}
        for name, keys in LAUNCHERS.items()
    }
    return {name: values for name, values in set_by.items() if values}


def settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings that matter and are made, ours included."""
    own = sorted(name for name in environ if name.startswith("PACELINE_"))
    return {name: environ[name] for name in (*SETTINGS, *own) if name in environ}


def gpu_names() -> list[str]:
    """Every GPU that torch can use, with its memory."""
    if not torch.cuda.is_available():
        return []
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in every]


def nccl_version() -> str:
    """As torch was built with it."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))
