"""From the command line and the environment to a plan: which ranks this process starts, or is.

Pure: nothing here starts, connects or looks at the host. It tells three ways apart:

- by hand, or once for each host: start ``nproc`` ranks here (:class:`Launch`);
- by srun or mpirun once for each rank: this process is that rank (:class:`Become`);
- by srun once for each host: start ``nproc`` ranks here, the hosts counted by SLURM.

Where the counts that were asked for and those that were started differ, that is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ...errors import LaunchCountError, LaunchError
from ..machine import Machine
from .schedulers import ScheduledTask, find_task

_FIRST_PORT, _PORTS = 10_000, 20_000  # below what kernels hand out to clients
_RANKS_ANYWHERE, _RANKS_PER_CORE = 256, 8  # more than either is a slip of the finger


def check_shown(shown: Collection[int], size: int) -> None:
    """Refuse ``--show`` with ranks that do not exist: nothing would be shown."""
    if beyond := sorted(rank for rank in shown if rank >= size):
        ranks = ", ".join(map(str, beyond))
        raise LaunchError(
            f"--show asks for rank {ranks}, and there {'is' if size == 1 else 'are'} {size}",
            f"Ranks are numbered from 0 to {size - 1}.",
        )


@dataclass(frozen=True)
class Asked:
    """The options of ``paceline run`` that decide who is started; None: not given."""

    nproc: str | None = None  # a number or "auto"
    nnodes: str | None = None  # a number or "min:max"
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    ranks_per_gpu: int = 1
    key: str | None = None  # a file, or "none"
    store: str = ""  # an etcd
    listen: str = ""  # this host's own address, with a port or without


@dataclass(frozen=True)
class Launch:
    """Start ``nproc`` ranks on this host, one of ``min_nodes`` to ``max_nodes`` hosts."""

    nproc: int
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None  # None: hosts are numbered as they come
    address: str = "127.0.0.1"
    port: int = 0  # any that is free
    run_id: str = ""
    why: str = ""  # how nproc came about, where it was not given
    seats: tuple[Mapping[str, str], ...] = ()  # variables of each local rank, if they differ
    key: str = ""  # the file that hosts know each other by; empty: they do not ask
    store: str = ""  # an etcd; then address and port are those of this host, if they are given

    @property
    def elastic(self) -> bool:
        """Whether the number of hosts may change."""
        return self.min_nodes != self.max_nodes


@dataclass(frozen=True)
class Become:
    """Be one rank of a world that somebody else has started."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    nodes: int
    address: str
    port: int
    seat: Mapping[str, str] = field(default_factory=dict)  # on a GPU that it shares

    def environment(self) -> dict[str, str]:
        """The variables that torchrun would have set."""
        found = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }
        return found | dict(self.seat)


def make_plan(asked: Asked, environ: Mapping[str, str], machine: Machine) -> Launch | Become:
    """Decide what to start, from the options, the environment and the host."""
    _check_ranks_per_gpu(asked, machine)
    _refuse_nested(environ)
    task = find_task(environ)
    if task is None:
        _refuse_half_a_job(asked, environ)
        return _by_hand(asked, machine)
    _check_nodes(asked, task)
    if task.one_per_node and (asked.nproc is not None or task.launcher == "srun"):
        return _one_machine_of(task, asked, machine)
    return _one_rank_of(task, asked)


def _check_ranks_per_gpu(asked: Asked, machine: Machine) -> None:
    if asked.ranks_per_gpu < 1:
        raise LaunchError(f"--ranks-per-gpu is {asked.ranks_per_gpu}", "Give 1 or more.")
    if asked.ranks_per_gpu > 1 and not machine.gpus:
        raise LaunchError(
            f"--ranks-per-gpu is {asked.ranks_per_gpu}, and torch sees no GPU",
            "Leave it out to run on the CPU; paceline doctor says what is missing for GPUs.",
        )


def _refuse_nested(environ: Mapping[str, str]) -> None:
    inside = "TORCHELASTIC_RUN_ID" in environ or {"RANK", "LOCAL_RANK"} <= environ.keys()
    if inside:
        rank, size = environ.get("RANK", "?"), environ.get("WORLD_SIZE", "?")
        raise LaunchCountError(
            f"this process is rank {rank} of {size} already, and would start ranks of its own",
            "Call the script directly there, or unset RANK, LOCAL_RANK, WORLD_SIZE and "
            "TORCHELASTIC_RUN_ID if they are left over.",
            started=int(size) if size.isdigit() else 0,
        )


