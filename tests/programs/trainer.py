"""A trainer class, as loops around Lightning and Accelerate grow: autocast, checkpoints, heads."""

import os
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Module(nn.Module):
    """What users derive from: the forward of the wrapped model is the training step."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1))
        self.head, self.extra = nn.Linear(32, 1), nn.Linear(32, 1)

    def training_step(self, batch, index):
        x, y = batch
        h = self.encoder(x)
        loss = (self.head(h).squeeze(-1) - y).square().mean()
        if index % 2:  # the second head is used now and then
            loss = loss + 0.1 * self.extra(h).square().mean()
        return loss

    def forward(self, *args):
        return self.training_step(*args)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


class Trainer:
    def __init__(self, epochs, accumulate):
        self.epochs, self.accumulate = epochs, accumulate
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def fit(self, module, dataset, folder):
        self.model = DistributedDataParallel(module, find_unused_parameters=True)
        self.optimizer, self.schedule = module.configure_optimizers()
        sampler = DistributedSampler(dataset, seed=3)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        for epoch in range(self.epochs):
            sampler.set_epoch(epoch)
            self.report(epoch, self.run_epoch(loader))
            self.save_and_load(folder, epoch)

    def run_epoch(self, loader):
        total = torch.zeros(2)
        for index, batch in enumerate(loader):
            last = (index + 1) % self.accumulate == 0 or index + 1 == len(loader)
            with nullcontext() if last else self.model.no_sync():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = self.model(batch, index)
                (loss / self.accumulate).backward()
            total += torch.tensor([loss.item(), 1.0])
            if last:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def report(self, epoch, loss):
        rate = self.schedule.get_last_lr()[0]
        if self.rank == 0:
            print(f"epoch {epoch}: loss {loss:.6f}, rate {rate:.6f}")

    def save_and_load(self, folder, epoch):
        """Rank 0 saves, all load: training goes on as if nothing had been."""
        path = os.path.join(folder, f"{epoch}.pt")
        if self.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, path)
        dist.barrier()
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(100, 10)
    dataset = TensorDataset(x, x[:, 0] * x[:, 1] + x[:, 2])
    module = Module()
    torch.manual_seed(10 + dist.get_rank())  # dropout differs between ranks
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    Trainer(epochs=4, accumulate=2).fit(module, dataset, folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
