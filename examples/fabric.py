"""Lightning Fabric on paceline: another strategy, the loop stays as it is.

    paceline run --nproc 2 examples/fabric.py
    python examples/fabric.py                           Fabric starts the ranks itself

Needs Lightning: pip install 'paceline[lightning]'.
"""

import os

import torch
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from toy import make_model, spirals

from paceline.integrations.lightning import PacelineStrategy

BATCH = 64  # samples per step, on all ranks together
EPOCHS = 8


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", 2))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=PacelineStrategy())
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    loader = DataLoader(spirals(), batch_size=BATCH // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)  # deals the samples out to the ranks
    fabric.print(f"{fabric.world_size} ranks, {torch.distributed.group.WORLD}")
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        losses = []
        for number, (points, sides) in enumerate(loader):
            small = number % 2 == 0  # two batches make one step
            with fabric.no_backward_sync(model, enabled=small):
                loss = cross_entropy(model(points), sides)
                fabric.backward(loss / 2)
            if not small:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        mean = fabric.all_reduce(torch.stack(losses).mean())
        fabric.print(f"epoch {epoch + 1}: loss {mean:.4f}")


if __name__ == "__main__":
    main()
