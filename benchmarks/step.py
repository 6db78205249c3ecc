"""What does a training step cost over the same step without communication?

    python benchmarks/step.py --save results.md      about ten minutes
    python benchmarks/step.py --quick                two minutes, and rougher
    python benchmarks/step.py --only mlp --rounds 40

**Time.** In the same two processes, one thread each, five ways take turns in blocks of five steps;
every round begins with another: the plain model (local), torch's DistributedDataParallel over gloo,
the same with ``gradient_as_bucket_view``, paceline's over shm, and paceline's over gloo. Each has a
copy of the model and a group of its own; a barrier comes before each block. A step is zero_grad,
forward, backward and plain SGD, always on the same batch. Its time is that of the slower rank; a
block counts by its median step. Ratios are of blocks of the same round, so that what the machine
does in a minute does not matter: their median, and in brackets the quartiles. CPU time is that of
all threads of all ranks for one step; a rank that waits busily pays for it there.

**Memory.** Every way in fresh processes: by how much the resident memory of a rank has grown at its
highest since before the model was made, over construction and five steps, on average over ranks.
Resident memory counts a page once for every process that maps it. paceline's buckets over shm are
mapped by all ranks, so a rank's peak also holds the buckets of the others; that memory exists only
once. So a page that n processes map counts here as 1/n for each (the kernel's proportional size,
for shared memory only), and the sum over ranks is what the machine has to have. Both figures are
printed. Memory that torch holds back after freeing counts, as it does for the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from report import Log, describe_machine, digits, row, show_mib
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.testing import Meeting, spawn_ranks

DEADLINE = 1800.0  # seconds for the ranks of one model
STEPS_PER_BLOCK = 5
WARM_UP = 3  # steps: torch and paceline lay out their buckets anew after the first

LOCAL, TORCH, TORCH_VIEWS = "local", "torch, gloo", "torch, gloo, views"
SHM, GLOO = "paceline, shm", "paceline, gloo"


# -- the models -------------------------------------------------------------------------------


def make_mlp() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(32, 1024)


def make_transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return model, torch.randn(4, 64, 384)


def make_conv() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2)):
        layers.append(nn.Conv2d(before, after, 3, stride, padding=1, bias=False))
        layers += [nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(32, 3, 32, 32)


def make_small_layers() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.ReLU())]
    for layer in layers[::2]:  # else gradients shrink to denormal numbers, which some CPUs dread
        nn.init.kaiming_normal_(layer.get_parameter("weight"), nonlinearity="relu")
    return nn.Sequential(*layers), torch.randn(32, 64)


@dataclass(frozen=True)
class Model:
    title: str
    make: Callable[[], tuple[nn.Module, Tensor]]
    aim: float  # paceline's step over shm, as a multiple of the local one
    weigh: bool = False  # whether its memory is measured


MODELS = {
    "mlp": Model("MLP, 8 x Linear(1024), batch 32", make_mlp, 1.05, weigh=True),
    "transformer": Model(
        "Transformer, 6 layers of 384, 4 x 64 tokens", make_transformer, 1.03, weigh=True
    ),
    "conv": Model("Conv net with BatchNorm, batch 32 of 3x32x32", make_conv, 1.02),
    "small": Model("100 x Linear(64), 200 small parameters", make_small_layers, 1.06),
}
GLOO_AIM = 1.03  # paceline's step over gloo, as a multiple of torch's


# -- in the ranks -----------------------------------------------------------------------------


def wrap(way: str, model: nn.Module, meeting: Meeting, opened: ExitStack) -> nn.Module:
    """Wrap a model in one of the ways, on a group of its own, which ``opened`` ends."""
    if way == LOCAL:
        return model
    if way in (TORCH, TORCH_VIEWS):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            opened.callback(dist.destroy_process_group)
        return DistributedDataParallel(
            model, process_group=dist.new_group(), gradient_as_bucket_view=way == TORCH_VIEWS
        )
    group = opened.enter_context(meeting.new_group("shm" if way == SHM else "gloo"))
    return paceline.DistributedDataParallel(model, process_group=group)


def make_step(name: str, way: str, meeting: Meeting, opened: ExitStack) -> Callable[[], None]:
    torch.manual_seed(0)
    model, batch = MODELS[name].make()
    model = wrap(way, model, meeting, opened)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch += 0.01 * meeting.rank  # ranks differ, or there would be nothing to average

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
        optimizer.step()

    return step


@dataclass(frozen=True)
class Block:
    """Some steps in a row on one rank: seconds of each, and CPU seconds of all together."""

    steps: list[float]
    cpu: float


def time_blocks(meeting: Meeting, name: str, ways: Sequence[str], rounds: int) -> list[list[Block]]:
    """One rank's blocks, by round and then in the order of ``ways``."""
    torch.set_num_threads(1)
    with ExitStack() as opened:
        steps = {way: make_step(name, way, meeting, opened) for way in ways}
        barrier = opened.enter_context(meeting.new_group("shm")).barrier
        return take_turns(steps, rounds, barrier)


