"""``paceline run``: its options. What comes of them is in ``run_start.py``.

``--standalone`` and ``--rdzv-backend`` are torchrun's and need not be given: one machine always
stands alone, and several meet in the way that their number allows.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import say

_HERE = "Ranks on this machine"
_MACHINES = "Several machines"
_SCRIPT = "How the script runs"


def run(
    script: Annotated[str, typer.Argument(help="The script; what follows belongs to it.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own.")] = None,
    nproc: Annotated[
        str | None,
        typer.Option(
            help="How many; auto (the default): one for each GPU, or else for each core.",
            metavar="N|auto",
            rich_help_panel=_HERE,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="OMP_NUM_THREADS of each rank; by default the cores are shared out.",
            metavar="N",
            rich_help_panel=_HERE,
        ),
    ] = None,
    show: Annotated[
        str,
        typer.Option(
            help="Show the stdout of these ranks only, as in 0 or 0,3.",
            metavar="RANKS",
            rich_help_panel=_HERE,
        ),
    ] = "",
    max_restarts: Annotated[
        int,
        typer.Option(
            help="Start all ranks again after a failure, so often.",
            metavar="N",
            rich_help_panel=_HERE,
        ),
    ] = 0,
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module's name.", rich_help_panel=_SCRIPT)
    ] = False,
    drop_in: Annotated[
        bool,
        typer.Option(
            "--drop-in",
            help="torch's DDP, Join, hooks and optimizers mean paceline's (paceline.install()).",
            rich_help_panel=_SCRIPT,
        ),
    ] = False,
    backend: Annotated[
        str,
        typer.Option(
            help='What init_process_group("paceline") and new_group("auto") pick.',
            metavar="NAME",
            rich_help_panel=_SCRIPT,
        ),
    ] = "auto",
    record: Annotated[
        str,
        typer.Option(
            help="Keep the recorder's log of each rank there, for paceline report.",
            metavar="DIR",
            rich_help_panel=_SCRIPT,
        ),
    ] = "",
    nnodes: Annotated[
        str | None,
        typer.Option(
            help="How many machines; MIN:MAX where they may come and go.",
            metavar="N",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            help="This machine's number, from 0; by default as they come.",
            metavar="N",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Where they meet: an address of one of them.",
            metavar="HOST:PORT",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option(help="The same, as two options.", metavar="HOST", rich_help_panel=_MACHINES),
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            help="By default one that is free.", metavar="PORT", rich_help_panel=_MACHINES
        ),
    ] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(help="The run's name, for MIN:MAX.", metavar="ID", rich_help_panel=_MACHINES),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Start the ranks as actors of the Ray cluster there (local: a new one).",
            metavar="ADDRESS",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    rdzv_backend: Annotated[str, typer.Option("--rdzv-backend", hidden=True)] = "",
) -> int:
    """Start a script on several ranks, on one machine or many.

    The ranks find what torchrun would have set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), so
    scripts for torchrun run unchanged; torchrun's spellings of these options are understood. Under
    srun or mpirun with one task for each rank, the process becomes that rank.

    For example: paceline run --nproc 4 train.py --lr 0.1
    """
    from ..errors import LaunchError
    from .run_launch import Script
    from .run_plan import Asked
    from .run_start import start

    asked = Asked(nproc, nnodes, node_rank, master_addr, master_port, rdzv_endpoint, rdzv_id)
    chosen = Script(script, tuple(arguments or ()), module, backend, drop_in, record, threads)
    try:
        return start(asked, chosen, max_restarts, show, ray)
    except LaunchError as error:
        say.fail(str(error))
