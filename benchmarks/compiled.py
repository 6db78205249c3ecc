"""Is a training step faster as one compiled graph, with the averages inside?

    python benchmarks/compiled.py --save results.md          CPU, two ranks, about fifteen minutes
    python benchmarks/compiled.py --quick --only mlp          a rough picture
    python benchmarks/compiled.py --device cuda               one rank over NCCL, GPT-2 (124M)
    python benchmarks/compiled.py --device cuda --ranks 2 --loads "8x1024;2x256"

**CPU.** In the same two processes, one thread each, all ways take turns in blocks of five steps;
every round begins with another. torch's ways are over gloo, paceline's over shm:

- torch's DistributedDataParallel, eager, and compiled in each of its three modes
  (``torch._dynamo.config.optimize_ddp``: ``ddp_optimizer``, ``python_reducer``,
  ``no_optimization``);
- paceline's wrapper, eager; ``torch.compile`` of it; and ``paceline.compiled.train_step``;
- the compiled model without any wrapper, which averages nothing: what a step costs at least.

A step is zero_grad, forward, backward and plain SGD, always on the same batch. Its time is that of
the slower rank; a block counts by its median step. Ratios are of blocks of the same round, so that
what the machine does in a minute does not matter: their median, and in brackets the quartiles. The
first steps, in which everything is compiled, are not counted. torch's best way is the one with the
lowest median.

**CUDA.** GPT-2 in bfloat16 autocast with fused AdamW; a block is timed between two
synchronisations, on the slower rank. On one rank there is nobody to wait for: what is left is what
a wrapper costs. Several ranks each take a GPU, or share it (see ``step_gpu.py``). More ways take
part:

- the eager model without a wrapper, and torch's compiled ones with ``mode="reduce-overhead"``;
- ``train_step(..., graph=True)``;
- the limit: the compiled step without a wrapper, captured whole in one CUDA graph.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import compiled_gpu
import step as steps
import step_gpu
import torch
import torch.distributed as dist
from compiled_ways import (
    ALONE,
    GPU_WAYS,
    GRAPHED,
    LIMIT,
    STEP,
    TORCH,
    WAYS,
    Step,
    make_step,
    mode_of,
    wrap,
)
from report import Log, describe_machine, digits, row
from step import MODELS, Ratio, Times
from torch import Tensor, nn

from paceline.testing import Meeting, spawn_ranks

DEADLINE = 3600.0  # seconds for the ranks of one model
WARM_UP = 4
AIM = 0.80  # train_step's time over that of torch's best way, on CPU
GPU_AIM = 1.01  # over that of the compiled model without a wrapper, on CUDA
GRAPH_AIM = 1.10  # of a step in one graph over the limit


# -- on CPU, in the ranks ---------------------------------------------------------------------


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def time_blocks(
    meeting: Meeting, name: str, ways: Sequence[str], rounds: int
) -> list[list[steps.Block]]:
    """One rank's blocks, by round and then in the order of ``ways``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with ExitStack() as opened:
        opened.callback(dist.destroy_process_group)
        made = {way: _cpu_step(way, name, meeting, opened) for way in ways}
        barrier = opened.enter_context(meeting.new_group("shm")).barrier
        for way, step in made.items():
            with mode_of(way):
                for _ in range(WARM_UP):
                    step()
            barrier()
        taken = []
        for number in range(rounds):
            turn = number % len(ways)
            blocks = {}
            for way in (*ways[turn:], *ways[:turn]):
                with mode_of(way):
                    barrier()
                    blocks[way] = steps._time_block(made[way])
            taken.append([blocks[way] for way in ways])
        barrier()  # nobody leaves a group that another still uses
    return taken


def _cpu_step(way: str, name: str, meeting: Meeting, opened: ExitStack) -> Step:
    torch.manual_seed(0)
    model, batch = MODELS[name].make()
    model = wrap(way, model, lambda: opened.enter_context(meeting.new_group("shm")))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return make_step(way, model, optimizer, square, [batch + 0.01 * meeting.rank])


def measure(name: str, ways: Sequence[str], ranks: int, rounds: int) -> dict[str, Times]:
    by_rank = spawn_ranks(ranks, time_blocks, name, ways, rounds, deadline=DEADLINE)
    times = {}
    for index, way in enumerate(ways):
        blocks = [[rank[number][index] for rank in by_rank] for number in range(rounds)]
        wall, cpu = [steps._wall(b) for b in blocks], [steps._cpu(b) for b in blocks]
        times[way] = Times(wall, cpu)
    return times


