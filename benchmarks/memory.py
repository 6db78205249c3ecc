"""How much less memory does a step need at its highest with lazy buckets, and what do they cost?

    python benchmarks/memory.py --save results.md      about two minutes
    python benchmarks/memory.py --quick                a minute, and rougher
    python benchmarks/memory.py --ranks 2 --rounds 10

``lazy_bucket_allocation``: a bucket has memory from its first gradient to the end of the pass, and
where ``.grad`` lies in it (*views*, and paceline's default) until ``zero_grad``. The model is a
stack of linear layers with GELU and LayerNorm, which leaves about as many bytes of activations as
it has parameters; SGD, ``zero_grad`` before the forward, buckets of 2 MiB, so that there are some.
torch's wrapper has the keyword since 2.15.

**Memory.** One way after the other: what torch's allocator has given a rank and not got back,
from the making of the model on, by torch's profiler, and over shm what the group's heap has; the
highest of five steps, on average over ranks. It is memory in use: an allocator may keep some of
what it got back, and what engines have for themselves is not in it. *after the step*: what is left
when gradients have been dropped, parameters included.

**Time.** As in ``step.py``: in the same processes, one thread each, all ways take turns in blocks
of five steps, every round begins with another, and ratios are of blocks of the same round: their
median, in brackets the quartiles.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import itertools
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import step as steps
import torch
import torch.distributed as dist
from report import Log, describe_machine, digits, row, show_mib
from step import Block, Times
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from paceline.testing import Meeting, spawn_ranks

DEADLINE = 900.0  # seconds for the ranks of one way
LAYERS, WIDTH, BATCH = 10, 512, 192
CAP = 2  # MiB

LAZY = ", lazy"
LOCAL, TORCH, VIEWS = "local", "torch, gloo", "torch views, gloo"
OURS = {"paceline, shm": "shm"}
PLAIN = (TORCH, VIEWS, *OURS)
TORCH_HAS_IT = "lazy_bucket_allocation" in inspect.signature(TorchDDP).parameters


def all_ways() -> list[str]:
    lazy = [way + LAZY for way in PLAIN if way in OURS or TORCH_HAS_IT]
    return [
        LOCAL,
        *(way for pair in PLAIN for way in (pair, pair + LAZY) if way in (*PLAIN, *lazy)),
    ]


# -- in the ranks -----------------------------------------------------------------------------


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    parts = ((nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(LAYERS))
    return nn.Sequential(*(nn.Sequential(*layer) for layer in parts))


def wrap(way: str, model: nn.Module, meeting: Meeting, opened: ExitStack) -> nn.Module:
    """Wrap a model in one of the ways, on a group of its own, which ``opened`` ends."""
    if way == LOCAL:
        return model
    plain = way.removesuffix(LAZY)
    options = {"bucket_cap_mb": CAP} | ({"lazy_bucket_allocation": True} if way != plain else {})
    if plain in OURS:
        group = opened.enter_context(meeting.new_group(OURS[plain]))
        return paceline.DistributedDataParallel(model, process_group=group, **options)
    if not dist.is_initialized():
        store = dist.PrefixStore(way, meeting.store())
        dist.init_process_group("gloo", store=store, rank=meeting.rank, world_size=meeting.size)
        opened.callback(dist.destroy_process_group)
    options["gradient_as_bucket_view"] = plain == VIEWS
    return TorchDDP(model, process_group=dist.new_group(), **options)


@dataclass(frozen=True)
class Trained:
    """A model in one of the ways, and what makes a step of it."""

    model: nn.Module
    step: Callable[[], None]


def prepare(way: str, meeting: Meeting, opened: ExitStack) -> Trained:
    model = make_model()
    wrapped = wrap(way, model, meeting, opened)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(BATCH, WIDTH) + 0.01 * meeting.rank

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        wrapped(batch).square().mean().backward()
        optimizer.step()

    return Trained(model, step)


Change = tuple[int, int]  # when, in nanoseconds, and by how many bytes memory in use grew


class Heap:
    """What groups give from memory that torch's allocator does not know of."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._allocate = paceline.Group.allocate

    def give(self, group: paceline.Group, numel: int, *rest: Any) -> Tensor:
        """``Group.allocate``, noted."""
        tensor = self._allocate(group, numel, *rest)
        self._note(tensor.nbytes)
        weakref.finalize(tensor.untyped_storage(), self._note, -tensor.nbytes).atexit = False
        return tensor

    def _note(self, grew: int) -> None:
        self.changes.append((time.time_ns(), grew))


def weigh(meeting: Meeting, ways: Sequence[str]) -> list[tuple[int, int]]:
    """Bytes that this rank had in use at its highest, and in the end, in each of the ways."""
    torch.set_num_threads(1)
    return [weigh_one(meeting, way) for way in ways]


