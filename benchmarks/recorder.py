"""What does the recorder cost, which is always on?

    python benchmarks/recorder.py --save results.md      about five minutes
    python benchmarks/recorder.py --quick                one minute, and rougher

**A step.** As in ``step.py``: in the same two processes, one thread each, the same model with a
recorded and an unrecorded group takes turns in blocks of steps, and ratios are of blocks of the
same round: their median, and in brackets the quartiles. A second unrecorded copy takes turns with
them; its ratio is what the machine does by itself. CPU time is that of all threads of all ranks for
one step, by the same rule.

**An event.** Nanoseconds for what is written of one call, one step and one bucket, the best of many
tries in one process. Times the number of events of a step, that is the cost that must not show.

The aim: under 1% of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import step as steps
import torch
from report import Log, describe_machine, digits, row
from step import MODELS, Block, Ratio

import paceline
from paceline import recorder
from paceline.recorder import events
from paceline.testing import Meeting, spawn_ranks

DEADLINE = 1800.0  # seconds for the ranks of one model
OFF, AGAIN, ON = "off", "off again", "on"
WAYS = (OFF, ON, AGAIN)
BENCHED = ("mlp", "small")
ENGINES = ("shm", "gloo")
AIM = 0.01


# -- in the ranks -----------------------------------------------------------------------------


def make_step(
    name: str, way: str, engine: str, meeting: Meeting, opened: ExitStack
) -> Callable[[], None]:
    torch.manual_seed(0)
    recorder.configure(on=way == ON)
    group = opened.enter_context(meeting.new_group(engine))
    recorder.configure()
    model, batch = MODELS[name].make()
    ddp = paceline.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        ddp(batch).square().mean().backward()
        optimizer.step()

    return step


def time_blocks(meeting: Meeting, name: str, engine: str, rounds: int) -> list[list[Block]]:
    """One rank's blocks, by round and then in the order of ``WAYS``."""
    torch.set_num_threads(1)
    with ExitStack() as opened:
        takes = {way: make_step(name, way, engine, meeting, opened) for way in WAYS}
        barrier = opened.enter_context(meeting.new_group("shm")).barrier
        for take in takes.values():
            for _ in range(steps.WARM_UP):
                take()
        taken = []
        for number in range(rounds):
            turn = number % len(WAYS)
            blocks = {}
            for way in (*WAYS[turn:], *WAYS[:turn]):
                barrier()
                blocks[way] = steps._time_block(takes[way])
            taken.append([blocks[way] for way in WAYS])
        barrier()
    return taken


def count_events(meeting: Meeting, name: str) -> tuple[int, int]:
    """Calls and buckets of one step, after the first."""
    torch.set_num_threads(1)
    with ExitStack() as opened:
        take = make_step(name, ON, "shm", meeting, opened)
        for _ in range(steps.WARM_UP):
            take()
        before = recorder.totals().collectives
        events.buckets.clear()
        take()
        return recorder.totals().collectives - before, len(events.buckets)


# -- in the process that starts them ----------------------------------------------------------


def measure_step(name: str, engine: str, rounds: int) -> tuple[dict[str, Ratio], float]:
    """Ratios by way and kind of time to an unrecorded step, and that step's seconds."""
    by_rank = spawn_ranks(2, time_blocks, name, engine, rounds, deadline=DEADLINE)
    wall: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for index, way in enumerate(WAYS):
            blocks = [rank[number][index] for rank in by_rank]
            wall[way].append(steps._wall(blocks))
            cpu[way].append(steps._cpu(blocks))

    def over(times: dict[str, list[float]], way: str) -> Ratio:
        return Ratio.of([a / b for a, b in zip(times[way], times[OFF], strict=True)])

    ratios = {"on": over(wall, ON), "again": over(wall, AGAIN), "cpu": over(cpu, ON)}
    return ratios, statistics.median(wall[OFF])


def event_costs() -> dict[str, float]:
    """Nanoseconds of each kind of event."""
    store = torch.distributed.HashStore()
    recorder.configure(on=True)
    with paceline.new_group("threads", store=store, rank=0, world_size=1) as group:
        board, tensor = group.board, torch.ones(1024)
        assert board is not None
        call = paceline.groups.Call("all_reduce", (tensor,), (tensor,), "sum")
        track = events.Track(board, lambda _: ())

        def begin(call: paceline.groups.Call) -> events.Entry:  # as deep as a group does it
            return board.begin(call, 4096)

        def a_call() -> None:
            entry = begin(call)
            entry.finished = events.now()

        def a_step() -> None:
            track.forward_begins()
            track.forward_ends()
            track.backward_begins()
            track.backward_ends()

        def a_bucket() -> None:
            entry = track.bucket_filled(0)
            entry.nbytes = 4096
            board.latest, board.by = None, (track, 0)
            entry.launched = events.now()
            board.by = None
            entry.finished = events.now()

        costs = {"call": best(a_call), "step": best(a_step), "bucket": best(a_bucket)}
    recorder.configure()
    return costs


def best(action: Callable[[], None], tries: int = 200, times: int = 200) -> float:
    found = []
    for _ in range(tries):
        began = time.perf_counter_ns()
        for _ in range(times):
            action()
        found.append((time.perf_counter_ns() - began) / times)
    return min(found)


def report(log: Log, models: Sequence[str], rounds: int) -> None:
    log("# What the recorder costs\n")
    log(f"{describe_machine()} `python benchmarks/recorder.py --rounds {rounds}`, two ranks.\n")
    costs = event_costs()
    told = ", ".join(f"{digits(value)} ns for a {name}" for name, value in costs.items())
    log(f"An event costs {told}.\n")
    log(
        row("model", "engine", "step", "recorded / not", "not / not", "CPU time", "events", "share")
    )
    log(row(*["---"] * 8))
    for name in models:
        calls, buckets = spawn_ranks(2, count_events, name, deadline=DEADLINE)[0]
        written = calls * costs["call"] + buckets * costs["bucket"] + costs["step"]
        for engine in ENGINES:
            ratios, seconds = measure_step(name, engine, rounds)
            share = written / 1e9 / seconds
            log(
                row(
                    MODELS[name].title,
                    engine,
                    f"{digits(seconds * 1e3)} ms",
                    ratios["on"],
                    ratios["again"],
                    ratios["cpu"],
                    f"{calls} calls, {buckets} buckets",
                    f"{share:.3%}, {'met' if share < AIM else 'missed'}",
                )
            )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(BENCHED))
    chosen = parser.parse_args(arguments)
    log = Log()
    report(log, chosen.models, chosen.rounds or (12 if chosen.quick else 60))
    if chosen.save:
        chosen.save.write_text("\n".join(log.lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
