"""One rank of one way of ``peers.py``: times its step and the local one, turn by turn.

    python benchmarks/peers_rank.py WAY ROUNDS FOLDER MODEL...

The process stands where a launcher put it: with torchrun's variables, under mpirun, or, for Ray, as
the one process that asks Ray for ranks. What a rank has measured of a model is written to
``FOLDER/MODEL-RANK.json`` as soon as it is there.

The plain model and the way's own take turns in blocks of five steps, each round in the other order,
with a barrier before each block. Before that, a small model is trained and compared with one that
had the batches of all ranks: a way that does not average raises instead of looking quick.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import peers_ways
import torch
from step import MODELS, STEPS_PER_BLOCK, WARM_UP
from torch import nn

WAYS: dict[str, type[peers_ways.Way]] = {
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
    "gloo": peers_ways.Gloo,
}


def measure(name: str, rounds: int, folder: Path, models: Sequence[str]) -> None:
    torch.set_num_threads(1)
    way = WAYS[name]()
    check(way)
    for model in models:
        found = time_blocks(way, model, rounds)
        (folder / f"{model}-{way.rank}.json").write_text(json.dumps(found))
    way.barrier()  # nobody leaves a group that another still uses
    way.close()


def time_blocks(way: peers_ways.Way, name: str, rounds: int) -> list[list[list[float]]]:
    """Seconds of each step, by round, then local and the way's."""
    torch.manual_seed(0)
    model, batch = MODELS[name].make()
    batch += 0.01 * way.rank  # ranks differ, or there would be nothing to average
    torch.manual_seed(0)
    alone = MODELS[name].make()[0]
    steps = [peers_ways.plain_step(alone, batch, peers_ways.sgd(alone)), way.prepare(model, batch)]
    for step in steps:
        for _ in range(WARM_UP):
            step()
    blocks: list[list[list[float]]] = []
    for number in range(rounds):
        taken = [[], []]
        for which in (0, 1) if number % 2 else (1, 0):
            way.barrier()
            taken[which] = time_block(steps[which])
        blocks.append(taken)
    return blocks


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


def ask_ray(name: str, rounds: int, folder: Path, models: Sequence[str], ranks: int) -> None:
    """Let Ray start the ranks, on this machine, in a cluster that ends with this process."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    quiet = {"include_dashboard": False, "log_to_driver": False}
    ray.init(num_cpus=ranks, _temp_dir=str(folder / "r"), **quiet)  # a short name, for sockets
    trainer = TorchTrainer(
        lambda: measure(name, rounds, folder, models),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=ranks, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    )
    trainer.fit()
    ray.shutdown()


def main() -> None:
    name, rounds, folder, *models = sys.argv[1:]
    if name == "ray":
        ask_ray(name, int(rounds), Path(folder), models, int(os.environ["WORLD_SIZE"]))
    else:
        measure(name, int(rounds), Path(folder), models)


if __name__ == "__main__":
    main()