def weigh_one(meeting: Meeting, way: str) -> tuple[int, int]:
    """The same for one way."""
    heap = Heap()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    gc.collect()  # of the way before
    with ExitStack() as opened:
        if "shm" in way:
            given = mock.patch.object(paceline.Group, "allocate", lambda *all_: heap.give(*all_))
            opened.enter_context(given)
        with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
            trained = prepare(way, meeting, opened)
            for _ in range(steps.STEPS_PER_BLOCK):
                trained.step()
            trained.model.zero_grad(set_to_none=True)
        changes = [*heap.changes, *changes_in(profile)]
        steps._meet(meeting, f"{way} was weighed")  # nobody leaves a group that another still uses
    in_use = list(itertools.accumulate(grew for _, grew in sorted(changes)))
    return max(in_use), in_use[-1]


def changes_in(profile: torch.profiler.profile) -> list[Change]:
    events = profile.profiler.kineto_results.events()
    return [(one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"]


def time_blocks(meeting: Meeting, ways: Sequence[str], rounds: int) -> list[list[Block]]:
    """One rank's blocks, by round and then in the order of ``ways``."""
    torch.set_num_threads(1)
    with ExitStack() as opened:
        trained = {way: prepare(way, meeting, opened) for way in ways}
        barrier = opened.enter_context(meeting.new_group("shm")).barrier
        return steps.take_turns({way: one.step for way, one in trained.items()}, rounds, barrier)


# -- in the process that starts them ----------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What one way took: bytes on average over ranks, and times."""

    peak: float
    end: float
    times: Times | None


def measure(ways: Sequence[str], ranks: int, rounds: int) -> dict[str, Found]:
    """With no rounds, memory alone."""
    times = measure_times(ways, ranks, rounds) if rounds else dict.fromkeys(ways)
    by_rank = spawn_ranks(ranks, weigh, ways, deadline=DEADLINE)
    found = {}
    for way, weighed in zip(ways, zip(*by_rank, strict=True), strict=True):
        peaks, ends = zip(*weighed, strict=True)
        found[way] = Found(statistics.mean(peaks), statistics.mean(ends), times[way])
    return found


def measure_times(ways: Sequence[str], ranks: int, rounds: int) -> dict[str, Times | None]:
    by_rank = spawn_ranks(ranks, time_blocks, ways, rounds, deadline=DEADLINE)
    times: dict[str, Times | None] = {}
    for index, way in enumerate(ways):
        blocks = [[rank[number][index] for rank in by_rank] for number in range(rounds)]
        times[way] = Times(list(map(steps._wall, blocks)), list(map(steps._cpu, blocks)))
    return times


HEAD = ("way", "peak memory of a rank", "over local", "less than without", "after the step")
TIMES = ("step", "/ without lazy")


def cells_of(way: str, found: dict[str, Found]) -> list[str]:
    own, local = found[way], found[LOCAL]
    plain = found.get(way.removesuffix(LAZY)) if way.endswith(LAZY) else None
    cells = [
        way,
        show_mib(own.peak),
        "" if way == LOCAL else show_mib(own.peak - local.peak),
        "" if plain is None else show_mib(plain.peak - own.peak),
        show_mib(own.end),
    ]
    if own.times is None:
        return cells
    step = f"{digits(1e3 * statistics.median(own.times.wall))} ms"
    other = None if plain is None else plain.times
    return [*cells, step, "" if other is None else str(own.times.over(other))]


def trained_bytes() -> int:
    return sum(param.nbytes for param in make_model().parameters())


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Peak memory of a step, with lazy buckets or not.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="blocks of each way (8); 0: memory alone")
    parser.add_argument("--ways", help="of all, by commas between their names, such as shm")
    parser.add_argument("--quick", action="store_true", help="a rough picture, from 2 rounds")
    parser.add_argument("--save", type=Path, help="write the result here")
    args = parser.parse_args(arguments)
    if args.rounds is None:
        args.rounds = 2 if args.quick else 8
    wanted = (args.ways or "").split(",")
    args.ways = [way for way in all_ways() if way == LOCAL or any(part in way for part in wanted)]
    return args


def main() -> int:
    args = read_arguments()
    log = Log()
    log(describe_machine())
    timed = (
        f", {args.rounds} rounds of {steps.STEPS_PER_BLOCK} steps each way" if args.rounds else ""
    )
    size = show_mib(trained_bytes())
    log(f"{args.ranks} ranks of one thread{timed}; {size} of parameters, as many of gradients.")
    head = [*HEAD, *(TIMES if args.rounds else ())]
    log(f"\n{row(*head)}\n{row('---', *['--:'] * (len(head) - 1))}")
    found = measure(args.ways, args.ranks, args.rounds)
    log("\n".join(row(*cells_of(way, found)) for way in args.ways))
    if args.save is not None:
        args.save.write_text("\n".join(log.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
