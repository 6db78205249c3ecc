"""What does a training step inside Join cost over the same step outside?

    python benchmarks/join.py --save results.md      a few minutes
    python benchmarks/join.py --quick                half a minute, and rougher

Inside Join a rank must let those that have run out know that it goes on. torch says so before each
forward, with collectives of their own; paceline's wrapper says it in the buckets that travel
anyway (``src/paceline/ddp/joining.py``). In the same two processes, one thread each, every way has
a wrapper and a group of its own, and takes turns with the others: a block of steps outside Join, a
block inside, in the other order every second round. No rank has run out while it is timed; entering
and leaving Join is not part of a step, and is left out. A step is zero_grad, forward, backward and
plain SGD on the same batch. Its time is that of the slower rank; a block counts by its median step.
The ratio is of the two blocks of the same way in the same round: its median, and in brackets the
quartiles. The models are those of ``step.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import step as steps
import torch
from report import Log, describe_machine, digits, row
from step import DEADLINE, GLOO, MODELS, SHM, TORCH, WARM_UP, Block, Ratio, wrap

from paceline.testing import Meeting, spawn_ranks

WAYS = (TORCH, GLOO, SHM)
BENCHED = ("mlp", "small")
AIM = 1.01


# -- in the ranks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way to train: its step, and its wrapper's Join."""

    step: Callable[[], None]
    join: Callable[[], Any]


def make_way(name: str, way: str, meeting: Meeting, opened: ExitStack) -> Way:
    torch.manual_seed(0)
    model, batch = MODELS[name].make()
    wrapped: Any = wrap(way, model, meeting, opened)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
    batch += 0.01 * meeting.rank

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        wrapped(batch).square().mean().backward()
        optimizer.step()

    return Way(step, wrapped.join)


def time_pairs(meeting: Meeting, name: str, rounds: int) -> list[list[tuple[Block, Block]]]:
    """One rank's blocks outside and inside, by round and then in the order of ``WAYS``."""
    torch.set_num_threads(1)
    with ExitStack() as opened:
        ways = [make_way(name, way, meeting, opened) for way in WAYS]
        barrier = opened.enter_context(meeting.new_group("shm")).barrier
        for way in ways:
            for _ in range(WARM_UP):
                way.step()
        taken = []
        for number in range(rounds):
            turn = number % len(ways)
            order = [*range(turn, len(ways)), *range(turn)]
            pairs = {index: time_pair(ways[index], barrier, number % 2 == 1) for index in order}
            taken.append([pairs[index] for index in range(len(ways))])
        barrier()  # nobody leaves a group that another still uses
    return taken


def time_pair(way: Way, barrier: Callable[[], object], inside_first: bool) -> tuple[Block, Block]:
    blocks = {}
    for inside in (inside_first, not inside_first):
        with way.join() if inside else nullcontext():
            way.step()  # the first one after a change is not like the others
            barrier()
            blocks[inside] = steps._time_block(way.step)
            barrier()
    return blocks[False], blocks[True]


# -- in the process that starts them ----------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Seconds of a step of one way, outside and inside, in each round."""

    outside: list[float]
    inside: list[float]

    def ratio(self) -> Ratio:
        pairs = zip(self.inside, self.outside, strict=True)
        return Ratio.of([inside / outside for inside, outside in pairs])


def measure(name: str, rounds: int) -> dict[str, Times]:
    by_rank = spawn_ranks(2, time_pairs, name, rounds, deadline=DEADLINE)
    found = {}
    for index, way in enumerate(WAYS):
        pairs = [[rank[number][index] for rank in by_rank] for number in range(rounds)]
        outside, inside = (
            [steps._wall([pair[which] for pair in ranks]) for ranks in pairs] for which in (0, 1)
        )
        found[way] = Times(outside, inside)
    return found


HEAD = (
    "| model | way | step outside Join | step inside | inside / outside | aim |\n"
    "|---|---|--:|--:|--:|--:|"
)


def lines_of(name: str, times: dict[str, Times]) -> list[str]:
    lines = []
    for way, own in times.items():
        both = [f"{digits(1e3 * statistics.median(t))} ms" for t in (own.outside, own.inside)]
        aim = own.ratio().against(AIM) if way != TORCH else ""
        title = MODELS[name].title if way == WAYS[0] else ""
        lines.append(row(title, way, *both, own.ratio(), aim))
    return lines


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step inside and outside Join.")
    parser.add_argument("--models", default=",".join(BENCHED), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, help="pairs of blocks of each way (40)")
    parser.add_argument("--quick", action="store_true", help="a rough picture, from 6 rounds")
    parser.add_argument("--save", type=Path, help="write the result here")
    args = parser.parse_args(arguments)
    args.models = args.models.split(",")
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: not among {list(MODELS)}")
    args.rounds = args.rounds or (6 if args.quick else 40)
    return args


def main() -> int:
    args = read_arguments()
    log = Log()
    log(describe_machine())
    log(f"2 ranks of one thread, {args.rounds} rounds of {steps.STEPS_PER_BLOCK} steps each way.")
    log(f"\n{HEAD}")
    for name in args.models:
        log("\n".join(lines_of(name, measure(name, args.rounds))))
    if args.save is not None:
        args.save.write_text("\n".join(log.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
