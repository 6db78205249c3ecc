"""What does a step cost when each rank keeps only its part of the optimizer's state?

    python benchmarks/zero.py --save results.md      about half an hour
    python benchmarks/zero.py --quick                a few minutes, and rougher
    python benchmarks/zero.py --models mlp --ranks 2 --rounds 30

AdamW with its default settings, on the models of ``step.py``. The ways: the plain model (local);
DistributedDataParallel with an ordinary AdamW, torch's over gloo and paceline's over shm and gloo;
torch's DistributedDataParallel with torch's ZeroRedundancyOptimizer; paceline's with paceline's
ZeroRedundancyOptimizer, unaware of each other ("zero") and paired ("paired": gradients are
reduce-scattered, each rank steps its part, parameters are gathered where they lie).

**Time.** As in ``step.py``: in the same processes, one thread each, all ways take turns in blocks
of five steps, every round begins with another, and ratios are of blocks of the same round: their
median, in brackets the quartiles. **State**: bytes of all tensors that a rank's optimizer keeps, on
the rank with most, and as a part of what an ordinary AdamW keeps. **Memory**: as in ``step.py``, by
how much a rank's memory has grown at its highest, in fresh processes; a page that n processes map
counts as 1/n for each.

**Aims.** State 1/N of the whole, within 2%. "paired" takes at most 0.8 of the step with torch's
ZeroRedundancyOptimizer, and no more than paceline's DistributedDataParallel with AdamW over the
same engine. And on the MLP, with 2 ranks on shm, it takes less than the local step, which
communicates nothing: each rank updates only its half.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import step as steps
import torch
import torch.distributed as dist
from report import Log, describe_machine, digits, row, show_mib
from step import MODELS, Block, Times
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from paceline.optim import ZeroRedundancyOptimizer
from paceline.testing import Meeting, spawn_ranks

DEADLINE = 1800.0  # seconds for the ranks of one model
RATE = 1e-4

LOCAL = "local"
TORCH, TORCH_ZERO = "torch DDP, gloo", "torch DDP + ZeRO, gloo"
ENGINES = ("shm", "gloo")
PLAIN, ZERO, PAIRED = "paceline DDP", "paceline zero", "paceline paired"
OURS = [f"{way}, {engine}" for engine in ENGINES for way in (PLAIN, ZERO, PAIRED)]
WAYS = [LOCAL, TORCH, TORCH_ZERO, *OURS]
BENCHED = ("mlp", "transformer", "small")
OF_TORCH, STATE = 0.8, 0.02  # aims


# -- in the ranks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """One way to train a model: a step, and the optimizer that keeps the state."""

    step: Callable[[], None]
    optimizer: Any


def prepare(name: str, way: str, meeting: Meeting, opened: ExitStack) -> Trained:
    torch.manual_seed(0)
    model, batch = MODELS[name].make()
    batch += 0.01 * meeting.rank  # ranks differ, or there would be nothing to average
    wrapped, optimizer = wrap(way, model, meeting, opened)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        wrapped(batch).square().mean().backward()
        optimizer.step()

    return Trained(step, getattr(optimizer, "optim", optimizer))


def wrap(way: str, model: Any, meeting: Meeting, opened: ExitStack) -> tuple[Any, Any]:
    """A model and its optimizer in one of the ways, on a group of its own, which is ended."""
    kind = torch.optim.AdamW
    if way == LOCAL:
        return model, kind(model.parameters(), lr=RATE)
    if way in (TORCH, TORCH_ZERO):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            opened.callback(dist.destroy_process_group)
        group = dist.new_group()
        ddp = TorchDDP(model, process_group=group)
        if way == TORCH:
            return ddp, kind(ddp.parameters(), lr=RATE)
        return ddp, TorchZero(ddp.parameters(), kind, process_group=group, lr=RATE)
    part, engine = way.split(", ")
    ours = opened.enter_context(meeting.new_group(engine))
    ddp = paceline.DistributedDataParallel(model, process_group=ours)
    if part == PLAIN:
        return ddp, kind(ddp.parameters(), lr=RATE)
    paired = ddp if part == PAIRED else None
    return ddp, ZeroRedundancyOptimizer(ddp.parameters(), kind, ours, ddp=paired, lr=RATE)


def time_blocks(
    meeting: Meeting, name: str, ways: Sequence[str], rounds: int
) -> tuple[list[list[Block]], list[int]]:
    """One rank's blocks, by round and then in the order of ``ways``, and its bytes of state."""
    torch.set_num_threads(1)
    with ExitStack() as opened:
        trained = {way: prepare(name, way, meeting, opened) for way in ways}
        barrier = opened.enter_context(meeting.new_group("shm")).barrier
        taken = steps.take_turns({way: one.step for way, one in trained.items()}, rounds, barrier)
        state = [state_bytes(one.optimizer) for one in trained.values()]
        barrier()  # nobody leaves a group that another still uses
    return taken, state


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    kept = [value for own in optimizer.state.values() for value in own.values()]
    return sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))


