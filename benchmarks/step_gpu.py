"""What does DistributedDataParallel add to a training step of GPT-2 on a GPU?

    python benchmarks/step_gpu.py --save results.md      about six minutes
    python benchmarks/step_gpu.py --ranks 2              the same on two ranks
    python benchmarks/step_gpu.py --small                a toy on the CPU, float32, over gloo

GPT-2 of 124 million parameters, bfloat16 autocast, fused AdamW, over NCCL. On one rank there is
nobody to wait for: what is left is what the wrapper itself costs. At 16 x 1024 tokens the GPU is
busy and the copies show; at 2 x 256 it waits for Python to launch kernels, and every hook shows.

Several ranks each take a GPU; where there are fewer GPUs, they share them, which NCCL allows from
2.30 on with ``NCCL_MULTI_RANK_GPU_ENABLE=1``. The times mean something only if the ranks really run
at once: start NVIDIA's MPS before (``nvidia-cuda-mps-control -d``). Without it they take turns.

The ways take turns in blocks in the same processes, each with a model and an optimizer of its own;
every round begins with another: the plain model, torch's wrapper, the same with
``gradient_as_bucket_view``, paceline's, and, on one rank, paceline's with
``PACELINE_SKIP_ALONE=0``, which keeps the collectives that a group of one does not need. torch's
wrapper always has them.

A block's time is the wall time between two synchronisations of the GPU, by the number of its steps,
on the slower rank. Ratios are of blocks of the same round: their median, and in brackets the
quartiles. CPU time is that of all threads of a rank, for one step, on average over the ranks.

**Memory**, before that: each way alone, the most that torch's allocator has handed out by the end
of some steps, of the rank that has most. What NCCL takes for itself is not in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Log, describe_machine, digits, row, show_mib
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.testing import Meeting, spawn_ranks

PLAIN, TORCH, TORCH_VIEWS = "plain", "torch", "torch, views"
PACELINE, KEPT = "paceline", "paceline (collectives kept)"
WAYS = (PLAIN, TORCH, TORCH_VIEWS, PACELINE)
WARM_UP = 5  # steps
DEADLINE = 1800.0  # seconds for everything


# -- the model --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 50304  # GPT-2's 50257, rounded up to a multiple of 64


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each added to its normalised input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, width = config.heads, config.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    def attend(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3 * self.heads, -1).transpose(1, 2).chunk(3, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mix(mixed.transpose(1, 2).reshape(batch, tokens, width))


class GPT2(nn.Module):
    """Gives the loss of predicting ``targets`` from ``tokens``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight  # tied, as in GPT-2

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# -- the ways ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A batch's shape, and how many steps make a block."""

    batch: int
    tokens: int
    steps: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens} tokens"


@dataclass(frozen=True)
class Setting:
    device: str
    config: Config
    loads: Sequence[Load]

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"


ON_GPU = Setting("cuda", Config(), (Load(16, 1024, 5), Load(2, 256, 20)))
SMALL = Setting("cpu", Config(2, 4, 64, 64, 256), (Load(4, 64, 3), Load(1, 16, 5)))

Trained = tuple[nn.Module, torch.optim.Optimizer]


def build(way: str, setting: Setting) -> Trained:
    torch.manual_seed(0)
    model = _wrap(way, GPT2(setting.config).to(setting.device))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _wrap(way: str, model: nn.Module) -> nn.Module:
    if way == PLAIN:
        return model
    if way in (TORCH, TORCH_VIEWS):
        views = way == TORCH_VIEWS
        return DistributedDataParallel(
            model, process_group=dist.new_group(), gradient_as_bucket_view=views
        )
    with _environment("PACELINE_SKIP_ALONE", "0" if way == KEPT else "1"):
        return paceline.DistributedDataParallel(model, process_group=dist.new_group())


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def make_step(trained: Trained, load: Load, setting: Setting) -> Callable[[], None]:
    model, optimizer = trained
    torch.manual_seed(1)
    shape = (2, load.batch, load.tokens)
    tokens, targets = torch.randint(setting.config.vocabulary, shape, device=setting.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=setting.device == "cuda"):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()

    return step


# -- taking turns, in the ranks -----------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Seconds of a step in each round, wall and CPU."""

    wall: list[float]
    cpu: list[float]

    def over(self, other: Times) -> list[float]:
        return [a / b for a, b in zip(self.wall, other.wall, strict=True)]


def measure(
    trained: dict[str, Trained], load: Load, setting: Setting, rounds: int
) -> dict[str, Times]:
    steps = {way: make_step(own, load, setting) for way, own in trained.items()}
    times = {way: Times([], []) for way in steps}
    ways = list(steps)
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    for number in range(rounds):
        turn = number % len(ways)
        for way in ways[turn:] + ways[:turn]:
            wall, cpu = _time_block(steps[way], load.steps, setting.device)
            times[way].wall.append(wall)
            times[way].cpu.append(cpu)
    return times


def _time_block(step: Callable[[], None], steps: int, device: str) -> tuple[float, float]:
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    step()  # the first after another model finds the caches cold
    wait()
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps


def weigh(way: str, load: Load, setting: Setting) -> int:
    """Bytes of the GPU that model, optimizer, gradients and steps take at most; 0 on the CPU."""
    if setting.device != "cuda":
        return 0
    gc.collect()  # the way before
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = make_step(build(way, setting), load, setting)
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class Found:
    """What a rank has seen of one load, by way."""

    times: dict[str, Times]
    memory: dict[str, int]


