"""A GAN as many are written: two wrapped networks, one of them frozen in turn, two optimizers."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

NOISE, WIDTH, STEPS, BATCH = 8, 32, 12, 16


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(NOISE, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)
        )

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)
        )
        self.real = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.real(self.net(x))


def requires_grad(model, flag):
    for parameter in model.parameters():
        parameter.requires_grad_(flag)


def ring(count, generator):
    """Points on a circle, with a little noise."""
    angle = torch.rand(count, generator=generator) * 6.2831853
    points = torch.stack([angle.cos(), angle.sin()], 1)
    return points + 0.05 * torch.randn(points.shape, generator=generator)


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    generator = DDP(Generator(), broadcast_buffers=False)
    discriminator = DDP(Discriminator(), broadcast_buffers=False)
    average = Generator()  # of the weights, as StyleGAN keeps one
    average.load_state_dict(generator.module.state_dict())
    g_optimizer = torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.0, 0.99))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), 2e-3, betas=(0.0, 0.99))
    random = torch.Generator().manual_seed(100 + rank)
    for step in range(STEPS):
        requires_grad(generator, False)
        requires_grad(discriminator, True)
        real = ring(BATCH, random).requires_grad_(step % 4 == 0)
        fake = generator(torch.randn(BATCH, NOISE, generator=random))
        real_score, fake_score = discriminator(real), discriminator(fake)
        d_loss = (
            nn.functional.softplus(-real_score).mean() + nn.functional.softplus(fake_score).mean()
        )
        discriminator.zero_grad()
        d_loss.backward()
        d_optimizer.step()

        requires_grad(generator, True)
        requires_grad(discriminator, False)
        fake = generator(torch.randn(BATCH, NOISE, generator=random))
        g_loss = nn.functional.softplus(-discriminator(fake)).mean()
        generator.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), generator.module.parameters(), strict=False):
                kept.lerp_(now, 0.1)

        losses = torch.stack([d_loss.detach(), g_loss.detach()]) / size
        dist.all_reduce(losses)
        if rank == 0:
            print(f"step {step}: discriminator {losses[0]:.6f}, generator {losses[1]:.6f}")
    total = sum(p.double().sum().item() for p in average.parameters())
    if rank == 0:
        print(f"average {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
