"""How much of the time is training, when ranks are killed?

    python benchmarks/goodput.py --save results.md       about half an hour
    python benchmarks/goodput.py --seconds 20 --every 5  a rough picture

The demo's char GPT on some ranks, one of which is killed every so many seconds. *elastic*:
``paceline.elastic.job`` under ``paceline run --elastic`` with one spare. *restarts*: torch's
DistributedDataParallel over gloo under torchrun, which starts all ranks again; they go on from a
checkpoint that rank 0 writes every 50 steps; each start has a part of the store of its own, since
ranks find the addresses of those that are gone otherwise, and start without end. *torchft*, if it
is installed (``pip install torchft-nightly``; the ranks of 0.2.0 all end with the first that is
lost): its DistributedDataParallel over gloo, each rank a replica of its own that is started again
when it is lost. Each way runs for the same time, once undisturbed and
once for each interval. Goodput is the steps that it got to, over those of its undisturbed run. The
time begins with the first step, so that the start of Python and torch counts in restarts alone.

Beside it: how long the others took to go on, by the launcher's word, and what a start costs in
seconds of a core, until the first step is done. Where all cores train, every such second is one
that nobody trains in.

*overhead*: what the job adds to the same loop over shards without ``elastic``. Both run in the same
processes, a few steps of one and then of the other, since a busy machine changes by more than what
is measured. The median of the steps' times is compared, and that of their seconds of a core, which
others do not change. Ranks compute with one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import goodput_torchft
import torch
import torch.distributed as dist
from chargpt import CharGPT, load_text
from report import Log, describe_machine, digits, row
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import Dataset

import paceline
from paceline import elastic
from paceline.data import ShardedLoader

SHARDS, BATCH, CONTEXT = 8, 32, 64
CHECKPOINT_EVERY = 50  # steps
ENDLESS = 1_000_000  # epochs
TURN = 3  # steps of one way that are timed before it is the other's turn
START = 120.0  # seconds that a way may take until its first step


class Stretches(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of text, and for each character the one that follows."""

    def __init__(self) -> None:
        self.text = load_text(1 << 18).long()

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        part = self.text[number * CONTEXT : (number + 1) * CONTEXT + 1]
        return part[:-1], part[1:]


