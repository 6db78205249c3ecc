"""Mixed precision: the forward pass in half precision, weights and gradients in single.

    paceline run --nproc 2 examples/mixed_precision.py
    paceline run --nproc 2 examples/mixed_precision.py --dtype bfloat16

Small float16 gradients vanish, so the loss is scaled up and gradients are scaled down again. When
one of them has become infinite, the step is left out. Here each rank has a part of the gradients
only (ZeRO); paceline's GradScaler asks the others, so that all ranks leave out a step, or none.
"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from toy import make_model, spirals, start

from paceline import DistributedDataParallel, metrics, new_group
from paceline.data import DistributedSampler
from paceline.optim import GradScaler, ZeroRedundancyOptimizer, clip_grad_norm_

EPOCHS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Train in half precision.")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="float16")
    dtype = getattr(torch, parser.parse_args().dtype)
    with new_group() as group:
        data = spirals()
        sampler = DistributedSampler(data, group=group)
        model = DistributedDataParallel(make_model(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, group, ddp=model, lr=0.02
        )
        # bfloat16 has the range of single precision and needs no scale.
        scaler = GradScaler("cpu", init_scale=2.0**20, enabled=dtype is torch.float16)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for points, sides in DataLoader(data, batch_size=32, sampler=sampler):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype):
                    loss = cross_entropy(model(points), sides)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                clip_grad_norm_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
            mean = metrics.mean(loss.float(), group)  # of the last batch
            if group.rank() == 0:
                print(f"epoch {epoch + 1}: loss {mean:.4f}, scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    start(main)