def take_turns(
    steps: Mapping[str, Callable[[], None]], rounds: int, barrier: Callable[[], object]
) -> list[list[Block]]:
    """Warm the steps up, then time blocks of them: by round, and in the order of ``steps``."""
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    ways, taken = list(steps), []
    for number in range(rounds):
        turn, blocks = number % len(ways), {}
        for way in ways[turn:] + ways[:turn]:
            barrier()
            blocks[way] = _time_block(steps[way])
        taken.append([blocks[way] for way in ways])
    barrier()  # nobody leaves a group that another still uses
    return taken


def _time_block(step: Callable[[], None]) -> Block:
    marks, cpu = [time.perf_counter()], time.process_time()
    for _ in range(STEPS_PER_BLOCK):
        step()
        marks.append(time.perf_counter())
    cpu = time.process_time() - cpu
    return Block([end - start for start, end in itertools.pairwise(marks)], cpu)


def weigh_steps(meeting: Meeting, name: str, way: str) -> tuple[int, int]:
    """Bytes this rank's memory grew by at most: resident, and with shared pages in proportion."""
    torch.set_num_threads(1)
    _meet(meeting, "start")
    before = _memory("status")["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, here
    with ExitStack() as opened:
        step = make_step(name, way, meeting, opened)
        for _ in range(STEPS_PER_BLOCK):
            step()
        _meet(meeting, "stepped")  # all ranks have mapped all they will
        end, shares = _memory("status"), _memory("smaps_rollup")
        _meet(meeting, "weighed")
    peak = end["VmHWM"] - before
    return peak, peak - (end["RssShmem"] - shares["Pss_Shmem"])


def _memory(file: str) -> dict[str, int]:
    """Bytes by name, from one of this process's files in /proc."""
    lines = Path("/proc/self", file).read_text().splitlines()
    parts = [line.split() for line in lines]
    return {part[0].rstrip(":"): int(part[1]) << 10 for part in parts if part[-1] == "kB"}


def _meet(meeting: Meeting, place: str) -> None:
    """Wait for all ranks without a group, whose memory would count."""
    store = meeting.store()
    store.set(f"{place}/{meeting.rank}", "here")
    store.wait([f"{place}/{rank}" for rank in range(meeting.size)])


# -- in the process that starts them ----------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """What one way took on one model: seconds of a step in each round, wall and CPU."""

    wall: list[float]
    cpu: list[float]

    def over(self, other: Times) -> Ratio:
        return Ratio.of([a / b for a, b in zip(self.wall, other.wall, strict=True)])


@dataclass(frozen=True)
class Ratio:
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        if len(ratios) == 1:
            return cls(ratios[0], ratios[0], ratios[0])
        return cls(*statistics.quantiles(ratios, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.2f}-{self.high:.2f})"

    def against(self, aim: float) -> str:
        return f"{aim:.2f}, {'met' if round(self.median, 2) <= aim else 'missed'}"


def measure_times(name: str, ways: Sequence[str], ranks: int, rounds: int) -> dict[str, Times]:
    by_rank = spawn_ranks(ranks, time_blocks, name, ways, rounds, deadline=DEADLINE)
    times = {}
    for index, way in enumerate(ways):
        blocks = [[rank[number][index] for rank in by_rank] for number in range(rounds)]
        times[way] = Times([_wall(block) for block in blocks], [_cpu(block) for block in blocks])
    return times


def _wall(block: Sequence[Block]) -> float:
    """Give the median step of a block; a step takes as long as on its slowest rank."""
    steps = zip(*(rank.steps for rank in block), strict=True)
    return statistics.median(max(step) for step in steps)


def _cpu(block: Sequence[Block]) -> float:
    return sum(rank.cpu for rank in block) / STEPS_PER_BLOCK


def measure_memory(name: str, ways: Sequence[str], ranks: int) -> dict[str, tuple[float, float]]:
    """Bytes by way: resident and proportional, on average over ranks."""
    found = {}
    for way in ways:
        by_rank = spawn_ranks(ranks, weigh_steps, name, way, deadline=DEADLINE)
        resident, proportional = (statistics.mean(sizes) for sizes in zip(*by_rank, strict=True))
        found[way] = resident, proportional
    return found


# -- the run ----------------------------------------------------------------------------------

TIME_HEAD = (
    "| model | way | step | CPU per step | step / local | aim | step / torch, gloo | aim |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|"
)
MEMORY_HEAD = (
    "| model | way | peak memory of a rank | over local | resident | over torch's with views |\n"
    "|---|---|--:|--:|--:|--:|"
)


def time_lines(name: str, times: dict[str, Times]) -> list[str]:
    lines = []
    for way, own in times.items():
        over_local = own.over(times[LOCAL]) if LOCAL in times and way != LOCAL else None
        over_torch = own.over(times[TORCH]) if TORCH in times and way in (SHM, GLOO) else None
        wall = f"{digits(1e3 * statistics.median(own.wall))} ms"
        cpu = f"{digits(1e3 * statistics.median(own.cpu))} ms"
        aims = [
            over_local.against(MODELS[name].aim) if over_local and way == SHM else "",
            over_torch.against(1.0 if way == SHM else GLOO_AIM) if over_torch else "",
        ]
        title = MODELS[name].title if way == next(iter(times)) else ""
        lines.append(
            row(title, way, wall, cpu, over_local or "", aims[0], over_torch or "", aims[1])
        )
    return lines


def memory_lines(name: str, memory: dict[str, tuple[float, float]]) -> list[str]:
    lines = []
    for way, (resident, own) in memory.items():
        over_local = show_mib(own - memory[LOCAL][1]) if LOCAL in memory and way != LOCAL else ""
        aim = ""
        if way in (SHM, GLOO) and TORCH_VIEWS in memory:
            beyond = own - memory[TORCH_VIEWS][1]
            # Two runs of the same differ by about as much: what the allocator keeps.
            aim = f"{show_mib(beyond)}, {'met' if beyond < 1 << 20 else 'missed'}"
        title = MODELS[name].title if way == next(iter(memory)) else ""
        lines.append(row(title, way, show_mib(own), over_local, show_mib(resident), aim))
    return lines


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step with and without communication.")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--only", choices=MODELS, help="one of them")
    parser.add_argument("--ways", help="as in 'local;paceline, shm'; all, if not given")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="blocks of each way (20)")
    parser.add_argument("--quick", action="store_true", help="a rough picture, from 4 rounds")
    parser.add_argument("--save", type=Path, help="write the result here; every block, if .json")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--time", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    args.models = [args.only] if args.only else args.models.split(",")
    every = [LOCAL, TORCH, TORCH_VIEWS, SHM, GLOO]
    args.ways = args.ways.split(";") if args.ways else every
    for given, known in ((args.models, list(MODELS)), (args.ways, every)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not among {known}")
    args.rounds = args.rounds or (4 if args.quick else 20)
    return args


def main() -> int:
    args = read_arguments()
    log = Log()
    log(describe_machine())
    log(f"{args.ranks} ranks of one thread, {args.rounds} rounds of {STEPS_PER_BLOCK} steps.")
    times: dict[str, dict[str, Times]] = {}
    memory: dict[str, dict[str, tuple[float, float]]] = {}
    if args.time:
        log(f"\n{TIME_HEAD}")
        for name in args.models:
            times[name] = measure_times(name, args.ways, args.ranks, args.rounds)
            log("\n".join(time_lines(name, times[name])))
    weighed = [name for name in args.models if MODELS[name].weigh] if args.memory else []
    if weighed:
        log(f"\n{MEMORY_HEAD}")
        for name in weighed:
            memory[name] = measure_memory(name, args.ways, args.ranks)
            log("\n".join(memory_lines(name, memory[name])))
    if args.save is not None:
        args.save.write_text(_to_save(args, log, times, memory))
    return 0


def _to_save(
    args: argparse.Namespace,
    log: Log,
    times: dict[str, dict[str, Times]],
    memory: dict[str, dict[str, tuple[float, float]]],
) -> str:
    if args.save.suffix != ".json":
        return "\n".join(log.lines) + "\n"
    seconds = {
        name: {way: asdict(own) for way, own in by_way.items()} for name, by_way in times.items()
    }
    everything = {
        "machine": log.lines[0],
        "ranks": args.ranks,
        "steps_per_block": STEPS_PER_BLOCK,
        "seconds": seconds,
        "memory": memory,
    }
    return json.dumps(everything)


if __name__ == "__main__":
    sys.exit(main())
