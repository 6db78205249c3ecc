"""How long does a model take to learn the same over a slow wire, and what makes it quicker?

    python benchmarks/wire.py --save results.md      about a quarter of an hour; needs root
    python benchmarks/wire.py --quick                three minutes, and rougher
    python benchmarks/wire.py --only "paceline" --links 100

Two ranks, one thread each, on two "hosts": network namespaces joined by a cable with the rate and
the delay of a real one (``wire_link.py`` says how). They train a GPT over characters
(``chargpt.py``), always from the same weights, on the same batches and with the same AdamW; only
the way the ranks share what they have learned differs (``wire_ways.py``).

**The loss to reach** is the one that torch's DDP, uncompressed, has after a fixed number of steps;
0.2% above it will do. It is measured every few steps on a batch of its own (of the same text, of
which a run reads less than one percent), and the mean of the last three measurements counts, so
that luck does not. Each way gets the steps it needs to come to the same. The measurements are made
after the run, from copies of the parameters taken on the way; where ranks have models of their own
(DiLoCo) it is the mean of their losses. What a step learns does not depend on the wire. So the
first cable tells how many steps each way needs, and over the others each makes just these, and its
loss is looked at again at the end.

**Time** is from the first step to the end of the step that reached the loss, on the slower rank.
Wrapping, which sends the weights once, is not part of it. **Sent** is what one rank's kernel has
put on the cable per step, all headers, acknowledgements and repetitions included; **payload**, for
paceline, is what its group has counted. **CPU** is that of all threads of one rank in a step; what
it has above that of the first line, which exchanges nothing, goes into encoding and sending.
**Wire** is how long the cable takes for the bytes alone. What a step takes beyond its CPU time is
time that ranks wait, for the wire or, on a machine that has other work, for a core: times are worth
something only where the load is low when it begins.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from chargpt import Batch, CharGPT, batches, loss_of
from report import Log, describe_machine, digits, row
from torch import Tensor, nn
from wire_link import Host, Link, congestion_control, lay_cable, unable
from wire_ways import ALONE, REFERENCE, WAYS, Trainer

from paceline.testing import Meeting, spawn_ranks

DEADLINE = 240.0  # seconds for one way over one cable
BATCH, CONTEXT = 2, 64  # characters of one rank's step: so few that the wire matters
WINDOW = 3  # measurements that the loss is the mean of
UNSEEN = 12345  # seed of the batch that losses are measured on
SLACK = 1.002  # of the loss to reach; two sums in another order differ in the last digits


@dataclass(frozen=True)
class Size:
    """How large the model is, how long it trains, and how often it is looked at."""

    width: int
    depth: int
    steps: int  # of the reference
    every: int  # steps between two measurements of the loss


FULL = Size(width=256, depth=4, steps=60, every=3)
QUICK = Size(width=256, depth=4, steps=18, every=3)
TOY = Size(width=32, depth=1, steps=12, every=2)


# -- in the ranks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one rank saw of one training; the lists have an entry for each step."""

    ends: list[float]  # seconds since the first step began
    cpu: list[float]  # seconds that all threads have computed by then
    sent: list[int]  # bytes put on the cable by then
    payload: list[float]  # bytes that paceline's group has counted by then
    losses: dict[int, float]  # by step


def train(meeting: Meeting, hosts: Sequence[Host], way: str, size: Size, steps: int) -> Run:
    """One rank's training."""
    host = hosts[meeting.rank]
    host.enter()
    with ExitStack() as opened:
        torch.manual_seed(0)
        model = make_model(size)
        warm_up(size)
        trainer = WAYS[way].build(model, meeting, opened)
        data = batches(meeting.rank, meeting.size, batch_size=BATCH, context=CONTEXT)
        meet(meeting, "start")
        run, copies = run_steps(trainer, model, host, data, size.every, steps)
        meet(meeting, "trained")
    run.losses.update({step: measure_loss(model, copy) for step, copy in copies.items()})
    return run


