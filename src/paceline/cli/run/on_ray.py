"""``paceline run --ray ADDRESS``: the same script, its ranks started by actors of a Ray cluster.

Ray places the actors and counts GPUs; each starts one rank as a process of its own and hands on
what it writes. The script has to lie at the same path on every host, as on a shared file system.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import LaunchCountError, LaunchError
from .. import say
from .launch import Conduct, Script, tell
from .lines import RankLines
from .plan import Asked, check_shown, parse_nodes
from .ray_actor import RankNews, RankProcess, Seat
from .screen import Bar, Screen
from .signals import signals_noted
from .survivors import Losses, Outlook, Survivor, tell_lost, tell_missing
from .verdict import FailureReport, RankEnding, describe, judge, signal_name

_PLACED_WITHIN = 60.0
_TURN = 0.2  # seconds after which signals are looked at


def launch_on_ray(
    address: str, asked: Asked, script: Script, conduct: Conduct, show: Collection[int]
) -> int:
    """Start the ranks on the cluster at ``address`` and wait for their end."""
    ray = _connect(address)
    try:
        size, resource = _choose_size(asked, ray.cluster_resources())
        check_shown(show, size)
        actors = _place(ray, size, resource)
        _start(ray, actors, script)
        with signals_noted() as signals:  # Ray has set its own, which end this process at once
            return _RayRun(ray, actors, show, conduct, signals).until_the_end()
    finally:
        ray.shutdown()


def _connect(address: str) -> Any:
    try:
        ray: Any = importlib.import_module("ray")  # an extra, so nothing here imports it at the top
    except ImportError:
        ray = None
    if not hasattr(ray, "init"):  # or a folder of that name, as Ray itself leaves in /tmp
        raise LaunchError(
            "Ray is not installed here", "Install it with: pip install 'paceline[ray]'."
        )
    try:
        ray.init(
            None if address == "local" else address,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"there is no Ray cluster at {address} ({str(error).splitlines()[0]})",
            "Start one with ray start --head, or give --ray local for a cluster on this host.",
        ) from None
    return ray


def _choose_size(asked: Asked, resources: Mapping[str, float]) -> tuple[int, str]:
    """How many ranks, and whether each takes a GPU or a CPU."""
    resource = "GPU" if resources.get("GPU") else "CPU"
    there = int(resources.get(resource, 0))
    if asked.nproc in (None, "auto"):
        say.note(f"{there} ranks, one for each {resource} of the cluster")
        return there, resource
    if not asked.nproc or not asked.nproc.isdecimal() or int(asked.nproc) < 1:
        raise LaunchError(f"--nproc is {asked.nproc}", "Give a number from 1 on, or auto.")
    size = int(asked.nproc) * parse_nodes(asked.nnodes or "1")[0]
    if size > there:
        raise LaunchCountError(
            f"{size} ranks were asked for, and Ray's cluster has {there} {resource}s",
            "Ask for fewer with --nproc, or add hosts to the cluster.",
            size,
            there,
        )
    return size, resource


def _place(ray: Any, size: int, resource: str) -> list[Any]:
    """One actor for each rank, host by host."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if resource == "GPU" else {})
    group = ray.util.placement_group([dict(bundle) for _ in range(size)], strategy="PACK")
    if not group.wait(_PLACED_WITHIN):
        raise LaunchCountError(
            f"Ray has no room for {size} ranks within {_PLACED_WITHIN:g} s",
            "Other jobs may hold the cluster; see ray status.",
            size,
        )
    actor = ray.remote(RankProcess).options(
        num_cpus=1,
        num_gpus=int(resource == "GPU"),
        scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group),
    )
    actors = [actor.remote() for _ in range(size)]
    seats = ray.get([each.seat.remote() for each in actors])
    return [each for _, each in sorted(zip(seats, actors, strict=True), key=lambda pair: pair[0])]


def _start(ray: Any, actors: Sequence[Any], script: Script) -> None:
    seats: list[Seat] = ray.get([actor.seat.remote() for actor in actors])
    port = ray.get(actors[0].free_port.remote())
    settings = environments(seats, port)
    ray.get(
        [
            actor.start.remote(script.command(), own | script.environment(_here(own)), os.getcwd())
            for actor, own in zip(actors, settings, strict=True)
        ]
    )


def _here(environment: Mapping[str, str]) -> int:
    return int(environment["LOCAL_WORLD_SIZE"])