def loss_of(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


# -- in the ranks -----------------------------------------------------------------------------


class Notes:
    """Where a rank says that it lives, and how far it has come."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / f"rank-{os.getpid()}"

    def write(self, steps: int) -> None:
        if not self._path.exists():
            (self._folder / f"start-{os.getpid()}").write_text(str(time.process_time()))
        self._path.write_text(str(steps))


def made_for(
    group: paceline.Group,
) -> tuple[paceline.DistributedDataParallel, torch.optim.Optimizer, ShardedLoader]:
    torch.manual_seed(0)
    ddp = paceline.DistributedDataParallel(CharGPT(), process_group=group, shards=SHARDS)
    loader = ShardedLoader(Stretches(), shards=SHARDS, batch=BATCH, group=group)
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=3e-3), loader


def elastic_steps(group: paceline.Group) -> Iterator[int]:
    """Train, and give the number of steps after each."""
    ddp, optimizer, loader = made_for(group)
    with elastic.job(ddp, optimizer, loader, epochs=ENDLESS) as job:
        for step in job:
            for shard, (inputs, targets) in step:
                with ddp.shard(shard):
                    loss_of(ddp, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield job.steps


def shard_steps(group: paceline.Group) -> Iterator[int]:
    """The same without elastic."""
    ddp, optimizer, loader = made_for(group)
    for count, step in enumerate(step for _ in range(ENDLESS) for step in loader):
        for shard, (inputs, targets) in ddp.shards_of(step):
            with ddp.shard(shard):
                loss_of(ddp, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield count + 1


def train_elastic(notes: Notes) -> None:
    for count in elastic_steps(elastic.group()):
        notes.write(count)


def train_both(notes: Notes, folder: Path) -> None:
    group = elastic.group()
    job = elastic_steps(group)
    next(job)
    rank, size = group.rank(), group.size()
    store = dist.FileStore(str(folder / "store"), size)
    plain = paceline.new_group(store=store, rank=rank, world_size=size)
    ways = {"elastic": job, "shards": shard_steps(plain)}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(ENDLESS):
        for way in sorted(ways, reverse=bool(turn % 2)):
            next(ways[way])  # finds the other's memory in the caches
            times[way] += [timed(ways[way]) for _ in range(TURN)]
        notes.write(turn)
        draft = folder / f"draft-{rank}"
        draft.write_text(json.dumps(times))
        draft.replace(folder / f"times-{rank}")


def timed(steps: Iterator[int]) -> tuple[float, float]:
    """Seconds that a step takes, and those of a core."""
    wall, core = time.perf_counter(), time.process_time()
    next(steps)
    return time.perf_counter() - wall, time.process_time() - core


def train_torch(notes: Notes, folder: Path) -> None:
    env = os.environ
    agents = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"start {env['TORCHELASTIC_RESTART_COUNT']}", agents)
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ddp = TorchDDP(CharGPT())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    data, path, count = Stretches(), folder / "checkpoint.pt", 0
    if path.exists():
        count, weights, moments = torch.load(path)
        ddp.module.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    own = BATCH // dist.get_world_size()
    while True:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(count))
        mine = order[dist.get_rank() * own : (dist.get_rank() + 1) * own].tolist()
        inputs, targets = (
            torch.stack(part) for part in zip(*map(data.__getitem__, mine), strict=True)
        )
        loss_of(ddp, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
        notes.write(count)
        if count % CHECKPOINT_EVERY == 0 and dist.get_rank() == 0:
            torch.save([count, ddp.module.state_dict(), optimizer.state_dict()], f"{path}.new")
            os.replace(f"{path}.new", path)


# -- in the process that kills them -----------------------------------------------------------


def command(way: str, ranks: int, folder: Path) -> list[str]:
    own = [str(Path(__file__).resolve()), "--way", way, "--folder", str(folder)]
    run = [sys.executable, "-m", "paceline", "run", "--nproc", str(ranks)]
    if way == "elastic":
        return [*run, "--elastic", "--spares", "1", *own]
    if way == "both":
        return [*run, "--elastic", *own]
    if way == "torchft":
        return [sys.executable, *own, "--supervise", str(ranks)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(ranks), "--max-restarts", "100000", *own]


def living(folder: Path) -> dict[int, int]:
    """The ranks that train, by process, and how far each has come."""
    found = {}
    for path in folder.glob("rank-*"):
        pid, text = int(path.name.removeprefix("rank-")), path.read_text()
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
            continue
        if text:
            found[pid] = int(text)
    return found


@contextmanager
def launched(way: str, ranks: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The processes of a way, and the folder that they write to; at the end none is left."""
    with tempfile.TemporaryDirectory(prefix="paceline-goodput-") as name:
        folder = Path(name)
        out = (folder / "output").open("w")
        launcher = subprocess.Popen(
            command(way, ranks, folder), stdout=out, stderr=out, start_new_session=True
        )
        try:
            yield launcher, folder
        finally:
            launcher.terminate()
            try:
                launcher.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
            for pid in living(folder):
                os.kill(pid, signal.SIGKILL)
            out.close()


@dataclass(frozen=True)
class Run:
    """What a way got to in its time."""

    steps: int
    kills: int
    went_on: list[float]  # seconds until the others went on, after each kill
    starts: list[float]  # seconds of a core until the first step, of each process in its order


def run_of(way: str, ranks: int, seconds: float, every: float) -> Run:
    """Let a way train for so many seconds, with a kill every so many."""
    with launched(way, ranks) as (launcher, folder):
        steps, kills = _watch(launcher, folder, seconds, every)
        said = (folder / "output").read_text()
        began = sorted(folder.glob("start-*"), key=lambda path: path.stat().st_mtime)
        starts = [float(path.read_text()) for path in began]
    return Run(steps, kills, [float(s) for s in re.findall(r" on after ([\d.]+) s", said)], starts)


def overhead(ranks: int, seconds: float) -> tuple[float, float]:
    """What a step of a job takes, over one without elastic: time, and that of a core."""
    with launched("both", ranks) as (launcher, folder):
        _watch(launcher, folder, seconds, 0)
        found = [json.loads(path.read_text()) for path in folder.glob("times-*")]
    kinds = []
    for kind in (0, 1):
        of = {way: median(row[kind] for times in found for row in times[way]) for way in found[0]}
        kinds.append(of["elastic"] / of["shards"])
    return kinds[0], kinds[1]


def _watch(
    launcher: subprocess.Popen[bytes], folder: Path, seconds: float, every: float
) -> tuple[int, int]:
    began = time.monotonic()
    while not living(folder):
        if launcher.poll() is not None or time.monotonic() - began > START:
            raise SystemExit(f"it did not begin:\n{(folder / 'output').read_text()[-3000:]}")
        time.sleep(0.01)
    chance, first = random.Random(19), max(living(folder).values())
    end = time.monotonic() + seconds
    kills, farthest, next_kill = 0, first, time.monotonic() + (every or seconds + 1)
    while (now := time.monotonic()) < end:
        time.sleep(min(0.05, end - now))
        ranks = living(folder)
        farthest = max(ranks.values()) if ranks else farthest  # after a restart it is less
        if time.monotonic() > next_kill and ranks:
            os.kill(chance.choice(sorted(ranks)), signal.SIGKILL)
            kills, next_kill = kills + 1, next_kill + every
    return farthest - first, kills


def middle(values: Sequence[float]) -> str:
    return f"{median(values):.2f}" if values else "-"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run")
    parser.add_argument("--every", default="60,15", help="seconds between two kills")
    usual = "elastic,restarts" + (",torchft" if find_spec("torchft") else "")
    parser.add_argument("--ways", default=usual, help=f"of elastic, restarts, torchft ({usual})")
    parser.add_argument("--no-overhead", action="store_true")
    parser.add_argument("--save", type=Path, help="write the result here")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--supervise", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.supervise:
        own = [str(Path(__file__).resolve()), "--way", "torchft", "--folder", str(args.folder)]
        goodput_torchft.supervise([sys.executable, *own], args.supervise)
    if args.way:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        notes = Notes(args.folder)
        if args.way == "elastic":
            train_elastic(notes)
        elif args.way == "torchft":
            goodput_torchft.train(CharGPT(), Stretches(), loss_of, BATCH, notes.write)
        else:
            (train_both if args.way == "both" else train_torch)(notes, args.folder)
        return 0
    log = Log()
    log(describe_machine())
    log()
    heads = (
        "way",
        "a kill every",
        "kills",
        "steps",
        "goodput",
        "went on after, s",
        "a start, core s",
    )
    log(row(*heads))
    log(row(*("---" for _ in heads)))
    intervals = [float(word) for word in args.every.split(",") if word]
    for way in args.ways.split(",") if args.ways else ():
        alone = run_of(way, args.ranks, args.seconds, 0)
        log(row(way, "-", 0, alone.steps, 1, "-", middle(alone.starts)))
        for every in intervals:
            run = run_of(way, args.ranks, args.seconds, every)
            share, later = digits(run.steps / max(1, alone.steps)), run.starts[args.ranks + 1 :]
            cells = (
                f"{every:g} s",
                run.kills,
                run.steps,
                share,
                middle(run.went_on),
                middle(later),
            )
            log(row(way, *cells))
    if not args.no_overhead:
        wall, core = overhead(args.ranks, args.seconds)
        log()
        log(f"Without faults a step of the job takes {wall:.3f} of one of the same loop without "
            f"elastic, and {core:.3f} of its seconds of a core.")  # fmt: skip
    if args.save:
        args.save.write_text("\n".join(log.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