def _refuse_half_a_job(asked: Asked, environ: Mapping[str, str]) -> None:
    """Notice a batch script of a job on many hosts that starts us on the first one only."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1"))
    if asked.nnodes is None and nodes.isdigit() and int(nodes) > 1:
        raise LaunchCountError(
            f"SLURM gave this job {nodes} hosts, but paceline was started on one of them",
            "Put srun before it (one task for each host or each rank), or give --nnodes 1.",
            int(nodes),
            1,
        )


# -- by hand ----------------------------------------------------------------------------------


def _by_hand(asked: Asked, machine: Machine) -> Launch:
    nproc, why = choose_nproc(asked.nproc, machine, asked.ranks_per_gpu)
    least, most = parse_nodes(asked.nnodes or "1")
    address, port = _meeting_point(asked)
    if most == 1:
        _check_node_rank(asked.node_rank or 0, 1)
        return Launch(nproc, 1, 1, 0, address or "127.0.0.1", port, asked.rdzv_id or "", why)
    if asked.store:
        own = _own_place(asked.listen)
        key = _key_of(asked, most)
        run_id = asked.rdzv_id or ""
        return Launch(nproc, least, most, None, *own, run_id, why, key=key, store=asked.store)
    if not address or not port:
        raise LaunchError(
            f"{most} hosts need a common endpoint",
            "Give every host the same --rdzv-endpoint HOST:PORT, where HOST is one of them; or "
            "--master-addr, --master-port and its own --node-rank.",
        )
    if asked.node_rank is not None:
        _check_node_rank(asked.node_rank, most)
    run_id = asked.rdzv_id or f"{address}:{port}"
    key = _key_of(asked, most)
    return Launch(nproc, least, most, asked.node_rank, address, port, run_id, why, key=key)


def _key_of(asked: Asked, machines: int) -> str:
    """The file that hosts know each other by; empty where they need not."""
    if asked.key is None:
        raise LaunchError(
            f"{machines} hosts need a key to recognize each other",
            "Make a key once with paceline run --new-key FILE, give every host a copy, and "
            "start each with --key FILE; or with --key none on a network that only they are on.",
        )
    return "" if asked.key == "none" else asked.key


def choose_nproc(asked: str | None, machine: Machine, per_gpu: int = 1) -> tuple[int, str]:
    """The number of ranks on this host, and why it is that one if nobody gave it."""
    each = f"{'one' if per_gpu == 1 else per_gpu} for each GPU"
    if asked is None or asked == "auto":
        if machine.gpus:
            return machine.gpus * per_gpu, each
        return machine.cores, "one for each core (torch sees no GPU)"
    if asked == "cpu":
        return machine.cores, "one for each core"
    if asked == "gpu":
        return _gpus_of(machine) * per_gpu, each
    if not asked.isdecimal() or int(asked) < 1:
        raise LaunchError(
            f"--nproc is {asked}; it must be a number of ranks, at least 1, or auto",
            "auto starts one per GPU, or without GPUs one per core.",
        )
    if int(asked) > max(_RANKS_ANYWHERE, _RANKS_PER_CORE * machine.cores):
        raise LaunchError(
            f"--nproc is {asked}, and this host has {machine.cores} cores",
            "So many torch processes would overload it; use several hosts.",
        )
    return int(asked), ""


def _gpus_of(machine: Machine) -> int:
    if not machine.gpus:
        raise LaunchError("--nproc is gpu, and torch sees no GPU", "Give a number, or auto.")
    return machine.gpus


def parse_nodes(text: str) -> tuple[int, int]:
    """``"4"`` or ``"2:4"`` as the least and the most hosts.

    >>> parse_nodes("2:4")
    (2, 4)
    """
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or "1").isdecimal():
        raise LaunchError(f"--nnodes is {text}", "Give a number of hosts, or MIN:MAX.")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise LaunchError(f"--nnodes is {text}", "Give at least 1, and MIN no more than MAX.")
    return found


def _meeting_point(asked: Asked) -> tuple[str, int]:
    """Host and port from either pair of options; empty and 0 where they do not say."""
    if asked.rdzv_endpoint is None:
        return asked.master_addr or "", _check_port(asked.master_port or 0)
    host, colon, port = asked.rdzv_endpoint.rpartition(":")
    if not colon:
        host, port = asked.rdzv_endpoint, str(asked.master_port or 29400)  # torchrun's
    if not host or not port.isdecimal():
        raise LaunchError(f"--rdzv-endpoint is {asked.rdzv_endpoint}", "Give HOST:PORT.")
    return host.strip("[]"), _check_port(int(port))


def _own_place(listen: str) -> tuple[str, int]:
    """Where this host is to listen; empty: on the way to the store, and 0: at a free port.

    >>> _own_place("10.0.0.1:29400"), _own_place("[fe80::1]"), _own_place("")
    (('10.0.0.1', 29400), ('fe80::1', 0), ('', 0))
    """
    host, colon, port = listen.rpartition(":")
    if not colon or listen.endswith("]"):
        host, port = listen, "0"
    if not port.isdecimal() or (colon and not host):
        raise LaunchError(f"--listen is {listen}", "Give HOST or HOST:PORT.")
    return host.strip("[]"), _check_port(int(port))


def _check_port(port: int) -> int:
    if not 0 <= port < 2**16:
        raise LaunchError(f"{port} is no port", "Ports go from 1 to 65535.")
    return port


def _check_node_rank(rank: int, nodes: int) -> None:
    if not 0 <= rank < nodes:
        raise LaunchCountError(
            f"--node-rank is {rank}, and --nnodes is {nodes}",
            "Hosts are numbered from 0; give every host the same --nnodes.",
            nodes,
        )


# -- started by srun or mpirun ----------------------------------------------------------------


def _check_nodes(asked: Asked, task: ScheduledTask) -> None:
    if asked.nnodes is not None and parse_nodes(asked.nnodes) != (task.nodes, task.nodes):
        raise LaunchCountError(
            f"--nnodes is {asked.nnodes}, but {task.launcher} has started {task.nodes}",
            f"Leave --nnodes out: {task.launcher} says it.",
            parse_nodes(asked.nnodes)[1],
            task.nodes,
        )


def _one_machine_of(task: ScheduledTask, asked: Asked, machine: Machine) -> Launch:
    nproc, why = choose_nproc(asked.nproc, machine, asked.ranks_per_gpu)
    if task.nodes == 1:
        return Launch(nproc, 1, 1, 0, "127.0.0.1", asked.master_port or 0, "", why)
    nodes, rank, key = task.nodes, task.node_rank, _key_of(asked, task.nodes)
    if asked.store:
        own = _own_place(asked.listen)
        return Launch(nproc, nodes, nodes, rank, *own, task.job, why, key=key, store=asked.store)
    address, port = _address(task, asked), asked.master_port or port_of(task.job)
    return Launch(nproc, nodes, nodes, rank, address, port, task.job, why, key=key)


def _one_rank_of(task: ScheduledTask, asked: Asked) -> Become:
    if asked.nproc not in (None, "auto") and asked.nproc != str(task.local_size):
        raise LaunchCountError(
            f"--nproc is {asked.nproc}, but {task.launcher} has started {task.local_size} here "
            f"({task.size} in all), one for each rank",
            f"Leave --nproc out, or let {task.launcher} start one for each host.",
            int(asked.nproc) if asked.nproc and asked.nproc.isdigit() else 0,
            task.local_size,
        )
    address = "127.0.0.1" if task.local_size == task.size else _address(task, asked)
    return Become(
        task.rank,
        task.local_rank,
        task.size,
        task.local_size,
        task.node_rank,
        task.nodes,
        asked.master_addr or address,
        asked.master_port or port_of(task.job),
    )


def _address(task: ScheduledTask, asked: Asked) -> str:
    if asked.master_addr or task.first_host:
        return asked.master_addr or task.first_host
    raise LaunchError(
        f"{task.launcher} has started ranks on several hosts and does not say where rank 0 is",
        "Give --master-addr with the address of the first host.",
    )


def port_of(job: str) -> int:
    """A port that all ranks of ``job`` compute alike, and other jobs most likely do not."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
