"""Hugging Face Accelerate on paceline: two lines before the Accelerator, the loop stays as it is.

    paceline run --nproc 2 examples/accelerate_loop.py

Accelerate wraps models in torch's DistributedDataParallel, by name. ``paceline.install()`` makes
that name mean ours; and Accelerate takes the default group that it finds, so open it first.
``--torch`` leaves both out, to compare: the losses are the same.

Needs Accelerate: pip install accelerate.
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from toy import make_model, spirals, start

import paceline

BATCH = 64  # samples per step, on all ranks together
EPOCHS = 8


def main() -> None:
    if "--torch" not in sys.argv:
        paceline.install()
        dist.init_process_group("paceline")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(0)
    small = BATCH // accelerator.num_processes
    loader = DataLoader(spirals(), batch_size=small, shuffle=True, generator=generator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.print(f"{type(model).__module__}, {dist.group.WORLD}")
    for epoch in range(EPOCHS):
        losses = []
        for points, sides in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(points), sides)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        mean = accelerator.gather(torch.stack(losses)).mean()
        accelerator.print(f"epoch {epoch + 1}: loss {mean:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    start(main)
