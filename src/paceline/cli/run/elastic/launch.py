"""Carries out an elastic launch: keeper, members, and what is told at the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...._doors import SIDE, SIDE_DOOR
from ....errors import LaunchError
from ... import say
from ...machine import allow_open_files, loopback
from ..folders import LaunchFolder
from ..launch import Script, tell
from ..plan import Launch
from ..record import clear_record, tell_if_empty
from ..screen import OutputReader
from ..verdict import judge, signal_name
from .agent import AgentLimits, ElasticAgent
from .hosts import open_keeper
from .keeper import keeper_command
from .link import KeeperLink
from .places import HostSize, Places
from .starting import MemberStart
from .template import Template

_OPEN_FILES, _FILES_PER_MEMBER = 128, 8  # that an agent has: its own, and two pipes and a pidfd
_LONGEST_PATH = 100  # bytes of a socket's path; the kernel takes 107
_SHORTEST_LEASE, _LONGEST_LEASE = 2, 10  # seconds
_MEMBER_ENDS = 60.0  # seconds after which a member ends that reaches no keeper
NOBODY_JOINED = (
    "no process joined the job: a script for --elastic gets its group from "
    "paceline.elastic.group(), not from init_process_group, and trains inside paceline.elastic.job"
)
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Elastic:
    """The options of a launch whose members may change."""

    spares: int = 0
    min_ranks: int = 1
    max_restarts: int | None = None
    stopped_after: float = 0.5
    heartbeat: float = 60.0
    grace: float = 30.0
    patience: float = 2.0
    cold: bool = False  # no member is forked


def launch_elastic(
    plan: Launch, script: Script, elastic: Elastic, show: Collection[int] = ()
) -> int:
    """Start this host's members and wait for the job's end; returns what a shell is to see."""
    size = HostSize(plan.nproc, elastic.spares, elastic.max_restarts)
    allow_open_files(_OPEN_FILES + _FILES_PER_MEMBER * size.places)
    clear_record(script.record)
    with LaunchFolder("paceline-run-", _short_folder()) as folder:
        agent = _agent(plan, script, elastic, size, folder.path, show)
        try:
            agent.run()
        finally:
            agent.reader.close()  # what is said now comes after all that members have written
        code = _tell(agent)
    if not code:
        tell_if_empty(script.record)
    return code


def _agent(
    plan: Launch,
    script: Script,
    elastic: Elastic,
    size: HostSize,
    folder: Path,
    show: Collection[int],
) -> ElasticAgent:
    path, lease = str(folder / "members"), lease_seconds(elastic.heartbeat)
    within = elastic.heartbeat + (2 * lease if plan.store else 0)
    command = script.command()
    environment = _environment(plan, script, size, folder, path)
    copied = None if elastic.cold else Template(command[1:], environment, folder / "template.log")
    return ElasticAgent(
        os.uname().nodename,
        Places(size),
        MemberStart(command, environment, plan.seats, copied),
        AgentLimits(elastic.grace, elastic.patience, elastic.stopped_after, within),
        open_keeper(plan, path, _keeper(plan, elastic, path), folder, lease),
        KeeperLink(path),
        OutputReader(),
        folder,
        sorted(show),
    )


def _keeper(plan: Launch, elastic: Elastic, path: str) -> list[str]:
    """How a keeper is started; more ranks than all but one of the hosts have take all of them."""
    first = plan.nproc * plan.min_nodes
    least = max(elastic.min_ranks, plan.nproc * (plan.min_nodes - 1) + 1)
    if plan.max_nodes == 1:
        return keeper_command(path, first, least, elastic.heartbeat)
    here = str(Path(path).with_name("keeper")) if plan.store else path
    lease = lease_seconds(elastic.heartbeat)
    back, unseen = min(10.0, max(3.0, lease)), max(elastic.heartbeat, _MEMBER_ENDS) + 3 * lease
    more = ["--hosts", str(plan.max_nodes), "--unseen", f"{unseen:g}"]
    more += ["--return-within", f"{back:g}"]
    return [*keeper_command(here, first, least, elastic.heartbeat), *more]


def lease_seconds(heartbeat: float) -> int:
    """How long a keeper's lease is: several fit into what others wait for a keeper."""
    return min(_LONGEST_LEASE, max(_SHORTEST_LEASE, round(heartbeat / 4)))


def _environment(
    plan: Launch, script: Script, size: HostSize, folder: Path, path: str
) -> Mapping[str, str]:
    """What all members find in their environment."""
    found = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    if plan.max_nodes == 1 and (name := loopback()):
        found.setdefault("GLOO_SOCKET_IFNAME", name)  # gloo listens too
    return found | {
        **script.environment(size.ranks),
        "PYTHONUNBUFFERED": "1",
        "PACELINE_MEMBERS": path,
        "PACELINE_NOTES": str(folder),
        "PACELINE_AGENT": str(os.getpid()),
        "LOCAL_WORLD_SIZE": str(size.places),
        SIDE_DOOR: str(folder / SIDE),
    }


def _short_folder() -> str | None:
    """Where the folder with the socket goes; None: where all temporary ones do."""
    usual = tempfile.gettempdir()
    if len(usual) + len("/paceline-run-12345678/members") <= _LONGEST_PATH:
        return None
    if os.access("/tmp", os.W_OK):
        return "/tmp"
    raise LaunchError(f"{usual} is too long a name for a socket in it", "Set TMPDIR to another.")


def _tell(agent: ElasticAgent) -> int:
    """Say how the job ended; returns the exit code."""
    for line in agent.story.told():
        say.note(line)
    if agent.signals:
        number = agent.signals[0]
        say.complain(f"stopped by {signal_name(number)}; all members have ended")
        return 128 + number
    if not agent.story.members:
        say.note(NOBODY_JOINED)
    numbers = agent.verdict_numbers()
    endings = {n: end for n, end in agent.places.endings.items() if n in numbers}
    reports = {n: report for n, report in agent.reports.items() if n in numbers}
    verdict = judge(endings, reports, 0, "member")
    if agent.over is None or not agent.over.failed:
        return tell(verdict, 2)
    if verdict is None:
        say.complain(f"the job has ended: {agent.over.why}")
        return 1
    return tell(replace(verdict, headline=f"{verdict.headline}; {agent.over.why}"), 2)
