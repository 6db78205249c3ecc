"""Ranks are killed while they train, others take their place, and not a bit of the weights changes.

    python examples/elastic.py                                        both runs, two equal digests
    paceline run --elastic --nproc 3 --spares 1 examples/elastic.py   a run without faults
    ... examples/elastic.py --kill 4:1 --kill 9:0                     members 1 and 0 die on the way

The members are processes of one program. Each makes its model, optimizer and loader by itself; the
job brings them together, does a step again when a member is lost in it, and gives its state to
whoever comes instead. Kill some yourself: the lines say which processes there are.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import torch
from same_bits import BATCH, SHARDS, Lines, make_model
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import DistributedDataParallel, Group, elastic
from paceline.cli.demo.text import load_text
from paceline.data import ShardedLoader

STEPS = 12


def digest(model: nn.Module) -> str:
    """Of every bit of the weights."""
    bits = hashlib.sha256()
    for tensor in model.state_dict().values():
        bits.update(tensor.contiguous().numpy().tobytes())
    return bits.hexdigest()[:16]


def die_if_told(group: Group, kills: dict[int, int], step: elastic.JobStep) -> None:
    """Kill this process if the command line says so for this step."""
    if kills.get(step.number) == group.members[group.rank()]:
        os.kill(os.getpid(), signal.SIGKILL)


def tell(group: Group, job: elastic.Job, model: nn.Module) -> None:
    """Print what has come out, once for all."""
    if group.rank() == 0 and job.finished:
        print(f"digest {digest(model)} after {job.steps} steps, at the end on "
              f"members {', '.join(map(str, group.members))}", flush=True)  # fmt: skip


def main(kills: dict[int, int]) -> None:
    torch.set_num_threads(1)
    group = elastic.group()
    lines = Lines(load_text(1 << 18)[: STEPS * BATCH * 32 + 1])
    loader = ShardedLoader(lines, shards=SHARDS, batch=BATCH, group=group)
    ddp = DistributedDataParallel(make_model(), process_group=group, shards=SHARDS)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    with elastic.job(ddp, optimizer, loader) as job:
        for step in job:
            for shard, (inputs, targets) in step:
                with ddp.shard(shard):
                    cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten()).backward()
                die_if_told(group, kills, step)
            optimizer.step()
            optimizer.zero_grad()
        tell(group, job, ddp.module)
    group.shutdown()


def start(main: Callable[[dict[int, int]], None]) -> None:
    """Be a member, or launch two runs: without faults, and with members that are killed."""
    parser = argparse.ArgumentParser(description="Training that goes on when ranks are lost.")
    parser.add_argument("--kill", action="append", default=[], metavar="STEP:MEMBER")
    words = [word.split(":") for word in parser.parse_args().kill]
    given = [(int(step), int(member)) for step, member in words]
    if "PACELINE_MEMBERS" in os.environ:
        main(dict(given))
        return
    launcher = [sys.executable, "-m", "paceline", "run", "--elastic"]
    for kills in ([], ["--kill", "4:1", "--kill", "9:0"]):
        members = ["--nproc", "3", "--spares", "1"]
        subprocess.run([*launcher, *members, sys.argv[0], *kills], check=True)


if __name__ == "__main__":
    start(main)
