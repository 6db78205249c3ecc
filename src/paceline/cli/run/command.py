"""``paceline run``: its options. What comes of them is in ``start.py``.

``--standalone`` and ``--rdzv-backend`` are torchrun's and need not be given: one machine always
stands alone, and several meet in the way that their number allows.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .. import say


def _option(panel: str, value: str, text: str) -> Any:
    """An option that takes a value; ``--help`` lists it in its panel."""
    return typer.Option(help=text, metavar=value, rich_help_panel=panel)


def _flag(panel: str, name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


_HERE = "Ranks on this machine"
_NPROC = _option(
    _HERE, "N|auto", "How many; auto (the default): one for each GPU, or else for each core."
)
_RANKS_PER_GPU = _option(
    _HERE, "N", "So many ranks share each GPU; each sees its own GPU only, as number 0."
)
_THREADS = _option(_HERE, "N", "OMP_NUM_THREADS of each rank; by default the cores are shared out.")
_SHOW = _option(_HERE, "RANKS", "Show the stdout of these ranks only, as in 0 or 0,3.")
_MAX_RESTARTS = _option(
    _HERE,
    "N",
    "Start all ranks again after a failure, so often; of an elastic job, start so many members in "
    "place of those lost (by default as many as it takes).",
)
_GRACE = _option(
    _HERE,
    "SECONDS",
    "How long ranks may take to end, such as to save, once they are told to or their script has "
    "failed; who needs longer is killed.",
)

_PATIENCE = _option(
    _HERE,
    "SECONDS",
    "How long ranks have after another's failure to end, or to recover from it "
    "(Group.reconfigure); who does, goes on.",
)

_ELASTIC = "Ranks that may be lost"
_IS_ELASTIC = _flag(
    _ELASTIC,
    "--elastic",
    "The others go on without a rank that is lost, and another is started (paceline.elastic).",
)
_SPARES = _option(
    _ELASTIC,
    "N",
    "Start so many more, which wait to take the place of one lost; implies --elastic.",
)
_MIN_RANKS = _option(_ELASTIC, "N", "Fewer than these wait for others instead of going on.")
_STOPPED_AFTER = _option(_ELASTIC, "SECONDS", "Who is stopped (SIGSTOP) for so long is lost.")
_COLD = _flag(
    _ELASTIC,
    "--cold",
    "Start a process that takes the place of another anew; by default it is forked from one that "
    "has torch imported, which is quicker.",
)
_HEARTBEAT = _option(_ELASTIC, "SECONDS", "Who is not heard of for so long is lost.")

_SCRIPT = "How the script runs"
_MODULE = _flag(_SCRIPT, "-m", "SCRIPT is a module's name.")
_DROP_IN = _flag(
    _SCRIPT,
    "--drop-in",
    "torch's DDP, Join, hooks and optimizers mean paceline's (paceline.install()), and gloo means "
    "the quickest engine here.",
)
_KEEP_BACKEND = _flag(_SCRIPT, "--keep-backend", 'init_process_group("gloo") stays torch\'s gloo.')
_BACKEND = _option(
    _SCRIPT,
    "NAME",
    'What init_process_group("gloo" or "paceline") and new_group("auto") open: gloo, hybrid, nccl '
    "or shm.",
)
_RECORD = _option(
    _SCRIPT, "DIR", "Keep the recorder's log of each rank there, for paceline report."
)

_METRICS = _option(
    _SCRIPT, "PORT", "Serve the numbers of all ranks of this machine to Prometheus; or HOST:PORT."
)

_MACHINES = "Several machines"
_NNODES = _option(_MACHINES, "N", "How many machines; MIN:MAX where they may come and go.")
_NODE_RANK = _option(_MACHINES, "N", "This machine's number, from 0; by default as they come.")
_RDZV_ENDPOINT = _option(_MACHINES, "HOST:PORT", "Where they meet: an address of one of them.")
_MASTER_ADDR = _option(_MACHINES, "HOST", "The same, as two options.")
_MASTER_PORT = _option(_MACHINES, "PORT", "By default one that is free.")
_RDZV_ID = _option(_MACHINES, "ID", "The run's name, for MIN:MAX.")
_KEY = _option(
    _MACHINES,
    "FILE",
    "What machines know each other by: a copy of the same file on each (--new-key makes it). none: "
    "whoever reaches the port can join, as with torchrun.",
)
_STORE = _option(
    _MACHINES,
    "URL",
    "An etcd, etcd://HOST:PORT[,HOST:PORT], where machines of an elastic job agree on who keeps "
    "its list of members, so that any of them may be lost; in place of --rdzv-endpoint. etcds:// "
    "for TLS, with ?ca=FILE&cert=FILE&key=FILE.",
)
_LISTEN = _option(
    _MACHINES,
    "HOST[:PORT]",
    "With --store: this machine's own address, which the others reach; by default the one that "
    "leads to the store, and a free port.",
)
_NEW_KEY = _option(_MACHINES, "FILE", "Make such a file, and do nothing else.")
_RAY = _option(
    _MACHINES, "ADDRESS", "Start the ranks as actors of the Ray cluster there (local: a new one)."
)


def run(
    script: Annotated[str, typer.Argument(help="The script; what follows belongs to it.")] = "",
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own.")] = None,
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
    """Start a script on several ranks, on one machine or many.

    The ranks find what torchrun would have set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), so
    scripts for torchrun run unchanged; torchrun's spellings of these options are understood. Under
    srun or mpirun with one task for each rank, the process becomes that rank.

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
    say.note(f"{path} is the key of a job: give every machine a copy, and nobody else")
    return 0