def weigh(meeting: Meeting, name: str, way: str) -> int:
    """Bytes this rank's memory grew by at most, with shared pages in proportion."""
    torch.set_num_threads(1)
    steps._meet(meeting, "start")
    before = steps._memory("status")["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, here
    with ExitStack() as opened:
        step = prepare(name, way, meeting, opened).step
        for _ in range(steps.STEPS_PER_BLOCK):
            step()
        steps._meet(meeting, "stepped")  # all ranks have mapped all they will
        end, shares = steps._memory("status"), steps._memory("smaps_rollup")
        steps._meet(meeting, "weighed")
    return end["VmHWM"] - before - (end["RssShmem"] - shares["Pss_Shmem"])


# -- in the process that starts them ----------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What one way took on one model."""

    times: Times
    state: int  # bytes, of the rank with most
    memory: float | None  # bytes, on average over ranks


def measure(
    name: str, ways: Sequence[str], ranks: int, rounds: int, weighs: bool
) -> dict[str, Found]:
    by_rank = spawn_ranks(ranks, time_blocks, name, ways, rounds, deadline=DEADLINE)
    found = {}
    for index, way in enumerate(ways):
        blocks = [[taken[number][index] for taken, _ in by_rank] for number in range(rounds)]
        times = Times(list(map(steps._wall, blocks)), list(map(steps._cpu, blocks)))
        memory = None
        if weighs:
            memory = statistics.mean(spawn_ranks(ranks, weigh, name, way, deadline=DEADLINE))
        found[way] = Found(times, max(state[index] for _, state in by_rank), memory)
    return found


HEAD = (
    "| model | ranks | way | step | CPU per step | step / local | / torch ZeRO | / paceline DDP "
    "| state of a rank | of the whole | peak memory |\n"
    "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def lines_of(name: str, ranks: int, found: dict[str, Found]) -> list[str]:
    lines = []
    for way, own in found.items():
        against = [
            _ratio(own, found.get(other)) if way != other else ""
            for other in (LOCAL, TORCH_ZERO, _plain(way))
        ]
        lines.append(
            row(
                MODELS[name].title if way == next(iter(found)) else "",
                ranks,
                way,
                f"{digits(1e3 * statistics.median(own.times.wall))} ms",
                f"{digits(1e3 * statistics.median(own.times.cpu))} ms",
                *against,
                show_mib(own.state),
                f"{own.state / found[LOCAL].state:.3f}" if LOCAL in found else "",
                "" if own.memory is None else show_mib(own.memory),
            )
        )
    return lines


def _ratio(own: Found, other: Found | None) -> str:
    return "" if other is None else str(own.times.over(other.times))


def _plain(way: str) -> str:
    """The way with an ordinary optimizer over the same engine."""
    return f"{PLAIN}, {way.split(', ')[1]}" if way in OURS else ""


def verdicts(name: str, ranks: int, found: dict[str, Found]) -> list[str]:
    """Which aims were met, one line each."""
    said = []
    for engine in ENGINES:
        way = f"{PAIRED}, {engine}"
        own = found[way]
        share = own.state / found[LOCAL].state * ranks - 1
        aims = [("state 1/N within 2%", 1 + share, 1 + STATE)]
        aims.append(("of torch ZeRO", _median(own, found[TORCH_ZERO]), OF_TORCH))
        aims.append(("of paceline DDP", _median(own, found[_plain(way)]), 1.0))
        if name == "mlp" and ranks == 2 and engine == "shm":
            aims.append(("of the local step", _median(own, found[LOCAL]), 1.0))
        for what, value, aim in aims:
            met = "met" if round(value, 2) <= aim else "missed"
            said.append(f"- {name}, {ranks} ranks, {way}: {value:.3f} {what}, aim {aim}: {met}")
    return said


def _median(own: Found, other: Found) -> float:
    return own.times.over(other.times).median


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Steps with the optimizer's state in shards.")
    parser.add_argument("--models", default=",".join(BENCHED), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, help="blocks of each way (20)")
    parser.add_argument("--quick", action="store_true", help="a rough picture, from 4 rounds")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save", type=Path, help="write the result here")
    args = parser.parse_args(arguments)
    args.models = args.models.split(",")
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: not among {list(MODELS)}")
    args.ranks = [int(number) for number in args.ranks.split(",")]
    args.rounds = args.rounds or (4 if args.quick else 20)
    return args


def main() -> int:
    args = read_arguments()
    log = Log()
    log(describe_machine())
    log(f"Ranks of one thread, {args.rounds} rounds of {steps.STEPS_PER_BLOCK} steps each way.")
    log(f"\n{HEAD}")
    said = []
    for name in args.models:
        for ranks in args.ranks:
            weighs = args.memory and MODELS[name].weigh
            found = measure(name, WAYS, ranks, args.rounds, weighs)
            log("\n".join(lines_of(name, ranks, found)))
            said.extend(verdicts(name, ranks, found))
    log("\n" + "\n".join(said))
    if args.save is not None:
        args.save.write_text("\n".join(log.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
