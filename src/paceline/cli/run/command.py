"""The options of ``paceline run``; ``start.py`` carries them out.

``--standalone`` and ``--rdzv-backend`` are accepted for torchrun's sake and have no effect: one
host is always standalone, and how several hosts meet follows from the other options.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .. import say


def _option(panel: str, value: str, text: str) -> Any:
    """Return an option that takes a value; ``--help`` lists it in its panel."""
    return typer.Option(help=text, metavar=value, rich_help_panel=panel)


def _flag(panel: str, name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


_HERE = "Ranks on this host"
_NPROC = _option(
    _HERE, "N|auto", "Number of ranks; auto (the default): one per GPU, or per core without GPUs."
)
_RANKS_PER_GPU = _option(
    _HERE, "N", "Number of ranks that share each GPU; each rank sees only its GPU, as number 0."
)
_THREADS = _option(
    _HERE, "N", "OMP_NUM_THREADS of each rank; by default the ranks divide the cores."
)
_SHOW = _option(_HERE, "RANKS", "Show the stdout of these ranks only, as in 0 or 0,3.")
_MAX_RESTARTS = _option(
    _HERE,
    "N",
    "Restart all ranks after a failure, at most N times; in an elastic job, start at most N "
    "replacements (by default as many as needed).",
)
_GRACE = _option(
    _HERE,
    "SECONDS",
    "How long ranks may take to end, for instance to save a checkpoint, after a signal or a "
    "failure; then they are killed.",
)

_PATIENCE = _option(
    _HERE,
    "SECONDS",
    "How long ranks have after the failure of another rank to end or to recover "
    "(Group.reconfigure).",
)

_ELASTIC = "Elastic jobs"
_IS_ELASTIC = _flag(
    _ELASTIC,
    "--elastic",
    "Continue when a rank is lost, and start a replacement (see paceline.elastic).",
)
_SPARES = _option(
    _ELASTIC,
    "N",
    "Start N more processes that wait to replace a lost one; implies --elastic.",
)
_MIN_RANKS = _option(_ELASTIC, "N", "With fewer ranks, wait for others instead of continuing.")
_STOPPED_AFTER = _option(
    _ELASTIC, "SECONDS", "A rank that is stopped (SIGSTOP) for this long is lost."
)
_COLD = _flag(
    _ELASTIC,
    "--cold",
    "Start spares and replacements as new processes; by default they are forked from a process "
    "that has already imported torch, which is faster.",
)
_HEARTBEAT = _option(_ELASTIC, "SECONDS", "A rank that sends nothing for this long is lost.")

_SCRIPT = "How the script runs"
_MODULE = _flag(_SCRIPT, "-m", "SCRIPT is the name of a module.")
_DROP_IN = _flag(
    _SCRIPT,
    "--drop-in",
    "Replace torch's DDP, Join, hooks and optimizers with paceline's (paceline.install()), and "
    "gloo with the fastest engine.",
)
_KEEP_BACKEND = _flag(_SCRIPT, "--keep-backend", 'init_process_group("gloo") stays torch\'s gloo.')
_BACKEND = _option(
    _SCRIPT,
    "NAME",
    'The engine that init_process_group("gloo" or "paceline") and new_group("auto") open: gloo, '
    "hybrid, nccl or shm.",
)
_RECORD = _option(_SCRIPT, "DIR", "Save the log of each rank there, for paceline report.")

_METRICS = _option(
    _SCRIPT, "PORT", "Serve metrics of all ranks of this host to Prometheus; or HOST:PORT."
)

_MACHINES = "Several hosts"
_NNODES = _option(_MACHINES, "N", "Number of hosts; MIN:MAX if hosts may come and go.")
_NODE_RANK = _option(
    _MACHINES, "N", "Number of this host, from 0; by default in the order in which they connect."
)
_RDZV_ENDPOINT = _option(_MACHINES, "HOST:PORT", "The address of one of the hosts.")
_MASTER_ADDR = _option(
    _MACHINES, "HOST", "The address alone, with --master-port instead of --rdzv-endpoint."
)
_MASTER_PORT = _option(_MACHINES, "PORT", "By default a free port.")
_RDZV_ID = _option(_MACHINES, "ID", "The name of the run, for MIN:MAX.")
_KEY = _option(
    _MACHINES,
    "FILE",
    "The key file of the job, a copy on each host (see --new-key). none: "
    "anyone who can reach the port can join, as with torchrun.",
)
_STORE = _option(
    _MACHINES,
    "URL",
    "An etcd, etcd://HOST:PORT[,HOST:PORT], in which the hosts of an elastic job elect the one "
    "that has the list of members, so that any host may be lost; instead of --rdzv-endpoint. "
    "etcds:// for TLS, with ?ca=FILE&cert=FILE&key=FILE.",
)
_LISTEN = _option(
    _MACHINES,
    "HOST[:PORT]",
    "With --store: the address of this host that the others can reach; by default the one from "
    "which it reaches the store, and a free port.",
)
_NEW_KEY = _option(_MACHINES, "FILE", "Create a key file and exit.")
_RAY = _option(
    _MACHINES, "ADDRESS", "Start the ranks as actors of this Ray cluster (local: a new one)."
)


def run(
    script: Annotated[str, typer.Argument(help="The script to run.")] = "",
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed to the script.")] = None,
    nproc: Annotated[str | None, _NPROC] = None,
    ranks_per_gpu: Annotated[int, _RANKS_PER_GPU] = 1,
    threads: Annotated[int | None, _THREADS] = None,
    show: Annotated[str, _SHOW] = "",
    max_restarts: Annotated[int | None, _MAX_RESTARTS] = None,
    grace: Annotated[float, _GRACE] = 30.0,
    patience: Annotated[float, _PATIENCE] = 2.0,
    elastic: Annotated[bool, _IS_ELASTIC] = False,
    spares: Annotated[int | None, _SPARES] = None,
    min_ranks: Annotated[int, _MIN_RANKS] = 1,
    stopped_after: Annotated[float, _STOPPED_AFTER] = 0.5,
    heartbeat: Annotated[float, _HEARTBEAT] = 60.0,
    cold: Annotated[bool, _COLD] = False,
    module: Annotated[bool, _MODULE] = False,
    drop_in: Annotated[bool, _DROP_IN] = False,
    keep_backend: Annotated[bool, _KEEP_BACKEND] = False,
    backend: Annotated[str, _BACKEND] = "auto",
    record: Annotated[str, _RECORD] = "",
    metrics: Annotated[str, _METRICS] = "",
    nnodes: Annotated[str | None, _NNODES] = None,
    node_rank: Annotated[int | None, _NODE_RANK] = None,
    rdzv_endpoint: Annotated[str | None, _RDZV_ENDPOINT] = None,
    master_addr: Annotated[str | None, _MASTER_ADDR] = None,
    master_port: Annotated[int | None, _MASTER_PORT] = None,
    rdzv_id: Annotated[str | None, _RDZV_ID] = None,
    key: Annotated[str | None, _KEY] = None,
    new_key: Annotated[str | None, _NEW_KEY] = None,
    store: Annotated[str, _STORE] = "",
    listen: Annotated[str, _LISTEN] = "",
    ray: Annotated[str | None, _RAY] = None,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    rdzv_backend: Annotated[str, typer.Option("--rdzv-backend", hidden=True)] = "",
) -> int:
    """Run a script on several ranks, on one or more hosts.

    It sets the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), so
    scripts for torchrun run unchanged, and accepts torchrun's names for these options. Under
    srun or mpirun with one task per rank, the process becomes that rank.

    For example: paceline run --nproc 4 train.py --lr 0.1
    """
    if new_key is not None:
        return _make_key(new_key)
    if not script:
        raise typer.BadParameter("Missing argument 'SCRIPT'.")
    from ...errors import LaunchError, StrangerError
    from .elastic import Elastic
    from .launch import Conduct, Script
    from .plan import Asked
    from .start import start

    asked = Asked(
        nproc,
        nnodes,
        node_rank,
        master_addr,
        master_port,
        rdzv_endpoint,
        rdzv_id,
        ranks_per_gpu,
        key,
        store,
        listen,
    )
    chosen = Script(
        script,
        tuple(arguments or ()),
        module,
        backend,
        drop_in,
        keep_backend,
        record,
        threads,
        metrics,
    )
    conduct = Conduct(max_restarts or 0, grace, patience)
    members = None
    if elastic or spares is not None:
        members = Elastic(
            spares or 0, min_ranks, max_restarts, stopped_after, heartbeat, grace, patience, cold
        )
    try:
        return start(asked, chosen, conduct, show, ray, members)
    except (LaunchError, StrangerError) as error:
        say.fail(str(error))


def _make_key(path: str) -> int:
    """Write a new key file."""
    from ..._doors import JobKey
    from ...errors import LaunchError

    try:
        JobKey.make().write(path)
    except LaunchError as error:
        say.fail(str(error))
    say.note(f"{path} is the key of a job: copy it to every host of the job, and nowhere else")
    return 0
