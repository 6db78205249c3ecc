"""What one rank of the demo does: a training loop like yours, and word of how it goes."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from ... import DistributedDataParallel, recorder
from ...groups import Group
from ...testing import Meeting
from .compare import Comparison, compare
from .pace import Pace, TrainingClock
from .talk import Checked, Stage, Teller, Tick
from .tasks import TASKS, DemoTask

TELL_EVERY = 0.25  # seconds
CHECKS, APART = 8, 20  # on held-out data, on the way; at least so many steps apart
ROUNDS = 10  # of the comparison, at most
CLIP = 1.0  # the longest gradient; the ranks have the same one, so each clips it alike
RECENT = 50  # steps that "of late" means


@dataclass(frozen=True)
class DemoPlan:
    """What all ranks are to do."""

    task: str
    backend: str
    threads: int  # of each rank
    pace: Pace
    compares: bool
    folder: str  # for the recorder's logs
    address: str  # whom to tell


@dataclass(frozen=True)
class TrainingOutcome:
    """What came of it, as rank 0 saw it."""

    backend: str
    parameters: int
    steps: int
    samples: int  # of all ranks
    seconds: float
    first: float  # the measure before the first step
    last: float  # and after the last
    waiting: float  # share of its time that a rank waited, of late, on average
    shown: str
    comparison: Comparison | None


def run_rank(meeting: Meeting, plan: DemoPlan) -> TrainingOutcome:
    """Train, compare, and say how it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the demo, which ends its ranks
    torch.set_num_threads(plan.threads)
    task = TASKS[plan.task]()
    with Teller(plan.address) as teller, meeting.new_group(plan.backend) as group:
        torch.manual_seed(0)
        model = task.model()
        trainer = Trainer(task, model, group, plan.pace, teller)
        first = trainer.check()
        trainer.train()
        seconds = trainer.clock.seconds()
        last = trainer.check()
        recorder.save(Path(plan.folder))
        shares = group.all_gather_object(recorder.summary(RECENT).wait_share)
        comparison = None
        if plan.compares:
            _announce(group, teller, "comparing with torch's DistributedDataParallel over gloo")
            rounds = max(2, min(ROUNDS, trainer.steps // 20))  # not longer than the training
            comparison = compare(meeting, task, model, group, rounds)
        group.barrier()  # nobody leaves while another still needs the group
    shown = task.show(model) if meeting.rank == 0 else ""
    return TrainingOutcome(
        group.backend,
        sum(p.numel() for p in model.parameters()),
        trainer.steps,
        trainer.samples * group.size(),
        seconds,
        first,
        last,
        sum(map(float, shares)) / group.size(),  # type: ignore[arg-type]
        shown,
        comparison,
    )


def _announce(group: Group, teller: Teller, text: str) -> None:
    if group.rank() == 0:
        teller.tell(Stage(text))


class Trainer:
    """One rank's training, step by step."""

    def __init__(
        self, task: DemoTask, model: nn.Module, group: Group, pace: Pace, teller: Teller
    ) -> None:
        self.task, self.model, self.group, self.teller = task, model, group, teller
        self.ddp = DistributedDataParallel(model, process_group=group)
        self.optimizer = task.optimizer(self.ddp)
        self.highest = [part["lr"] for part in self.optimizer.param_groups]
        self.pace, self.clock = pace, TrainingClock(group, pace)
        self.steps = self.samples = 0
        self._losses, self._loss = list[float](), 0.0
        self._told = 0.0
        self._checks, self._checked = 1, 0

    def train(self) -> None:
        """Go on until the pace says that it is over, after the same step on every rank."""
        self.clock = TrainingClock(self.group, self.pace)
        for batch in self.task.batches(self.group):
            progress = self.clock.progress(self.steps)
            if progress >= 1.0:
                self._tell(1.0)
                return
            self._check_sometimes(progress)
            share = self.pace.rate(self.steps, progress)
            set_rate(self.optimizer, [share * rate for rate in self.highest])
            self._step(batch)
            if time.perf_counter() - self._told > TELL_EVERY:
                self._tell(progress)

    def _step(self, batch: object) -> None:
        count = self.task.samples(batch)
        with self.ddp.samples(count):  # batches may differ in size; the mean is over all samples
            loss = self.task.loss(self.ddp, batch)
            loss.backward()
        nn.utils.clip_grad_norm_(self.ddp.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.samples += count
        self._losses.append(loss.item())

    def check(self) -> float:
        """The measure on held-out data; every rank calls it, and rank 0 tells it."""
        value = self.task.check(self.model, self.group)
        if self.group.rank() == 0:
            self.teller.tell(Checked(self.steps, value))
        return value

    def _check_sometimes(self, progress: float) -> None:
        """A few times in all; the ranks agree on when."""
        if progress * CHECKS >= self._checks and self.steps >= self._checked + APART:
            self._checks, self._checked = int(progress * CHECKS) + 1, self.steps
            self.check()

    def _tell(self, progress: float) -> None:
        recent = recorder.summary(RECENT)
        tick = Tick(
            rank=self.group.rank(),
            step=self.steps,
            progress=progress,
            loss=self._recent_loss(),
            samples=self.samples,
            seconds=self.clock.seconds(),
            own_seconds=recent.step_seconds * (1.0 - recent.wait_share),
            waiting=recent.wait_share,
        )
        self.teller.tell(tick)
        self._told = time.perf_counter()

    def _recent_loss(self) -> float:
        """The mean since it was last asked; if there was no step, what it was then."""
        if self._losses:
            self._loss = sum(self._losses) / len(self._losses)
            self._losses.clear()
        return self._loss


def set_rate(optimizer: Optimizer, rates: list[float]) -> None:
    """Give each part of the parameters its learning rate."""
    for part, rate in zip(optimizer.param_groups, rates, strict=True):
        part["lr"] = rate
