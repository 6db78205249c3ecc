"""Equal steps under torch's DistributedDataParallel over gloo and under paceline's, in turns.

Each has a copy of the model and takes the same batches from there. They alternate in blocks of a
few steps, and the one that begins changes every round, so that what else the machine does in a
minute touches both. A step takes as long as on the slowest rank; a block counts by its median step,
and ratios are of blocks of the same round.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ... import DistributedDataParallel
from ...groups import Group
from ...testing import Meeting
from .tasks import DemoTask

STEPS_PER_BLOCK = 5
WARM_UP = 4  # steps; both wrappers lay out their buckets anew after the first


@dataclass(frozen=True)
class Comparison:
    """Seconds of a step by round, and the losses at the end, ours and torch's."""

    ours: list[float]
    torchs: list[float]
    our_loss: float
    torch_loss: float

    def ratios(self) -> tuple[float, float, float]:
        """Our step by torch's: the lower quartile, the median, the upper quartile."""
        each = [own / other for own, other in zip(self.ours, self.torchs, strict=True)]
        low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
        return low, middle, high

    def sentence(self, backend: str) -> str:
        """The finding, in words."""
        own, other = (1e3 * statistics.median(times) for times in (self.ours, self.torchs))
        low, middle, high = self.ratios()
        apart = abs(self.our_loss - self.torch_loss)
        losses = f"differ by {apart:.0e}" if apart else "are equal to the last bit"
        return (
            f"A step takes {own:.1f} ms with paceline over {backend}, {other:.1f} ms with torch's "
            f"DistributedDataParallel over gloo: {middle:.2f} of it (quartiles {low:.2f} to "
            f"{high:.2f}, {len(self.ours)} rounds in turns). The losses {losses}."
        )


def compare(
    meeting: Meeting, task: DemoTask, model: nn.Module, group: Group, rounds: int
) -> Comparison:
    """Time both in two rounds or more; every rank calls it and gets the same answer."""
    with torch_group(meeting) as torchs:
        wrappers = (
            DistributedDataParallel(copy.deepcopy(model), process_group=group),
            TorchDDP(copy.deepcopy(model), process_group=torchs),
        )
        ways = [Way(task, wrapper, group) for wrapper in wrappers]
        for way in ways:
            way.block(WARM_UP)
        for number in range(rounds):
            for way in ways if number % 2 else reversed(ways):
                group.barrier()
                way.times.append(way.block(STEPS_PER_BLOCK))
        ours, theirs = (way.finding() for way in ways)
        group.barrier()  # nobody leaves while another still steps
    return Comparison(ours[0], theirs[0], ours[1], theirs[1])


@contextmanager
def torch_group(meeting: Meeting) -> Iterator[dist.ProcessGroup | None]:
    """torch's own group of all ranks, over gloo."""
    store = PrefixStore("torch", meeting.store())
    dist.init_process_group("gloo", store=store, rank=meeting.rank, world_size=meeting.size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Way:
    """One wrapper, its optimizer and its batches."""

    def __init__(self, task: DemoTask, wrapper: nn.Module, group: Group) -> None:
        self.group, self.times, self.loss = group, list[float](), 0.0
        optimizer = task.optimizer(wrapper)
        for part in optimizer.param_groups:
            part["lr"] *= 0.01  # the model is trained; it shall not run away from here
        self._batches = task.batches(group)
        self._step: Callable[[object], float] = partial(_step, task, wrapper, optimizer)

    def block(self, steps: int) -> float:
        """Take that many steps; seconds of the median one, on this rank."""
        times = []
        for batch in itertools.islice(self._batches, steps):
            began = time.perf_counter()
            self.loss = self._step(batch)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def finding(self) -> tuple[list[float], float]:
        """The slowest rank's seconds by round, and the last loss on average over ranks."""
        told = self.group.all_gather_object([self.times, self.loss])
        every: list[tuple[list[float], float]] = told  # type: ignore[assignment]
        slowest = [max(times) for times in zip(*(own[0] for own in every), strict=True)]
        return slowest, statistics.fmean(own[1] for own in every)


def _step(task: DemoTask, wrapper: nn.Module, optimizer: object, batch: object) -> float:
    loss = task.loss(wrapper, batch)
    loss.backward()
    optimizer.step()  # type: ignore[attr-defined]
    optimizer.zero_grad()  # type: ignore[attr-defined]
    return loss.item()