def run_rank(meeting: Meeting, setting: Setting, rounds: int) -> list[Found]:
    """Measure every load on this rank."""
    if setting.device == "cuda":
        torch.cuda.set_device(meeting.rank % torch.cuda.device_count())
    dist.init_process_group(setting.backend)
    ways = WAYS if meeting.size > 1 else (*WAYS, KEPT)
    memory = [{way: weigh(way, load, setting) for way in WAYS} for load in setting.loads]
    gc.collect()
    trained = {way: build(way, setting) for way in ways}
    times = [measure(trained, load, setting, rounds) for load in setting.loads]
    dist.destroy_process_group()
    return [Found(*found) for found in zip(times, memory, strict=True)]


def slowest(by_rank: Sequence[dict[str, Times]]) -> dict[str, Times]:
    """Join what the ranks saw: the longer wall time of each block, the average CPU time."""
    found = {}
    for way in by_rank[0]:
        wall = [max(block) for block in zip(*(own[way].wall for own in by_rank), strict=True)]
        cpu = zip(*(own[way].cpu for own in by_rank), strict=True)
        found[way] = Times(wall, [statistics.mean(block) for block in cpu])
    return found


# -- the run ----------------------------------------------------------------------------------

HEAD = "| tokens | way | step | CPU per step | step / plain | aim |\n|---|---|--:|--:|--:|--:|"


def lines_of(load: Load, times: dict[str, Times]) -> list[str]:
    lines = []
    for way, own in times.items():
        ratio, aim = "", ""
        if way != PLAIN:
            low, median, high = _quartiles(own.over(times[PLAIN]))
            ratio = f"{median:.4f} ({low:.3f}-{high:.3f})"
        if way == PACELINE:
            best = min(_quartiles(times[w].over(times[PLAIN]))[1] for w in (TORCH, TORCH_VIEWS))
            aim = f"{best:.4f} (torch's best), {'met' if median <= best else 'missed'}"
        wall, cpu = (f"{digits(1e3 * statistics.median(t))} ms" for t in (own.wall, own.cpu))
        lines.append(row(load if way == PLAIN else "", way, wall, cpu, ratio, aim))
    return lines


MEMORY_HEAD = "| tokens | way | peak memory of a rank | over plain | aim |\n|---|---|--:|--:|--:|"


def memory_lines(load: Load, memory: dict[str, int]) -> list[str]:
    lines = []
    best = min(memory[way] for way in (TORCH, TORCH_VIEWS))
    for way, own in memory.items():
        over = "" if way == PLAIN else show_mib(own - memory[PLAIN])
        aim = ""
        if way == PACELINE:
            aim = f"{show_mib(best)} (torch's best), {'met' if own <= best else 'missed'}"
        lines.append(row(load if way == PLAIN else "", way, show_mib(own), over, aim))
    return lines


def _quartiles(numbers: Sequence[float]) -> list[float]:
    return statistics.quantiles(numbers, n=4, method="inclusive")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What DistributedDataParallel adds to a step.")
    parser.add_argument("--ranks", type=int, default=1, help="processes, sharing GPUs if need be")
    parser.add_argument("--rounds", type=int, help="blocks of each way, 2 or more (30)")
    parser.add_argument("--quick", action="store_true", help="a rough picture, from 5 rounds")
    parser.add_argument("--small", action="store_true", help="a toy on the CPU, over gloo")
    parser.add_argument("--save", type=Path, help="write the result here; every block, if .json")
    args = parser.parse_args()
    args.rounds = max(2, args.rounds or (5 if args.quick or args.small else 30))
    return args


def describe(setting: Setting, ranks: int, rounds: int) -> str:
    with torch.device("meta"):
        size = sum(p.numel() for p in GPT2(setting.config).parameters()) / 1e6
    who = "one rank" if ranks == 1 else f"{ranks} ranks"
    return f"GPT-2, {size:.1f} million parameters, {who} over {setting.backend}, {rounds} rounds."


def main() -> None:
    args = read_arguments()
    setting = SMALL if args.small else ON_GPU
    log = Log()
    gpu = f" GPU: {torch.cuda.get_device_name()}." if setting.device == "cuda" else ""
    log(describe_machine() + gpu)
    log(describe(setting, args.ranks, args.rounds) + "\n")
    by_rank = spawn_ranks(args.ranks, run_rank, setting, args.rounds, deadline=DEADLINE)
    log(HEAD)
    seconds, memory = {}, {}
    for load, *seen in zip(setting.loads, *by_rank, strict=True):
        times = slowest([found.times for found in seen])
        seconds[str(load)] = {way: vars(own) for way, own in times.items()}
        memory[load] = {way: max(found.memory[way] for found in seen) for way in WAYS}
        log("\n".join(lines_of(load, times)))
    if setting.device == "cuda":
        log("\n" + MEMORY_HEAD)
        for load, own in memory.items():
            log("\n".join(memory_lines(load, own)))
    if args.save is not None:
        everything = {"machine": log.lines[0], "seconds": seconds}
        as_json = args.save.suffix == ".json"
        args.save.write_text(json.dumps(everything) if as_json else "\n".join(log.lines) + "\n")


if __name__ == "__main__":
    main()
