"""What do results that are the same on any number of ranks cost, and how far apart are they else?

    python benchmarks/shards.py --save results.md    about ten minutes
    python benchmarks/shards.py --quick              three minutes, and rougher
    python benchmarks/shards.py --no-time --picture docs/pictures/drift.svg
    python benchmarks/shards.py --link 1000          two minutes; needs root

**Time.** A step is 8 backward passes over equal micro-batches, shared out to the ranks, one thread
each. *accumulation*: paceline's wrapper, ``no_sync`` around all of a rank's passes but the last.
*shards*: the wrapper with ``shards=8``, whose sums do not depend on who computed what. Both over
shm and over gloo; each has a copy of the model and a group of its own. They take turns in blocks of
steps, as in ``step.py``: ratios are of blocks of the same round, their median and in brackets the
quartiles.

**Over a wire.** With ``--link`` there are two ranks on two "hosts": network namespaces joined by a
cable of so many Mbit/s (``wire_link.py`` says how), and gloo between them. *at the end*: the same
step of shards that nobody has told which shard of a rank is its last, so that nothing is sent
before all are computed. The wire takes twice as long for the sums of shards as for gradients; what
of that is seen depends on how much is sent while the last backward pass still runs.

**Memory.** As in ``step.py``, in fresh processes: the peak of a rank over what it had before the
model was made. The aim is one gradient more than accumulation has.

**Drift.** The char GPT of the demo learns with AdamW on 1, 2 and 4 ranks, from the same weights and
the same batches. With torch's DistributedDataParallel a rank's part of a batch is one pass, so that
sums are taken in another order on another number of ranks; with ``shards=8`` they are not. How far
are the weights of 2 and of 4 ranks from those of one? The distance is that of all weights taken as
one vector, relative to its length; without the biases of attention's keys, which change nothing.
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
import torch.distributed as dist
from chargpt import CharGPT, batches, loss_of
from report import Log, describe_machine, digits, row, show_mib
from shards_picture import Curve, draw
from step import DEADLINE, Block, Times
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from wire_link import Host, Link, lay_cable, unable

import paceline
from paceline.data import Shard, share_out
from paceline.testing import Meeting, spawn_ranks

SHARDS = 8
WAYS = ("accumulation, shm", "shards, shm", "accumulation, gloo", "shards, gloo")
AT_END = "shards, gloo, at the end"
WIRE_WAYS = ("accumulation, gloo", "shards, gloo", AT_END)
AIMS = {"shards, shm": 1.03, "shards, gloo": 1.10}
DELAY = 0.1  # milliseconds that a cable takes


# -- the models -------------------------------------------------------------------------------


def make_gpt() -> tuple[nn.Module, Tensor]:
    return CharGPT(), next(batches(batch_size=4)).inputs


def make_transformer() -> tuple[nn.Module, Tensor]:
    model, batch = steps.make_transformer()
    return model, batch[:1]


def make_wide_gpt() -> tuple[nn.Module, Tensor]:
    return CharGPT(width=256, depth=4, heads=4), next(batches(batch_size=8)).inputs


@dataclass(frozen=True)
class Model:
    title: str
    make: Callable[[], tuple[nn.Module, Tensor]]


MODELS = {
    "gpt": Model("char GPT, 2 layers of 64, passes of 4 x 64 tokens", make_gpt),
    "transformer": Model("Transformer, 6 layers of 384, passes of 64 tokens", make_transformer),
    "wide": Model("char GPT, 4 layers of 256, passes of 8 x 64 tokens", make_wide_gpt),
    "mlp": Model("MLP, 8 x Linear(1024), passes of 32 (bound by the wire)", steps.make_mlp),
}


# -- time and memory, in the ranks ------------------------------------------------------------


def make_step(name: str, way: str, meeting: Meeting, opened: ExitStack) -> Callable[[], None]:
    torch.manual_seed(0)
    model, batch = MODELS[name].make()
    kind, engine = way.split(", ")[:2]
    group = opened.enter_context(meeting.new_group(engine))
    ranks_shards = share_out(SHARDS, meeting.size, meeting.rank)
    options = {"shards": SHARDS} if kind == "shards" else {}
    ddp = paceline.DistributedDataParallel(model, process_group=group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    number = 0

    def accumulate() -> None:
        for index in ranks_shards:
            with nullcontext() if index == ranks_shards[-1] else ddp.no_sync():
                ddp(batch).square().mean().backward()

    def by_shards() -> None:
        named = [Shard(seed=0, step=number, index=index, count=SHARDS) for index in ranks_shards]
        for shard in ddp.shards_of(iter(named) if way == AT_END else named):
            with ddp.shard(shard):
                ddp(batch).square().mean().backward()

    def step() -> None:
        nonlocal number
        number += 1
        optimizer.zero_grad(set_to_none=True)
        by_shards() if kind == "shards" else accumulate()
        optimizer.step()

    return step


def time_blocks(
    meeting: Meeting, name: str, rounds: int, ways: Sequence[str], hosts: Sequence[Host]
) -> list[list[Block]]:
    """One rank's blocks, by round and then in the order of ``ways``."""
    torch.set_num_threads(1)
    if hosts:
        hosts[meeting.rank].enter()
    with ExitStack() as opened:
        made = {way: make_step(name, way, meeting, opened) for way in ways}
        barrier = opened.enter_context(meeting.new_group("gloo" if hosts else "shm")).barrier
        return steps.take_turns(made, rounds, barrier)


