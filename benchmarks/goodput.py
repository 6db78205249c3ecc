"""How much of the time is training, when ranks are killed?

    python benchmarks/goodput.py --save results.md       about half an hour
    python benchmarks/goodput.py --seconds 20 --every 5  a rough picture

The demo's char GPT on some ranks, one of which is killed every so many seconds. *elastic*:
``paceline.elastic.job`` under ``paceline run --elastic`` with one spare. *restarts*: torch's
DistributedDataParallel over gloo under torchrun, which starts all ranks again; they go on from a
checkpoint that rank 0 writes every 50 steps. Each way runs for the same time, once undisturbed and
once for each interval. Goodput is the steps that it got to, over those of its undisturbed run. The
time begins with the first step, so that the start of Python and torch counts in restarts alone.

*overhead*: the same loop over shards without ``elastic``, on as many ranks, against the job's steps
when nobody is killed. Ranks compute with one thread each.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

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
        self._path = folder / f"rank-{os.getpid()}"

    def write(self, steps: int) -> None:
        self._path.write_text(str(steps))


def train_elastic(notes: Notes) -> None:
    group = elastic.group()
    ddp = paceline.DistributedDataParallel(CharGPT(), process_group=group, shards=SHARDS)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    loader = ShardedLoader(Stretches(), shards=SHARDS, batch=BATCH, group=group)
    with elastic.job(ddp, optimizer, loader, epochs=ENDLESS) as job:
        for step in job:
            for shard, (inputs, targets) in step:
                with ddp.shard(shard):
                    loss_of(ddp, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            notes.write(job.steps)


def train_shards(notes: Notes) -> None:
    with paceline.new_group() as group:
        ddp = paceline.DistributedDataParallel(CharGPT(), process_group=group, shards=SHARDS)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
        loader = ShardedLoader(Stretches(), shards=SHARDS, batch=BATCH, group=group)
        count = 0
        while True:
            for step in loader:
                for shard, (inputs, targets) in ddp.shards_of(step):
                    with ddp.shard(shard):
                        loss_of(ddp, inputs, targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                count += 1
                notes.write(count)


def train_torch(notes: Notes, folder: Path) -> None:
    dist.init_process_group("gloo")
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
    if way == "shards":
        return [*run, *own]
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


def steps_of(way: str, ranks: int, seconds: float, every: float) -> tuple[int, int]:
    """How many steps a way gets to in so many seconds, and how many ranks were killed."""
    with tempfile.TemporaryDirectory(prefix="paceline-goodput-") as name:
        folder = Path(name)
        out = (folder / "output").open("w")
        launcher = subprocess.Popen(
            command(way, ranks, folder), stdout=out, stderr=out, start_new_session=True
        )
        try:
            return _watch(launcher, folder, seconds, every)
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run")
    parser.add_argument("--every", default="60,15", help="seconds between two kills")
    parser.add_argument("--ways", default="elastic,restarts")
    parser.add_argument("--no-overhead", action="store_true")
    parser.add_argument("--save", type=Path, help="write the result here")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.way:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        notes = Notes(args.folder)
        if args.way == "restarts":
            train_torch(notes, args.folder)
        (train_elastic if args.way == "elastic" else train_shards)(notes)
        return 0
    log = Log()
    log(describe_machine())
    log()
    log(row("way", "a kill every", "kills", "steps", "goodput"))
    log(row("---", "---", "---", "---", "---"))
    intervals = [float(word) for word in args.every.split(",") if word]
    undisturbed = {}
    for way in args.ways.split(","):
        undisturbed[way], _ = steps_of(way, args.ranks, args.seconds, 0)
        log(row(way, "-", 0, undisturbed[way], 1))
        for every in intervals:
            steps, kills = steps_of(way, args.ranks, args.seconds, every)
            share = digits(steps / max(1, undisturbed[way]))
            log(row(way, f"{every:g} s", kills, steps, share))
    if "elastic" in undisturbed and not args.no_overhead:
        plain, _ = steps_of("shards", args.ranks, args.seconds, 0)
        log()
        log(f"Without faults: {plain} steps of the same loop without elastic, "
            f"{digits(plain / max(1, undisturbed['elastic']))} of the job's.")  # fmt: skip
    if args.save:
        args.save.write_text("\n".join(log.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
