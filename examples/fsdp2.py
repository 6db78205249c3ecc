"""FSDP2 over a paceline group: torch shards the parameters, our group carries them.

    paceline run --nproc 2 examples/fsdp2.py

Nothing of torch's is changed: ``init_process_group("paceline")`` opens the group, and everything in
torch that asks for a group finds it. Within a host the shards travel through shared memory.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from toy import make_model, spirals, start

from paceline import metrics
from paceline.data import DistributedSampler

BATCH = 64  # samples per step, on all ranks together
EPOCHS = 8


def main() -> None:
    dist.init_process_group("paceline")
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    mesh = init_device_mesh("cpu", (ranks,))
    model = make_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = sum(param.to_local().numel() for param in model.parameters())
    whole = sum(param.numel() for param in model.parameters())
    if first:
        print(f"{mesh.get_group()}: this rank holds {held} of {whole} parameters")
    data = spirals()
    sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        losses = []
        for points, sides in DataLoader(data, batch_size=BATCH // ranks, sampler=sampler):
            optimizer.zero_grad()
            loss = cross_entropy(model(points), sides)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = metrics.mean(torch.stack(losses))
        if first:
            print(f"epoch {epoch + 1}: loss {mean:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    start(main)
