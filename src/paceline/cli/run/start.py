"""From the options of ``paceline run`` to ranks: checks first, then the plan, then the launch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ..._etcd import parse_store
from ...errors import LaunchError
from .. import say, sharing
from ..machine import Machine, ThisMachine
from .elastic import Elastic, launch_elastic
from .launch import Conduct, Script, become, launch
from .plan import Asked, Become, Launch, check_shown, make_plan
from .record import check_record

ENGINES = ("auto", "gloo", "hybrid", "nccl", "shm")  # what PACELINE_BACKEND may say
_LONGEST = 86_400.0  # seconds; a day


def start(
    asked: Asked,
    script: Script,
    conduct: Conduct,
    show: str,
    ray: str | None,
    elastic: Elastic | None = None,
) -> int:
    """Start what was asked for and return its exit code; nothing is started that cannot work."""
    check_target(script)
    check_numbers(script, conduct)
    check_backend(script.backend)
    check_record(script.record)
    shown = parse_ranks(show)
    if elastic is not None:
        check_elastic(elastic, ray)
    check_store(asked, elastic)
    if ray is not None:
        _refuse_sharing_on_ray(asked)
        from .on_ray import launch_on_ray

        return launch_on_ray(ray, asked, script, conduct, shown)
    machine = ThisMachine()
    plan = make_plan(asked, os.environ, machine)
    if asked.ranks_per_gpu > 1:
        plan = share_gpus(plan, asked.ranks_per_gpu, script.backend, machine)
    if isinstance(plan, Become):
        if elastic is not None:
            _refuse_elastic("srun or mpirun with one task for each rank", "one for each host")
        become(plan, script)
    if elastic is not None:
        if asked.store and plan.max_nodes == 1:
            raise LaunchError("--store is for several hosts, and --nnodes is 1", "Leave it out.")
        return _start_elastic(plan, script, elastic, shown)
    if plan.max_nodes == 1:  # else ranks are counted when the hosts have met
        check_shown(shown, plan.nproc)
    if plan.why and plan.node_rank in (None, 0):
        say.note(f"{plan.nproc} {'rank' if plan.nproc == 1 else 'ranks'}, {plan.why}")
    return launch(plan, script, conduct, shown)


def _start_elastic(plan: Launch, script: Script, elastic: Elastic, shown: Collection[int]) -> int:
    if plan.max_nodes > 1 and not plan.key:
        raise LaunchError(
            f"--nnodes is {plan.max_nodes}, and hosts of an elastic job show each other "
            "certificates",
            "Give --key FILE, a copy of the same file on every host.",
        )
    if elastic.min_ranks > plan.nproc * plan.max_nodes:
        raise LaunchError(
            f"--min-ranks is {elastic.min_ranks}, and {plan.nproc * plan.max_nodes} ranks are "
            "started",
            "Give fewer, or a larger --nproc.",
        )
    check_shown(shown, plan.nproc * plan.max_nodes)
    if plan.why:
        say.note(f"{plan.nproc} {'rank' if plan.nproc == 1 else 'ranks'}, {plan.why}")
    return launch_elastic(plan, script, elastic, shown)


def check_elastic(elastic: Elastic, ray: str | None) -> None:
    """Refuse invalid numbers, and launchers that cannot start single ranks."""
    if ray is not None:
        _refuse_elastic("--ray", "paceline run itself")
    for name, count, least in (
        ("spares", elastic.spares, 0),
        ("min-ranks", elastic.min_ranks, 1),
    ):
        if count < least:
            raise LaunchError(f"--{name} is {count}", f"Give {least} or more.")
    for name, seconds in (
        ("stopped-after", elastic.stopped_after),
        ("heartbeat", elastic.heartbeat),
    ):
        if not 0 < seconds <= _LONGEST:  # nan is neither
            raise LaunchError(f"--{name} is {seconds:g}", f"Give seconds, up to {_LONGEST:g}.")


def check_store(asked: Asked, elastic: Elastic | None) -> None:
    """Refuse an invalid ``--store``, and one that would not be used."""
    if asked.listen and not asked.store:
        raise LaunchError("--listen goes with --store", "Leave it out, or give --store too.")
    if not asked.store:
        return
    parse_store(asked.store)
    if elastic is None:
        raise LaunchError("--store is for elastic jobs", "Give --elastic, or no store.")


def _refuse_elastic(by: str, instead: str) -> NoReturn:
    raise LaunchError(
        f"--elastic and --spares start members one by one, which {by} does not",
        f"Have the ranks started by {instead}.",
    )


def share_gpus(
    plan: Launch | Become, per_gpu: int, backend: str, machine: Machine
) -> Launch | Become:
    """Give every rank its seat on a GPU; refuse where ranks cannot share one."""
    known = sharing.check(sharing.look(os.environ), per_gpu, backend)
    gpus = sharing.visible_gpus(os.environ, machine.gpus)
    ranks = plan.local_world_size if isinstance(plan, Become) else plan.nproc
    taken = sharing.seat(ranks, per_gpu, gpus)
    seats = tuple(sharing.rank_environment(gpu, per_gpu, os.environ) for gpu in taken)
    if isinstance(plan, Become):
        return replace(plan, seat=seats[plan.local_rank])
    if plan.node_rank in (None, 0):
        say.note(known)
    return replace(plan, seats=seats)


def _refuse_sharing_on_ray(asked: Asked) -> None:
    if asked.ranks_per_gpu != 1:
        raise LaunchError(
            f"--ranks-per-gpu is {asked.ranks_per_gpu}, and Ray gives out the GPUs of --ray",
            "Leave it out, or start the ranks without --ray.",
        )


def check_target(script: Script) -> None:
    """Refuse a script or module that is not there."""
    if script.module:
        return _check_module(script.target)
    path = Path(script.target)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise LaunchError(f"{path} is a folder without a __main__.py", "Give a script.")
    if not path.exists():
        hint = f"For a module, give -m {script.target}" if not path.suffix else "Look at its path"
        raise LaunchError(f"there is no script {path} in {Path.cwd()}", f"{hint}.")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"{path} may not be read", "Look at its permissions (ls -l).")
    return None


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.pop(0)
    if found is None:
        raise LaunchError(f"there is no module {top}", "Install it, or start where it lies.")


def check_numbers(script: Script, conduct: Conduct) -> None:
    """Refuse invalid counts."""
    if script.threads is not None and script.threads < 1:
        raise LaunchError(f"--threads is {script.threads}", "Each rank needs 1 at least.")
    if conduct.max_restarts < 0:
        raise LaunchError(f"--max-restarts is {conduct.max_restarts}", "Give 0 or more.")
    for name, seconds in (("grace", conduct.grace), ("patience", conduct.patience)):
        if not 0 <= seconds <= _LONGEST:  # nan is neither
            raise LaunchError(f"--{name} is {seconds:g}", f"Give seconds, from 0 to {_LONGEST:g}.")


def check_backend(name: str) -> None:
    """Refuse an engine that is unknown, or that cannot be used on this host."""
    if name == "auto":
        return
    if name not in ENGINES:
        raise LaunchError(f"there is no backend {name}", f"Known are {', '.join(ENGINES)}.")
    from ...groups import capabilities

    found = capabilities()[name]
    if not found.available:
        raise LaunchError(
            f"the {name} backend cannot be used here: {found.reason}",
            "Leave --backend out to take what works; paceline doctor says more.",
        )


def parse_ranks(text: str) -> Collection[int]:
    """``"0,3"`` as numbers; empty stands for all ranks."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise LaunchError(f"--show is {text}", "Give ranks, as in 0 or 0,3.")
    return frozenset(map(int, words))