def weigh(meeting: Meeting, name: str, way: str) -> float:
    """Bytes this rank's memory grew by at most, with shared pages in proportion."""
    torch.set_num_threads(1)
    steps._meet(meeting, "start")
    before = steps._memory("status")["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, here
    with ExitStack() as opened:
        step = make_step(name, way, meeting, opened)
        for _ in range(steps.STEPS_PER_BLOCK):
            step()
        steps._meet(meeting, "stepped")  # all ranks have mapped all they will
        end, shares = steps._memory("status"), steps._memory("smaps_rollup")
        steps._meet(meeting, "weighed")
    return end["VmHWM"] - before - (end["RssShmem"] - shares["Pss_Shmem"])


# -- drift, in the ranks ----------------------------------------------------------------------

TORCH, OURS = "torch DDP, gloo", f"paceline, shards={SHARDS}"
SEQUENCES = 8  # of a step, on all ranks together


@dataclass(frozen=True)
class Course:
    """All weights as one vector after some of the steps, and the last loss of this rank."""

    weights: list[Tensor]
    loss: float


def learn(meeting: Meeting, way: str, looks: Sequence[int]) -> Course:
    """Train, and look at the weights after these numbers of steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CharGPT()
    with ExitStack() as opened:
        passes = _torch_passes if way == TORCH else _shard_passes
        one_step = passes(meeting, model, opened)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        seen = []
        for number in range(1, max(looks) + 1):
            optimizer.zero_grad()
            loss = one_step()
            optimizer.step()
            if number in looks:
                seen.append(weights_of(model))
        steps._meet(meeting, "learned")
    return Course(seen, float(loss.detach()))


def weights_of(model: nn.Module) -> Tensor:
    """All weights that matter, as one vector.

    Attention does not feel the bias of its keys: its gradient is nothing but rounding, of which
    AdamW makes steps of full size. It is left out, so that a distance is one of what was learned.
    """
    found = []
    for name, param in model.named_parameters():
        parts = [param.detach()]
        if name.endswith("qkv.bias"):
            queries, _keys, values = parts[0].chunk(3)
            parts = [queries, values]
        found += [part.flatten() for part in parts]
    return torch.cat(found)


def _torch_passes(meeting: Meeting, model: nn.Module, opened: ExitStack) -> Callable[[], Tensor]:
    dist.init_process_group("gloo")
    opened.callback(dist.destroy_process_group)
    ddp = TorchDDP(model)
    size = SEQUENCES // meeting.size
    source = batches(meeting.rank, meeting.size, batch_size=size)

    def one_step() -> Tensor:
        loss = loss_of(ddp, next(source))
        loss.backward()
        return loss

    return one_step


def _shard_passes(meeting: Meeting, model: nn.Module, opened: ExitStack) -> Callable[[], Tensor]:
    group = opened.enter_context(meeting.new_group("shm"))
    ddp: Any = paceline.DistributedDataParallel(model, process_group=group, shards=SHARDS)
    own = share_out(SHARDS, meeting.size, meeting.rank)
    sources = {index: batches(index, SHARDS, batch_size=SEQUENCES // SHARDS) for index in own}
    number = 0

    def one_step() -> Tensor:
        nonlocal number
        number += 1
        loss = torch.zeros(())
        for shard in ddp.shards_of(Shard(0, number, index, SHARDS) for index in own):
            with ddp.shard(shard):
                loss = loss_of(ddp, next(sources[shard.index]))
                loss.backward()
        return loss

    return one_step


# -- in the process that starts them ----------------------------------------------------------

TIME_HEAD = (
    "| model | ranks | way | step | CPU per step | over accumulation | aim |\n"
    "|---|--:|---|--:|--:|--:|--:|"
)
MEMORY_HEAD = (
    "| model | ranks | way | peak memory of a rank | over accumulation | one gradient |\n"
    "|---|--:|---|--:|--:|--:|"
)
DRIFT_HEAD = (
    "| way | ranks | steps | distance of the weights from one rank's | largest difference |\n"
    "|---|--:|--:|--:|--:|"
)


def time_lines(
    name: str, ranks: int, rounds: int, ways: Sequence[str] = WAYS, hosts: Sequence[Host] = ()
) -> list[str]:
    by_rank = spawn_ranks(ranks, time_blocks, name, rounds, ways, hosts, deadline=DEADLINE)
    times, lines = {}, []
    for index, way in enumerate(ways):
        blocks = [[rank[number][index] for rank in by_rank] for number in range(rounds)]
        walls, cpus = (list(map(f, blocks)) for f in (steps._wall, steps._cpu))
        times[way] = Times(walls, cpus)
        ratio = times[way].over(times[_plain(way)]) if way.startswith("shards") else None
        wall, cpu = (f"{digits(1e3 * statistics.median(t))} ms" for t in (walls, cpus))
        aim = ratio.against(AIMS[way]) if ratio and way in AIMS else ""
        title = MODELS[name].title if index == 0 else ""
        lines.append(row(title, ranks if index == 0 else "", way, wall, cpu, ratio or "", aim))
    return lines


def wire_lines(name: str, link: Link, rounds: int) -> list[str]:
    """As :func:`time_lines`, of two ranks with a cable between them."""
    with lay_cable(link) as cable:
        lines = time_lines(name, 2, rounds, WIRE_WAYS, cable.hosts)
    told = cable.told
    lost = f"{told['lost']:.0f} of {told['frames']:.0f} frames were lost"
    return [*lines, f"\nOver {link}; {lost} on the cable, whose relay took {told['cpu']:.1f} s."]


def memory_lines(name: str, ranks: int) -> list[str]:
    found: dict[str, float] = {}
    lines = []
    gradient = 4 * sum(p.numel() for p in MODELS[name].make()[0].parameters())
    for way in WAYS:
        found[way] = statistics.mean(spawn_ranks(ranks, weigh, name, way, deadline=DEADLINE))
        more = found[way] - found[_plain(way)]
        told = [show_mib(more), f"{show_mib(gradient)}, {'met' if more <= gradient else 'missed'}"]
        first = [MODELS[name].title, ranks] if way == WAYS[0] else ["", ""]
        lines.append(row(*first, way, show_mib(found[way]), *(told if way in AIMS else ["", ""])))
    return lines


def _plain(way: str) -> str:
    return way.removesuffix(", at the end").replace("shards", "accumulation")


def drift(sizes: Sequence[int], looks: Sequence[int], log: Log) -> list[Curve]:
    """How far the weights of several ranks are from those of one, by way and number of ranks."""
    curves = []
    for way in (TORCH, OURS):
        courses = {n: spawn_ranks(n, learn, way, looks, deadline=DEADLINE)[0] for n in (1, *sizes)}
        alone = courses[1].weights
        for size in sizes:
            pairs = list(zip(courses[size].weights, alone, strict=True))
            apart = [float((one - other).norm() / other.norm()) for one, other in pairs]
            largest = float((pairs[-1][0] - pairs[-1][1]).abs().max())
            curves.append(Curve(f"{way}, {size} ranks", list(looks), apart))
            log(row(way, size, looks[-1], _show(apart[-1]), _show(largest)))
    return curves


def _show(number: float) -> str:
    return f"{number:.1e}" if number else "0, the same bits"


def looks_until(last: int) -> list[int]:
    """Steps after which to look: 1, 2, 5, 10, 20, 50… and the last."""
    found = [base * 10**power for power in range(6) for base in (1, 2, 5)]
    return [*(step for step in found if step < last), last]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Steps of shards, and what happens without them.")
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}; without wide, if not given")
    parser.add_argument("--link", type=float, help="Mbit/s of a cable between two ranks")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, help="blocks of each way (8)")
    parser.add_argument("--steps", type=int, help="that the char GPT learns (500)")
    parser.add_argument("--quick", action="store_true", help="3 rounds, 100 steps, two models")
    parser.add_argument("--save", type=Path, help="write the result here")
    parser.add_argument("--picture", type=Path, help="draw the drift here, as SVG")
    parser.add_argument("--note", default="", help="said of the machine in the result")
    for part in ("time", "memory", "drift"):
        parser.add_argument(f"--{part}", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    usual = "wide" if args.link else "gpt,mlp" if args.quick else "gpt,transformer,mlp"
    args.models = (args.models or usual).split(",")
    if args.link and (why := unable()):
        parser.error(f"--link: {why}")
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: not among {list(MODELS)}")
    args.ranks = [int(number) for number in args.ranks.split(",")]
    args.rounds = args.rounds or (3 if args.quick else 8)
    args.steps = args.steps or (100 if args.quick else 500)
    return args


def main() -> int:
    args = read_arguments()
    log = Log()
    log(describe_machine())
    block = f"{args.rounds} rounds of {steps.STEPS_PER_BLOCK} steps of {SHARDS} passes"
    log(f"Ranks of one thread, {block}.{' ' if args.note else ''}{args.note}")
    if args.link:
        args.time = args.memory = args.drift = False
        log(f"\n{TIME_HEAD}")
        for name in args.models:
            log("\n".join(wire_lines(name, Link(args.link, DELAY), args.rounds)))
    if args.time:
        log(f"\n{TIME_HEAD}")
        for name in args.models:
            for ranks in args.ranks:
                log("\n".join(time_lines(name, ranks, args.rounds)))
    if args.memory:
        log(f"\n{MEMORY_HEAD}")
        for name in [name for name in args.models if name != "gpt"]:  # whose gradient is 0.5 MiB
            log("\n".join(memory_lines(name, args.ranks[0])))
    if args.drift:
        log(f"\n{DRIFT_HEAD}")
        curves = drift(args.ranks, looks_until(args.steps), log)
        if args.picture is not None:
            args.picture.write_text(draw(curves))
    if args.save is not None:
        args.save.write_text("\n".join(log.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
