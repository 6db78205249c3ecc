"""One rank of one way of ``peers.py``: does what it is asked over a socket.

    python benchmarks/peers_rank.py WAY FOLDER

The process stands where a launcher put it: with torchrun's variables, under mpirun, or, for Ray, as
the one process that asks Ray for ranks. It comes to the socket ``FOLDER/door``, is asked for one
thing after another (``peers_turns.py``), and answers with what it measured.

First of all a small model is trained and compared with one that had the batches of all ranks: a way
that does not average raises instead of looking quick.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers_ways
import torch
from step import MODELS, STEPS_PER_BLOCK, WARM_UP
from torch import nn

WAYS: dict[str, type[peers_ways.Way]] = {
    "local": peers_ways.Local,
    "torch": peers_ways.TorchDDP,
    "accelerate": peers_ways.Accelerate,
    "fabric": peers_ways.Fabric,
    "ray": peers_ways.RayTrain,
    "fsdp2": peers_ways.FullyShard,
    "replicate": peers_ways.Replicate,
    "horovod": peers_ways.Horovod,
    "deepspeed": peers_ways.DeepSpeed,
    "deepspeed-shm": peers_ways.DeepSpeedShm,
    "mpi4py": peers_ways.Mpi,
    "shm": peers_ways.Shm,
    "shm-flat": peers_ways.ShmFlat,
    "gloo": peers_ways.Gloo,
}


def serve(name: str, folder: Path) -> None:
    """Answer requests until no more come."""
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(folder / "door"))
        with line.makefile("rw") as stream:
            rank = None
            for request in stream:
                try:
                    rank = rank or Rank(WAYS[name]())
                    told = {"answer": rank.do(**json.loads(request))}
                except Exception as error:
                    told = {"error": f"{type(error).__name__}: {error}"[:120]}
                stream.write(json.dumps(told) + "\n")
                stream.flush()


class Rank:
    """One rank of a way, with the step it has prepared."""

    def __init__(self, way: peers_ways.Way) -> None:
        self.way = way
        self.step: Callable[[], None] | None = None

    def do(self, what: str, model: str = "") -> Any:
        return getattr(self, what)(*([model] if model else []))

    def check(self) -> None:
        check(self.way)

    def prepare(self, model: str) -> None:
        self.step = None  # and with it the model before
        torch.manual_seed(0)
        made, batch = MODELS[model].make()
        batch += 0.01 * self.way.rank  # ranks differ, or there would be nothing to average
        self.step = self.way.prepare(made, batch)
        for _ in range(WARM_UP):
            self.step()

    def block(self) -> list[float]:
        """Seconds of some steps, after one that finds its memory and its caches again."""
        assert self.step is not None
        self.step()
        self.way.barrier()
        return time_block(self.step)

    def close(self) -> None:
        self.way.barrier()  # nobody leaves a group that another still uses
        self.way.close()


def time_block(step: Callable[[], None]) -> list[float]:
    marks = [time.perf_counter()]
    for _ in range(STEPS_PER_BLOCK):
        step()
        marks.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(marks)]


def check(way: peers_ways.Way) -> None:
    """See that the way's steps are those of one process with the batches of all ranks."""
    batches = [torch.linspace(rank, rank + 4, 32).view(4, 8) for rank in range(way.size)]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    own, whole = models
    steps = [way.prepare(own, batches[way.rank])]
    steps.append(peers_ways.plain_step(whole, torch.cat(batches), peers_ways.sgd(whole)))
    for step in steps:
        for _ in range(STEPS_PER_BLOCK):
            step()
    for param, right in zip(own.parameters(), whole.parameters(), strict=True):
        found = param.full_tensor() if hasattr(param, "full_tensor") else param
        torch.testing.assert_close(found.detach(), right.detach(), rtol=0, atol=1e-6)


def ask_ray(name: str, folder: Path, ranks: int) -> None:
    """Let Ray start the ranks, on this machine, in a cluster that ends with this process."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    quiet = {"include_dashboard": False, "log_to_driver": False}
    ray.init(num_cpus=ranks, _temp_dir=str(folder / "r"), **quiet)  # a short name, for sockets
    trainer = TorchTrainer(
        lambda: serve(name, folder),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=ranks, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    )
    trainer.fit()
    ray.shutdown()


def main() -> None:
    name, folder = sys.argv[1:]
    if name == "ray":
        ask_ray(name, Path(folder), int(os.environ["WORLD_SIZE"]))
    else:
        serve(name, Path(folder))


if __name__ == "__main__":
    main()