def make_model(size: Size) -> CharGPT:
    return CharGPT(width=size.width, depth=size.depth, heads=max(1, size.width // 64))


def warm_up(size: Size) -> None:
    """The first step of a process is slow, whoever makes it."""
    batch = next(batches(batch_size=BATCH, context=CONTEXT))
    loss_of(make_model(size), batch).backward()


def run_steps(
    trainer: Trainer, model: nn.Module, host: Host, data: Iterator[Batch], every: int, steps: int
) -> tuple[Run, dict[int, Tensor]]:
    run, copies = Run([], [], [], [], {}), dict[int, Tensor]()
    counted = trainer.payload()
    sent, cpu, began = host.sent(), time.process_time(), time.perf_counter()
    for step, batch in zip(range(1, steps + 1), data, strict=False):
        one_step(trainer, batch)
        run.ends.append(time.perf_counter() - began)
        run.cpu.append(time.process_time() - cpu)
        run.sent.append(host.sent() - sent)
        run.payload.append(trainer.payload() - counted)
        if step % every == 0 or step == steps:
            copies[step] = nn.utils.parameters_to_vector(model.parameters()).detach()
    return run, copies


def one_step(trainer: Trainer, batch: Batch) -> None:
    trainer.optimizer.zero_grad()
    loss_of(trainer.model, batch).backward()
    trainer.optimizer.step()


def measure_loss(model: nn.Module, parameters: Tensor) -> float:
    nn.utils.vector_to_parameters(parameters, model.parameters())
    unseen = next(batches(seed=UNSEEN, batch_size=48, context=CONTEXT))
    with torch.no_grad():
        return float(loss_of(model, unseen))


def meet(meeting: Meeting, place: str) -> None:
    """Wait for the other rank without using the cable."""
    store = meeting.store()
    store.set(f"{place}/{meeting.rank}", "here")
    store.wait([f"{place}/{rank}" for rank in range(meeting.size)])


# -- in the process that starts them ----------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a way needed to come to the loss, or that it did not."""

    steps: int
    reached: bool
    loss: float
    seconds: float
    spread: tuple[float, float, float]  # quartiles of a step
    cpu: float  # seconds of a step and a rank
    sent: float  # bytes of a step and a rank
    payload: float


def smooth(runs: Sequence[Run]) -> dict[int, float]:
    """The mean loss of the ranks over the last measurements, by step."""
    steps = list(runs[0].losses)
    means = [statistics.mean(run.losses[step] for run in runs) for step in steps]
    first = min(WINDOW, len(steps)) - 1
    windows = range(first, len(steps))
    return {steps[i]: statistics.mean(means[i - first : i + 1]) for i in windows}


def judge(runs: Sequence[Run], target: float) -> Outcome:
    """How far the ranks came, and how quickly."""
    losses = smooth(runs)
    reached = [step for step, loss in losses.items() if loss <= target * SLACK]
    steps = reached[0] if reached else max(losses)
    seconds = max(run.ends[steps - 1] for run in runs)
    ends = [max(pair) for pair in zip(*(run.ends[:steps] for run in runs), strict=True)]
    each = [b - a for a, b in zip([0.0, *ends], ends, strict=False)]
    quartiles = statistics.quantiles(each, n=4, method="inclusive")
    return Outcome(
        steps,
        bool(reached),
        losses[steps],
        seconds,
        (quartiles[0], quartiles[1], quartiles[2]),
        statistics.mean(run.cpu[steps - 1] for run in runs) / steps,
        statistics.mean(run.sent[steps - 1] for run in runs) / steps,
        statistics.mean(run.payload[steps - 1] for run in runs) / steps,
    )


@dataclass
class Wear:
    """What the cables themselves have done."""

    seconds: float = 0.0  # CPU of their relays
    frames: float = 0
    lost: float = 0

    def __str__(self) -> str:
        lost = f"{self.lost:.0f} of {self.frames:.0f} frames were lost on the cables"
        return f"{lost}, whose relays took {self.seconds:.1f} s of CPU in all."


def measure(link: Link, way: str, size: Size, steps: int, wear: Wear) -> list[Run]:
    with lay_cable(link) as cable:
        runs = spawn_ranks(2, train, cable.hosts, way, size, steps, deadline=DEADLINE)
    wear.seconds += cable.told["cpu"]
    wear.frames += cable.told["frames"]
    wear.lost += cable.told["lost"]
    return runs


# -- the run ----------------------------------------------------------------------------------

HEAD = (
    "| wire | way | time to the loss | times torch's | steps | a step (quartiles) | CPU | wire "
    "| sent | payload |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def line_of(link: Link, way: str, own: Outcome, reference: Outcome) -> str:
    low, median, high = (1e3 * x for x in own.spread)
    took = f"{digits(own.seconds)} s" if own.reached else f"not in {digits(own.seconds)} s"
    if way == ALONE:
        took = ""
    faster = f"{reference.seconds / own.seconds:.2f}" if own.reached and way != ALONE else ""
    return row(
        link,
        way,
        took,
        faster,
        own.steps,
        f"{digits(median)} ms ({digits(low)}-{digits(high)})",
        f"{digits(1e3 * own.cpu)} ms",
        f"{digits(8e-3 * own.sent / link.megabits)} ms",
        f"{digits(own.sent / 1e3)} kB",
        f"{digits(own.payload / 1e3)} kB" if own.payload else "",
    )


def verdict(link: Link, outcomes: dict[str, Outcome]) -> list[str]:
    """Whether the aims are met over this cable."""
    reached = {way: own.seconds for way, own in outcomes.items() if own.reached and way != ALONE}
    torchs = {way: s for way, s in reached.items() if way.startswith("torch")}
    ours = {way: s for way, s in reached.items() if way.startswith("paceline")}
    if not torchs or not ours:
        return []
    best, theirs = min(ours, key=ours.__getitem__), min(torchs, key=torchs.__getitem__)
    gain, lead = torchs[REFERENCE] / ours[best], torchs[theirs] / ours[best]
    slower = [way for way, seconds in ours.items() if seconds > torchs[REFERENCE]]
    return [
        f"{link}: the quickest is [{best}], {gain:.2f} times as quick as [{REFERENCE}] and "
        f"{lead:.2f} times as quick as torch's quickest, [{theirs}].",
        f"{link}: slower than [{REFERENCE}]: {'; '.join(slower) or 'none of paceline'}.",
    ]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to the same loss over slow wires.")
    parser.add_argument("--links", default="1000,100", help="Mbit/s, as in 1000,100")
    parser.add_argument("--delay", type=float, default=5.0, help="milliseconds, one way")
    parser.add_argument("--only", default="", help="ways whose names have this; of several, with ;")
    parser.add_argument("--steps", type=int, help=f"of torch's DDP, to set the loss ({FULL.steps})")
    parser.add_argument("--quick", action="store_true", help="a rough picture, from fewer steps")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to see that all works")
    parser.add_argument("--save", type=Path, help="write the result here; every step, if .json")
    args = parser.parse_args()
    args.ways = choose_ways(args.only.split(";"), quick=args.quick and not args.only)
    args.links = [Link(float(rate), args.delay) for rate in args.links.split(",")]
    args.size = TOY if args.toy else QUICK if args.quick else FULL
    if args.steps:
        args.size = Size(args.size.width, args.size.depth, args.steps, args.size.every)
    return args


def choose_ways(wanted: Sequence[str], *, quick: bool) -> list[str]:
    """Those whose names have something that is wanted, and the two that others are held against."""
    chosen = [way for way in WAYS if any(part in way for part in wanted)]
    chosen = [way for way in chosen if WAYS[way].always or not quick]
    return [way for way in WAYS if way in (ALONE, REFERENCE, *chosen)]


def steps_for(way: str, size: Size, needed: dict[str, int]) -> int:
    """As many as another cable has shown to be needed; else as many as the way may take."""
    return needed.get(way) or round(size.steps * WAYS[way].patience / size.every) * size.every


def compare(
    link: Link, ways: Sequence[str], size: Size, needed: dict[str, int], log: Log, wear: Wear
) -> tuple[dict[str, Outcome], dict[str, list[Run]]]:
    """Every way over one cable, the reference first: it sets the loss."""
    runs = {REFERENCE: measure(link, REFERENCE, size, steps_for(REFERENCE, size, needed), wear)}
    target = list(smooth(runs[REFERENCE]).values())[-1]
    outcomes: dict[str, Outcome] = {}
    for way in ways:
        if way != REFERENCE:
            runs[way] = measure(link, way, size, steps_for(way, size, needed), wear)
        outcomes[way] = judge(runs[way], target)
        needed.setdefault(way, outcomes[way].steps)
        log(line_of(link, way, outcomes[way], judge(runs[REFERENCE], target)))
    return outcomes, runs


def main() -> int:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces go first
    if why := unable():
        print(f"This benchmark needs two hosts: {why}.", file=sys.stderr)
        return 1
    log = Log()
    log(describe_machine())
    parameters = sum(p.numel() for p in make_model(args.size).parameters())
    log(
        f"A GPT of {parameters / 1e6:.2f} million parameters, 2 ranks with {BATCH} x {CONTEXT} "
        f"characters each; {args.size.steps} steps of {REFERENCE} set the loss. "
        f"TCP's congestion control: {congestion_control()}. Load: {os.getloadavg()[0]:.1f}.\n"
    )
    log(HEAD)
    needed: dict[str, int] = {}
    everything, verdicts, wear = {}, [], Wear()
    for link in args.links:
        outcomes, runs = compare(link, args.ways, args.size, needed, log, wear)
        verdicts += verdict(link, outcomes)
        everything[str(link)] = {way: [asdict(run) for run in own] for way, own in runs.items()}
    log("\n" + "\n".join([*verdicts, str(wear)]))
    if args.save is not None:
        as_json = args.save.suffix == ".json"
        args.save.write_text(json.dumps(everything) if as_json else "\n".join(log.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
