"""The plain loop: every rank has a copy of the model and takes its share of each batch.

    paceline run --nproc 2 examples/plain_loop.py
    torchrun --nproc-per-node 2 examples/plain_loop.py      does the same

The losses are those of one process, for any number of ranks that divides the batch.
"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from toy import make_model, spirals, start

from paceline import DistributedDataParallel, metrics, new_group
from paceline.data import DistributedSampler

BATCH = 64  # samples per step, on all ranks together
EPOCHS = 8


def main() -> None:
    with new_group() as group:  # shared memory within a host, gloo between hosts
        data = spirals()
        sampler = DistributedSampler(data, group=group)
        loader = DataLoader(data, batch_size=BATCH // group.size(), sampler=sampler)
        model = DistributedDataParallel(make_model(), process_group=group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        if group.rank() == 0:
            print(f"{group.size()} ranks over {group.backend}")
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            losses = []
            for points, sides in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(points), sides)
                loss.backward()  # which leaves the average over ranks in every gradient
                optimizer.step()
                losses.append(loss.detach())
            mean = metrics.mean(torch.stack(losses), group)
            if group.rank() == 0:
                print(f"epoch {epoch + 1}: loss {mean:.4f}")


if __name__ == "__main__":
    start(main)