# -- the run ----------------------------------------------------------------------------------

HEAD = (
    "| {what} | way | step | CPU per step | step / compiled, no wrapper | step / torch's best "
    "| aim |\n|---|---|--:|--:|--:|--:|--:|"
)


def lines_of(title: object, times: dict[str, Times], *, gpu: bool) -> list[str]:
    lines = []
    torchs = [way for way in TORCH if way in times]
    best = min(torchs, key=lambda way: statistics.median(times[way].wall), default=None)
    for way, own in times.items():
        alone = own.over(times[ALONE]) if ALONE in times and way != ALONE else None
        over = own.over(times[best]) if best is not None and way not in torchs else None
        limit = own.over(times[LIMIT]) if LIMIT in times else None
        aim = "torch's best" if way == best else ""
        if way == STEP:
            aim = _aim(alone, over, gpu=gpu)
        elif way == GRAPHED and limit is not None:
            aim = f"{limit.against(GRAPH_AIM)} over one graph without a wrapper"
        wall, cpu = (f"{digits(1e3 * statistics.median(t))} ms" for t in (own.wall, own.cpu))
        first = title if way == next(iter(times)) else ""
        lines.append(row(first, way, wall, cpu, alone or "", over or "", aim))
    return lines


def _aim(alone: Ratio | None, over: Ratio | None, *, gpu: bool) -> str:
    if not gpu:
        return over.against(AIM) if over else ""
    texts = [f"{alone.against(GPU_AIM)} over no wrapper"] if alone else []
    return "; ".join([*texts, f"{over.against(1.0)} over torch's best"] if over else texts)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step as one compiled graph.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", default="mlp,transformer,conv", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--only", choices=MODELS, help="one of them")
    parser.add_argument("--ways", help="as in 'torch DDP;paceline train_step'; all, if not given")
    parser.add_argument("--ranks", type=int, help="processes (2; with --device cuda 1)")
    parser.add_argument("--loads", help="with --device cuda: batches, as in '16x1024;2x256'")
    parser.add_argument("--small", action="store_true", help="the GPU's ways on a toy, on the CPU")
    parser.add_argument("--rounds", type=int, help="blocks of each way, 2 or more (20)")
    parser.add_argument("--quick", action="store_true", help="a rough picture, from 5 rounds")
    parser.add_argument("--save", type=Path, help="write the result here")
    args = parser.parse_args()
    args.models = [args.only] if args.only else args.models.split(",")
    on_gpu = args.device == "cuda"
    known_ways = GPU_WAYS if on_gpu else WAYS
    here = compiled_gpu.ways_here("cpu" if args.small else "cuda") if on_gpu else list(WAYS)
    args.ways = args.ways.split(";") if args.ways else here
    args.ranks = args.ranks or (1 if on_gpu else 2)
    for given, known in ((args.models, list(MODELS)), (args.ways, list(known_ways))):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not among {known}")
    args.rounds = max(2, args.rounds or (5 if args.quick else 20))
    return args


def run_cpu(args: argparse.Namespace, log: Log) -> None:
    log(f"{args.ranks} ranks of one thread, {args.rounds} rounds of {steps.STEPS_PER_BLOCK} steps.")
    log(f"\n{HEAD.format(what='model')}")
    for name in args.models:
        times = measure(name, args.ways, args.ranks, args.rounds)
        log("\n".join(lines_of(MODELS[name].title, times, gpu=False)))


def run_gpu(args: argparse.Namespace, log: Log) -> None:
    setting = step_gpu.SMALL if args.small else step_gpu.ON_GPU
    loads = compiled_gpu.loads_of(args.loads) if args.loads else setting.loads
    gpu = "none" if args.small else torch.cuda.get_device_name()
    log(f"GPU: {gpu}. {step_gpu.describe(setting, args.ranks, args.rounds)}")
    log(f"\n{HEAD.format(what='tokens')}")
    for load in loads:
        times = compiled_gpu.measure_gpu(setting, load, args.ways, args.ranks, args.rounds)
        log("\n".join(lines_of(load, times, gpu=True)))


def main() -> int:
    args = read_arguments()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # ranks share the cores
    log = Log()
    log(describe_machine())
    (run_gpu if args.device == "cuda" else run_cpu)(args, log)
    if args.save is not None:
        args.save.write_text("\n".join(log.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
