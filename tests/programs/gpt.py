"""A small GPT in the style of nanoGPT: gradient accumulation, no_sync by an attribute, clipping."""

import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY, BLOCK, WIDTH, LAYERS, HEADS = 64, 32, 64, 2, 4
ACCUMULATE, STEPS, BATCH = 4, 6, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (z.view(b, t, HEADS, c // HEADS).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.head.weight  # tied

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def batches(rank):
    """Text that repeats, so that there is something to learn."""
    text = (torch.arange(5000) ** 2 // 7) % VOCABULARY
    generator = torch.Generator().manual_seed(1337 + rank)
    while True:
        starts = torch.randint(len(text) - BLOCK - 1, (BATCH,), generator=generator)
        yield (
            torch.stack([text[i : i + BLOCK] for i in starts]),
            torch.stack([text[i + 1 : i + 1 + BLOCK] for i in starts]),
        )


def learning_rate(step):
    return 3e-3 * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def main():
    dist.init_process_group(backend="gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1337)
    model = DDP(GPT())
    raw = model.module
    decay = [p for p in raw.parameters() if p.dim() >= 2]
    plain = [p for p in raw.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=3e-3
    )
    data = batches(rank)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        for micro in range(ACCUMULATE):
            # The context manager would do; the original sets the attribute.
            model.require_backward_grad_sync = micro == ACCUMULATE - 1
            with nullcontext():
                _, loss = model(*next(data))
                loss = loss / ACCUMULATE
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach().clone() * ACCUMULATE / size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.6f}, norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
