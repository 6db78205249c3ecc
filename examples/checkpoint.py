"""Save on some ranks, go on on others: every rank writes its own part of the checkpoint.

    paceline run --nproc 2 examples/checkpoint.py --steps 20       trains, and saves in ./checkpoint
    paceline run --nproc 4 examples/checkpoint.py --steps 40       goes on from there

The optimizer's state is spread over the ranks (ZeRO), and torch.distributed.checkpoint reads it
back for any number of them. The sampler goes on at the sample where it stopped. So the run ends
where an uninterrupted one does, up to the last digits that another number of ranks rounds away.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from toy import make_model, spirals, start

from paceline import DistributedDataParallel
from paceline.data import DistributedSampler
from paceline.optim import ZeroRedundancyOptimizer

BATCH = 64  # samples per step, on all ranks together


class Run:
    """Everything that a checkpoint holds."""

    def __init__(self) -> None:
        self.data = spirals()
        self.sampler = DistributedSampler(self.data)
        self.model = DistributedDataParallel(make_model())
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, ddp=self.model, lr=0.01
        )
        self.step = 0

    def train(self, until: int) -> None:
        loader = DataLoader(
            self.data, batch_size=BATCH // dist.get_world_size(), sampler=self.sampler
        )
        while self.step < until:
            for points, sides in loader:
                self.optimizer.zero_grad()
                cross_entropy(self.model(points), sides).backward()
                self.optimizer.step()
                self.step += 1
                if self.step == until:
                    return
            self.sampler.set_epoch(self.sampler.epoch + 1)

    def save(self, folder: Path) -> None:
        place = {"step": self.step, "sampler": self.sampler.state_dict()}
        weights = self.model.module.state_dict()
        state = {"model": weights, "place": place, "optimizer": self.optimizer.sharded_state_dict()}
        dcp.save(state, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        place = {"step": 0, "sampler": self.sampler.state_dict()}
        state = {"model": self.model.module.state_dict(), "place": place}
        dcp.load(state, checkpoint_id=folder)  # weights where they lie, the rest into the dict
        self.optimizer.load_sharded(folder, "optimizer")
        self.sampler.load_state_dict(state["place"]["sampler"])
        self.step = state["place"]["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, save, and go on.")
    parser.add_argument("--folder", type=Path, default=Path("checkpoint"))
    parser.add_argument("--steps", type=int, default=20, help="of the whole run, so far")
    args = parser.parse_args()
    dist.init_process_group("paceline")
    run = Run()
    saved = sorted(args.folder.glob("step-*"))
    if saved:
        run.load(saved[-1])
    first = run.step
    run.train(args.steps)
    folder = args.folder / f"step-{run.step:06}"
    if run.step > first:
        run.save(folder)
    if dist.get_rank() == 0:
        print(f"steps {first} to {run.step} on {dist.get_world_size()} ranks: {folder}")
    dist.destroy_process_group()


if __name__ == "__main__":
    start(main)
