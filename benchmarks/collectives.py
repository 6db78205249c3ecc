"""Does the shared-memory group beat gloo on one host, at which sizes, and how near is it to what
the memory can do?

    python benchmarks/collectives.py --save results.md       about eight minutes
    python benchmarks/collectives.py --quick                 half a minute, and rougher

**All-reduce.** float32, sum, in five ways that take turns in the same processes: torch's gloo
group; the shm group on ordinary tensors; the same called as torch calls a group, with a list,
options and a Work that is waited for; the shm group on tensors from ``group.allocate``, which it
reduces where they lie; and, as the limit, every rank at once copying as many bytes from one tensor
to another, which is what an in-place all-reduce must read and write at least. A call's time runs
from when the first rank starts it to when the last one is done, the Python call included; a barrier
comes before each. Where mpirun and mpi4py are installed, OpenMPI has its turn after each size, in
processes of its own (``mpi_all_reduce.py``).

**Training step.** torch's DistributedDataParallel over gloo and over the shm group, next to the
same step without any communication; blocks of five steps take turns.

**Death.** How long it takes after a rank was killed until the others have their error, as a program
sees it: in ``group.allreduce([t]).wait()`` after half a second of waiting, and in the backward pass
of a wrapped model with eight layers, a bucket each.

Every rank computes with one thread. Numbers are medians, in brackets the 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from report import Log, describe_machine, digits, row
from step import make_mlp, make_transformer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline import Group
from paceline.errors import PeerDiedError
from paceline.testing import Meeting, spawn_ranks

DEADLINE = 900.0  # seconds for the ranks of one cell
FEWEST = 3  # rounds of a cell, however long they take
STEPS_PER_BLOCK = 5

Spans = dict[str, list[float]]  # seconds of each call, by what was called
Times = dict[str, list[tuple[float, float]]]  # one rank's starts and ends of the same


# -- all-reduce: in the ranks -----------------------------------------------------------------


def time_all_reduce(meeting: Meeting, size: int, seconds: float) -> Times:
    """One rank's part in a cell: the five ways in turn, until the time is up."""
    dist.init_process_group("gloo")
    gloo = dist.group.WORLD
    assert gloo is not None
    with meeting.new_group("shm") as shm:
        plain, other = torch.empty(size // 4), torch.empty(size // 4)
        shared = shm.allocate(size // 4)
        options = dist.AllreduceOptions()
        ways: dict[str, Callable[[], object]] = {
            # Straight to the group: torch.distributed.all_reduce would add to gloo's time.
            "gloo": lambda: gloo.allreduce([plain]).wait(),
            "shm": lambda: shm.all_reduce(plain),
            "as torch": lambda: shm.allreduce([plain], options).wait(),
            "in place": lambda: shm.all_reduce(shared),
            "copy": lambda: other.copy_(plain),
        }
        for name, tensor in (
            ("gloo", plain),
            ("shm", plain),
            ("as torch", plain),
            ("in place", shared),
        ):
            _check(ways[name], tensor, meeting)
        ways["copy"]()
        for tensor in (plain, shared):
            tensor.zero_()  # sums of zeros stay what they are
        times = _take_turns(shm, ways, _block(size), _until(shm, seconds))
    dist.destroy_process_group()
    return times


def _check(call: Callable[[], object], tensor: Tensor, meeting: Meeting) -> None:
    """A first call: touches the memory, and shows that the sum is right."""
    tensor.fill_(meeting.rank + 1)
    call()
    total = meeting.size * (meeting.size + 1) / 2
    assert (tensor.min().item(), tensor.max().item()) == (total, total), "the sum is wrong"


def _block(size: int) -> int:
    """Calls in a row: of small ones many, since the first of a row finds the caches cold."""
    return max(1, min(20, (4 << 20) // size))


def _take_turns(
    shm: Group, ways: dict[str, Callable[[], object]], block: int, rounds: Iterable[int]
) -> Times:
    """Time blocks of calls, one way after the other; each round begins with another."""
    times: Times = {name: [] for name in ways}
    names = list(ways)
    for number in rounds:
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            for _ in range(block):
                shm.barrier()
                start = time.perf_counter()
                ways[name]()
                times[name].append((start, time.perf_counter()))
    return times


def _until(shm: Group, seconds: float) -> Iterator[int]:
    """Count rounds until the time is up; rank 0's clock decides for all."""
    end = time.perf_counter() + seconds
    for number in itertools.count():
        go_on = torch.tensor(number < FEWEST or time.perf_counter() < end, dtype=torch.uint8)
        shm.broadcast(go_on)
        if not go_on:
            return
        yield number


# -- a training step: in the ranks ------------------------------------------------------------


MODELS = {
    "MLP, 8 x Linear(1024), batch 32": make_mlp,
    "Transformer, 6 layers of 384, 4 x 64 tokens": make_transformer,
}


def time_steps(meeting: Meeting, model_name: str, steps: int) -> Times:
    """One rank's part: blocks of steps without communication, over gloo and over shm."""
    dist.init_process_group("gloo")
    with meeting.new_group("shm") as shm:
        ways = {
            "local": _make_step(model_name, lambda model: model),
            "gloo": _make_step(model_name, DistributedDataParallel),
            "shm": _make_step(
                model_name, functools.partial(DistributedDataParallel, process_group=shm)
            ),
        }
        for step in ways.values():
            step()
            step()  # after its first step torch's DDP lays its buckets out anew
        rounds = range(-(-steps // STEPS_PER_BLOCK))
        times = _take_turns(shm, ways, STEPS_PER_BLOCK, rounds)
    dist.destroy_process_group()
    return times


def _make_step(model_name: str, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    torch.manual_seed(0)
    model, batch = MODELS[model_name]()
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


# -- death: in the ranks ----------------------------------------------------------------------


def outlive(meeting: Meeting, way: str) -> float:
    """Seconds from the death of rank 0 until this rank has its error."""
    with meeting.new_group("shm") as shm:
        fail = {"call": _wait_in_a_call, "model": _wait_in_a_model}[way](shm)
        when = torch.tensor(time.monotonic() + 0.5, dtype=torch.float64)
        shm.broadcast(when)
        if meeting.rank == 0:  # the others have come to where they wait long before
            time.sleep(when.item() - time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            fail()
        except PeerDiedError:
            return time.monotonic() - when.item()
    raise AssertionError("what needs a dead rank came to an end")


def _wait_in_a_call(shm: Group) -> Callable[[], object]:
    return lambda: shm.allreduce([torch.ones(1024)]).wait()


def _wait_in_a_model(shm: Group) -> Callable[[], object]:
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    model = paceline.DistributedDataParallel(layers, process_group=shm, bucket_cap_mb=0.2)
    for _ in range(2):
        model(torch.ones(2, 256)).sum().backward()
    return lambda: model(torch.ones(2, 256)).sum().backward()


# -- in the process that starts them ----------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """All calls of one size on one number of ranks."""

    ranks: int
    size: int
    spans: Spans

    def line(self) -> str:
        median = {name: statistics.median(spans) for name, spans in self.spans.items()}
        ways = ("gloo", "shm", "as torch", "in place", "copy", "mpi")
        times = [show(self.spans.get(name)) for name in ways]
        ratios = [
            f"{median['gloo'] / median['shm']:.1f}x",
            f"{median['as torch'] / median['shm']:.2f}",
            f"{median['gloo'] / median['in place']:.1f}x",
            f"{median['in place'] / median['copy']:.2f}",
        ]
        return row(self.ranks, show_size(self.size), *times, *ratios)


CELL_HEAD = (
    "| ranks | size | gloo | shm | shm, list and Work | shm in place | copy (limit) | OpenMPI "
    "| gloo / shm | list and Work / shm | gloo / in place | in place / copy |\n"
    "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)
STEP_HEAD = (
    "| DistributedDataParallel, 2 ranks | no communication | over gloo | over shm "
    "| gloo / none | shm / none | gloo / shm |\n"
    "|---|--:|--:|--:|--:|--:|--:|"
)


def spans_of(by_rank: Sequence[Times]) -> Spans:
    """From the first rank's start to the last one's end; all ranks of a host share one clock."""
    spans: Spans = {}
    for name in by_rank[0]:
        calls = zip(*(times[name] for times in by_rank), strict=True)
        spans[name] = [max(e for _, e in call) - min(s for s, _ in call) for call in calls]
    return spans


def measure_cell(ranks: int, size: int, seconds: float, mpi: bool) -> Cell:
    times = spawn_ranks(ranks, time_all_reduce, size, seconds, deadline=DEADLINE)
    spans = spans_of(times)
    if mpi:
        spans["mpi"] = run_mpi(ranks, size, seconds / len(spans))
    return Cell(ranks, size, spans)


def measure_steps(name: str, steps: int) -> Spans:
    return spans_of(spawn_ranks(2, time_steps, name, steps, deadline=DEADLINE))


def step_line(name: str, spans: Spans) -> str:
    local, gloo, shm = (statistics.median(spans[way]) for way in ("local", "gloo", "shm"))
    times = [show(spans[way]) for way in ("local", "gloo", "shm")]
    return row(name, *times, *(f"{r:.2f}" for r in (gloo / local, shm / local, gloo / shm)))


DEATHS = {"call": "in an all-reduce", "model": "in a backward pass of eight buckets"}


def measure_deaths(repeats: int) -> Spans:
    """Seconds until each of two survivors knew, of every repeat."""
    found: Spans = {way: [] for way in DEATHS}
    for _ in range(repeats):
        for way in DEATHS:
            found[way] += spawn_ranks(3, outlive, way, may_die=[0])[1:]
    return found


def death_line(way: str, spans: Sequence[float]) -> str:
    return (
        f"A rank of three is killed while the others wait {DEATHS[way]}: they raise after "
        f"{1e3 * statistics.median(spans):.2f} ms (median), {1e3 * max(spans):.2f} ms (longest "
        f"of {len(spans)})."
    )


def why_no_mpi() -> str:
    """Why OpenMPI is left out; empty when it is there."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if shutil.which("mpirun") is None:
        return "there is no mpirun"
    try:
        run_mpi(2, 4096, 0.1)
    except (subprocess.SubprocessError, ValueError) as error:
        return f"it does not run here ({str(error).splitlines()[0]})"
    return ""


def run_mpi(ranks: int, size: int, seconds: float) -> list[float]:
    command = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none"]
    command += ["--mca", "pml", "ob1"]  # on one host: its shared memory, not a network's library
    command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    script = Path(__file__).with_name("mpi_all_reduce.py")
    command += [sys.executable, "-m", "mpi4py", str(script), str(size), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    spans: list[float] = json.loads(done.stdout.splitlines()[-1])["spans"]
    return spans


# -- words ------------------------------------------------------------------------------------


def show(spans: Sequence[float] | None) -> str:
    """Median and spread, in a unit that suits it."""
    if not spans:
        return "-"
    deciles = statistics.quantiles(spans, n=10, method="inclusive")
    median = statistics.median(spans)
    scale, unit = next(u for u in ((1e6, "us"), (1e3, "ms"), (1.0, "s")) if median * u[0] < 1000)
    value, low, high = (digits(x * scale) for x in (median, deciles[0], deciles[-1]))
    return f"{value} {unit} ({low}-{high})"


def read_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    size = int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
    if size < 4 or size % 4:
        raise ValueError(f"{text} is not a number of float32")
    return size


def show_size(size: int) -> str:
    if size < 1 << 20:
        return f"{size / (1 << 10):g} KiB"
    return f"{size / (1 << 20):g} MiB"


def memory_left() -> int:
    """Bytes that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) << 10
    return sys.maxsize


# -- the run ----------------------------------------------------------------------------------


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Collectives over shm, gloo and OpenMPI.")
    parser.add_argument("--ranks", help="as in 2,4,8")
    parser.add_argument("--sizes", help="of the tensor, as in 4K,26M")
    parser.add_argument("--seconds", type=float, help="for each size and number of ranks")
    parser.add_argument("--quick", action="store_true", help="a rough picture in half a minute")
    parser.add_argument("--save", type=Path, help="write the result here; every call, if .json")
    parser.add_argument("--mpi", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ddp", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    args.ranks = [int(n) for n in (args.ranks or ("2" if args.quick else "2,4,8")).split(",")]
    sizes = args.sizes or ("4K,1M,26M" if args.quick else "4K,64K,1M,4M,26M,100M,256M")
    try:
        args.sizes = [read_size(size) for size in sizes.split(",")]
    except ValueError as error:
        parser.error(f"--sizes: {error}")
    if args.seconds is None:
        args.seconds = 1.0 if args.quick else 6.0
    return args


def main() -> None:
    args = read_arguments()
    log = Log()
    log(describe_machine())
    log()
    cells = run_cells(args, log)
    steps = run_steps(args, log) if args.ddp else {}
    deaths = measure_deaths(3 if args.quick else 10)
    for way, spans in deaths.items():
        log(death_line(way, spans))
    if args.save is not None:
        everything = {
            "machine": log.lines[0],
            "all_reduce": [vars(cell) for cell in cells],
            "steps": steps,
            "deaths": deaths,
        }
        as_json = args.save.suffix == ".json"
        args.save.write_text(json.dumps(everything) if as_json else "\n".join(log.lines) + "\n")


def run_cells(args: argparse.Namespace, log: Log) -> list[Cell]:
    reason = why_no_mpi() if args.mpi else "--no-mpi"
    cells, notes = [], [f"OpenMPI is left out: {reason}."] if reason else []
    log(CELL_HEAD)
    for ranks in args.ranks:
        for size in args.sizes:
            if 5 * ranks * size > memory_left():  # three tensors, and what gloo and shm need
                notes.append(f"{show_size(size)} on {ranks} ranks needs more memory than there is.")
                continue
            cells.append(measure_cell(ranks, size, args.seconds, mpi=not reason))
            log(cells[-1].line())
    log("\n".join(["", *notes, ""] if notes else [""]))
    return cells


def run_steps(args: argparse.Namespace, log: Log) -> dict[str, Spans]:
    names = list(MODELS)[:1] if args.quick else list(MODELS)
    log(STEP_HEAD)
    steps = {}
    for name in names:
        steps[name] = measure_steps(name, 10 if args.quick else 30)
        log(step_line(name, steps[name]))
    log()
    return steps


if __name__ == "__main__":
    main()