def environments(seats: Sequence[Seat], port: int) -> list[dict[str, str]]:
    """What torchrun would set for ranks on these seats, which are ordered by host."""
    nodes: dict[str, list[Seat]] = defaultdict(list)
    for seat in seats:
        nodes[seat.node].append(seat)
    address = "127.0.0.1" if len(nodes) == 1 else seats[0].address
    found: list[dict[str, str]] = []
    for number, mates in enumerate(nodes.values()):
        devices = ",".join(seat.gpus for seat in mates if seat.gpus)
        for local in range(len(mates)):
            own = {
                "RANK": str(len(found)),
                "WORLD_SIZE": str(len(seats)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(len(mates)),
                "GROUP_RANK": str(number),
                "GROUP_WORLD_SIZE": str(len(nodes)),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
            # Every rank sees its host's GPUs, as under torchrun, and takes that of LOCAL_RANK.
            found.append(own | ({"CUDA_VISIBLE_DEVICES": devices} if devices else {}))
    return found


@dataclass
class _RayRun:
    """The running ranks, as the launcher sees them."""

    ray: Any
    actors: Sequence[Any]
    show: Collection[int]
    conduct: Conduct
    signals: list[int] = field(default_factory=list)  # that this process was sent, to be taken up
    stopped_by: int = 0  # the first of them
    ending: bool = False  # the ranks have been told to end
    endings: dict[int, RankEnding] = field(default_factory=dict)
    reports: dict[int, FailureReport] = field(default_factory=dict)

    survivors: dict[int, Survivor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.losses = Losses(self.conduct.patience)
        bar = Bar()
        self.screens = {1: Screen(sys.stdout, bar), 2: Screen(sys.stderr, bar)}
        self.lines: dict[tuple[int, int], RankLines] = defaultdict(RankLines)

    def until_the_end(self) -> int:
        """Show what the ranks write until all have ended, and tell how that was."""
        waiting = {actor.news.remote(): rank for rank, actor in enumerate(self.actors)}
        while waiting:
            ready, _ = self.ray.wait(list(waiting), timeout=_TURN)
            for reference in ready:
                rank = waiting.pop(reference)
                if self._take(rank, reference):
                    waiting[self.actors[rank].news.remote()] = rank
            while self.signals:
                self._obey(self.signals.pop(0))
            if self._look() is Outlook.HOPELESS and not self.ending:
                self._stop(signal.SIGTERM, self.conduct.grace)
        if self.stopped_by:
            say.complain(f"stopped by {signal_name(self.stopped_by)}; all ranks have ended")
            return 128 + self.stopped_by
        size, lost = len(self.actors), self.losses.lost
        needed = {rank: end for rank, end in self.endings.items() if rank not in lost}
        verdict = judge(needed, self.reports, size)
        if lost:
            say.note(tell_missing(lost, size, verdict is None))
        return tell(verdict, size)

    def _look(self) -> Outlook:
        """See what becomes of the ranks that have failed."""
        size, known = len(self.actors), set(self.losses.lost)
        failed = [rank for rank, end in self.endings.items() if end.code and not end.stopped]
        running = [rank for rank in range(size) if rank not in self.endings]
        outlook = self.losses.look(failed, running, self.survivors, time.monotonic())
        for rank in sorted(self.losses.lost.keys() - known):
            why = describe(self.endings[rank], self.reports.get(rank))
            say.complain(tell_lost(rank, size, why, self.losses.lost[rank]))
        if self.losses.left_behind(running, self.survivors) and not self.ending:
            self._stop(signal.SIGTERM, self.conduct.grace)
        return outlook

    def _obey(self, number: int) -> None:
        """Hand a signal on to the ranks; another one while they end makes them end at once."""
        if self.stopped_by:
            say.note("ending all ranks at once")
            return self._stop(signal.SIGKILL, 0.0)
        self.stopped_by = number
        if number == signal.SIGINT:
            seconds = f"{self.conduct.grace:g} s"
            say.note(f"the ranks have {seconds} to end; Ctrl-C again ends them at once")
        return self._stop(number, self.conduct.grace)

    def _take(self, rank: int, reference: Any) -> bool:
        """Take in a rank's news; False when they were the last."""
        try:
            news: RankNews = self.ray.get(reference)
        except self.ray.exceptions.RayError:  # its host or its actor is gone
            news = RankNews(code=-signal.SIGKILL)
        now = time.monotonic()
        for number, data in ((1, news.out), (2, news.err)):
            lines = self.lines[rank, number]
            pieces = [*lines.feed(data, now), *(lines.rest() if news.code is not None else ())]
            for piece in pieces:
                if number == 2 or not self.show or rank in self.show:
                    self.screens[number].show(rank, piece)
            self.screens[number].stream.flush()
        if news.code is not None:
            self.endings[rank] = RankEnding(news.code, now, news.stopped)
        if news.report is not None:
            self.reports[rank] = FailureReport(**news.report | {"when": now + news.report["when"]})
        if news.survivor is not None:
            self.survivors[rank] = msgspec.convert(news.survivor, Survivor)
        else:
            self.survivors.pop(rank, None)
        return news.code is None

    def _stop(self, number: int, grace: float) -> None:
        """Have all ranks that are left end; their actors do so between two pieces of news."""
        self.ending = True
        for rank, actor in enumerate(self.actors):
            if rank not in self.endings:
                actor.stop.remote(int(number), grace)
