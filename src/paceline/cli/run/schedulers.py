"""What srun and mpirun say about a process they started, read from its environment."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...errors import LaunchCountError, LaunchError


@dataclass(frozen=True)
class ScheduledTask:
    """One of ``size`` processes that a scheduler has started, ``local_size`` of them here."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    first_host: str  # empty where the environment does not say
    job: str  # the same for all tasks of one launch, and for no other

    @property
    def one_per_node(self) -> bool:
        """Whether every host has one task."""
        return self.size == self.nodes and self.local_size == 1


def find_task(environ: Mapping[str, str]) -> ScheduledTask | None:
    """The task this process is, or None when no scheduler started it.

    mpirun goes first: inside a SLURM job it is itself started by srun.
    """
    for known, read in ((_OPENMPI, _openmpi), (_SLURM, _slurm), (_HYDRA, _hydra)):
        if known <= environ.keys():
            return _checked(read(environ))
    return None


_OPENMPI = frozenset({"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"})
_HYDRA = frozenset({"PMI_RANK", "PMI_SIZE"})  # MPICH, Intel MPI
_SLURM = frozenset({"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"})  # the second is srun's own


def _openmpi(environ: Mapping[str, str]) -> ScheduledTask:
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    local = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    rank = _number(environ, "OMPI_COMM_WORLD_RANK")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return ScheduledTask(
        "mpirun",
        rank,
        size,
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        local,
        # Not said: right where every host has as many ranks, numbered host by host.
        rank // local,
        -(-size // local),
        "",
        f"mpi {job}",
    )


def _hydra(environ: Mapping[str, str]) -> ScheduledTask:
    rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
    local = _number(environ, "MPI_LOCALNRANKS", size)
    place = _number(environ, "MPI_LOCALRANKID", rank)
    nodes = -(-size // local)
    return ScheduledTask("mpirun", rank, size, place, local, rank // local, nodes, "", "mpi hydra")


def _slurm(environ: Mapping[str, str]) -> ScheduledTask:
    hosts = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    names = expand_hosts(hosts)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", len(names) or 1)
    node_rank = _number(environ, "SLURM_NODEID", 0)
    tasks = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    size = _number(environ, "SLURM_STEP_NUM_TASKS")
    local = tasks[node_rank] if node_rank < len(tasks) else -(-size // nodes)
    job = f"slurm {environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return ScheduledTask(
        "srun",
        _number(environ, "SLURM_PROCID"),
        size,
        _number(environ, "SLURM_LOCALID", 0),
        local,
        node_rank,
        nodes,
        names[0] if names else "",
        job,
    )


def _checked(task: ScheduledTask) -> ScheduledTask:
    if not 0 <= task.rank < task.size or not 0 <= task.local_rank < task.local_size:
        raise LaunchCountError(
            f"{task.launcher} calls this process task {task.rank} of {task.size}, here "
            f"{task.local_rank} of {task.local_size}, which is not possible",
            "The environment may have variables of another launch.",
            task.size,
        )
    return task


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise LaunchError(f"{name} is {text!r}, not a number", "Unset it if it is left over.")
    return int(text)


def expand_hosts(nodelist: str) -> list[str]:
    """SLURM's list of hosts, one by one.

    >>> expand_hosts("login,node[08-10,7]-ib")
    ['login', 'node08-ib', 'node09-ib', 'node10-ib', 'node7-ib']
    """
    parts = re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", nodelist)
    return [host for part in parts for host in _expand(part)]


def _expand(part: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)  # text, ranges, text, ranges, ..., text
    choices = [_ranges(piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _ranges(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        numbers = range(int(low), int(high or low) + 1)
        found += [str(number).zfill(len(low)) for number in numbers]
    return found


def expand_counts(text: str) -> list[int]:
    """SLURM's tasks per host, one by one.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(count)] * int(times or 1)
    return found
