"""A small training whose every sample is counted, on ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import elastic
from paceline._members import Members, RosterChange, Rules, SharedCouncil
from paceline._members.in_process import ThreadMember
from paceline.data import Shard, ShardedLoader, keyed_random

SHARDS, BATCH, SAMPLES = 6, 24, 120  # 5 steps in an epoch


class Killed(BaseException):
    """The rank's thread ends as if its process had been killed."""


@dataclass
class Outcome:
    """What a rank has at the end."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    rosters: int = 0
    committed: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)  # samples in this rank's part of commits
    left: str = ""
    error: BaseException | None = None


def model_of(seed: int) -> nn.Module:
    """With dropout and running statistics: what must not depend on who computes what."""
    with keyed_random(Shard(seed, 0, 0, 1)):  # which take turns: other ranks are threads too
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )


def dataset() -> TensorDataset:
    """Samples that know their own number."""
    numbers = torch.arange(SAMPLES)
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(SAMPLES, 4, generator=generator), numbers)


Moment = Callable[[elastic.JobStep, int, str], None]  # step, shards so far, where in the body


def train(
    members: Members | None,
    moment: Moment = lambda step, shards, where: None,
    *,
    backend: str = "threads",
    seed: int = 1,
    epochs: int = 2,
    lr: float = 0.05,
    outcome: Outcome | None = None,
    prepare: Callable[..., None] = lambda **things: None,
    samples: Any = None,
    workers: int = 0,
    model: Callable[[int], nn.Module] = model_of,
    seconds: float = 60.0,
    checks: Any = "warn",
    after: Callable[[], object] = lambda: None,
    **options: Any,
) -> Outcome:
    """Train to the end; ``moment`` is called at every place where a rank may be lost.

    A collective may take ``seconds``; ``after`` is called when the rank has left the job.
    """
    outcome = Outcome() if outcome is None else outcome
    group = elastic.group(backend, timeout=timedelta(seconds=seconds), checks=checks)
    module = model(seed)
    ddp = paceline.DistributedDataParallel(module, process_group=group, shards=SHARDS)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6], 0.5)
    data = dataset() if samples is None else samples
    loader = ShardedLoader(data, shards=SHARDS, batch=BATCH, group=group, num_workers=workers)
    try:
        with elastic.job(ddp, optimizer, loader, epochs=epochs, members=members, **options) as job:
            job.register("scheduler", scheduler, in_shards=False)
            prepare(job=job, ddp=ddp, optimizer=optimizer, group=group)
            for step in job:
                seen: list[int] = []
                shards: dict[int, list[int]] = {}
                moment(step, 0, "begin")
                for shard, (x, number) in step:
                    seen += number.tolist()
                    shards[shard.index] = number.tolist()
                    with ddp.shard(shard):
                        (ddp(x).flatten() - x.sum(1)).square().mean().backward()
                    moment(step, len(seen), "shard")
                moment(step, len(seen), "averages")
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if step.committed:
                    outcome.committed.append(step.number)
                    outcome.counted += [n for one in step.shards for n in shards[one.index]]
                moment(step, len(seen), "end")
            outcome.steps, outcome.left = job.steps, job.left
    finally:
        after()
    outcome.weights = {n: t.detach().clone() for n, t in module.state_dict().items()}
    outcome.moments = optimizer.state_dict()
    loader.close()
    group.shutdown()
    return outcome


def require_equal(one: Outcome, other: Outcome) -> None:
    """The same bits in weights, buffers and the optimizer."""
    assert one.steps == other.steps
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, other.weights[name]), name
    assert one.moments["param_groups"] == other.moments["param_groups"]
    for number, state in one.moments["state"].items():
        for key, value in state.items():
            assert torch.equal(value, other.moments["state"][number][key]), (number, key)


class Ranks:
    """Ranks as threads, some of which are lost on cue, and others join."""

    def __init__(self, first: int, **rules: Any) -> None:
        self.council = SharedCouncil(Rules(first=first, patience=30.0, **rules))
        self.outcomes: dict[int, Outcome] = {}
        self._threads: list[threading.Thread] = []
        self._told: dict[int, threading.Event] = {}  # members that have heard of a newcomer

    def start(self, moment: Callable[[int], Moment] | None = None, **options: Any) -> int:
        """Start one rank; ``moment(member)`` gives what it does at every place of its loop."""
        member = self.council.join()
        self._told[member.me] = _notes_newcomers(member)
        outcome = self.outcomes[member.me] = Outcome()

        def run() -> None:
            try:
                chosen = {} if moment is None else {"moment": moment(member.me)}
                train(member, outcome=outcome, **chosen, **options)
            except Killed:
                pass
            except BaseException as error:
                outcome.error = error

        thread = threading.Thread(target=run, name=f"member {member.me}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return member.me

    def let_in(self, by: int, **options: Any) -> int:
        """Start one more rank; returns when member ``by`` knows that it waits to be let in.

        The calling thread is that of this member, which calls for a meeting after its step then.
        """
        self._told[by].clear()
        newcomer = self.start(**options)
        assert self._told[by].wait(60)
        return newcomer

    def kill(self, member: int) -> None:
        """End a member's thread, from inside: nobody hears what it says from now on."""
        self.council.kill(member)
        raise Killed

    def wait_for(self, *members: int, seconds: float = 90.0) -> None:
        """Return when these have ended; they are named by the order of their start."""
        for member in members:
            self._threads[member].join(seconds)
            assert not self._threads[member].is_alive(), f"member {member} hangs"

    def wait(self, seconds: float = 90.0) -> dict[int, Outcome]:
        """Return what each had at its end, those too that others start while it waits."""
        for thread in self._threads:  # which grows; who starts one is joined before it
            thread.join(seconds)
            assert not thread.is_alive(), f"{thread.name} hangs"
        self.council.close()
        return self.outcomes


def _notes_newcomers(member: ThreadMember) -> threading.Event:
    """An event that is set when ``member`` has heard that somebody waits to be let in."""
    told, listen = threading.Event(), member.listen

    def listen_too(hear: Callable[[RosterChange], None]) -> None:
        def heard(change: RosterChange) -> None:
            hear(change)
            if change.kind == "waiting":
                told.set()

        listen(heard)

    member.listen = listen_too  # type: ignore[method-assign]
    return told
