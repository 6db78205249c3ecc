"""Gradient accumulation: four small batches make one step, and the ranks speak once per step.

    paceline run --nproc 2 examples/accumulation.py

The last small batch of an epoch is short. ``samples`` lets each count by its samples, so the
gradient is the exact mean over all samples of the step; rank 0 trains alone afterwards, with the
whole batch at once, to show that the result is the same.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader
from toy import make_model, spirals, start

from paceline import DistributedDataParallel, new_group
from paceline.data import DistributedSampler

SMALL = 16  # samples per forward pass, on one rank
STEPS = 4  # small batches per step
SAMPLES = 500


def train(model: DistributedDataParallel, loader: DataLoader) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for points, sides in loader:
        # In three of four passes nothing is sent; the fourth averages what has gathered.
        with model.accumulate(STEPS) as last, model.samples(len(sides)):
            cross_entropy(model(points), sides).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def train_alone(batch: int) -> Tensor:
    """The weights of one process that takes each batch whole."""
    model: nn.Module = make_model()
    data = spirals(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    order = DistributedSampler(data, num_replicas=1, rank=0)
    for points, sides in DataLoader(data, batch_size=batch, sampler=order):
        optimizer.zero_grad()
        cross_entropy(model(points), sides).backward()
        optimizer.step()
    return parameters_to_vector(model.parameters())


def main() -> None:
    with new_group() as group:
        data = spirals(SAMPLES)
        loader = DataLoader(data, batch_size=SMALL, sampler=DistributedSampler(data, group=group))
        model = DistributedDataParallel(make_model(), process_group=group)
        train(model, loader)
        if group.rank() == 0:
            alone = train_alone(SMALL * STEPS * group.size())
            apart = (parameters_to_vector(model.parameters()) - alone).abs().max()
            print(f"{len(loader)} backward passes, {len(loader) // STEPS} steps")
            print(f"one process with whole batches ends within {apart:.1e}")


if __name__ == "__main__":
    start(main)
