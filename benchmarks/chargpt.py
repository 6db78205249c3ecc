"""A small GPT over characters, and the text it learns: the Python standard library's own source.

    python benchmarks/chargpt.py        trains it on one process for 300 steps and prints the loss

Several benchmarks and tests train this one, so that their losses can be compared. The text needs no
download and is the same on every run of one Python version: all modules of the standard library,
sorted by path, without its tests. Ranks draw from one sequence of batches, so that two ranks with a
batch of 8 see what one rank with a batch of 16 sees.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 128  # ASCII; any other byte is read as 127
SKIPPED = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Batch:
    """Characters, and for each of them the one that follows."""

    inputs: Tensor
    targets: Tensor


@lru_cache(maxsize=4)
def load_text(limit_bytes: int = 4 << 20) -> Tensor:
    """The first ``limit_bytes`` of the library's source, one number below ``VOCAB`` for each."""
    text = bytearray()
    for path in _sources():
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    if not text:
        raise FileNotFoundError("this Python has no standard library source to learn from")
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8).clamp(max=VOCAB - 1)


def _sources() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(root).parts):
            yield path


def batches(
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    *,
    batch_size: int = 8,
    context: int = 64,
    limit_bytes: int = 4 << 20,
) -> Iterator[Batch]:
    """This rank's share of an endless sequence of batches; ``batch_size`` is that of one rank."""
    text = load_text(limit_bytes).long()
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (world * batch_size,), generator=generator)
        mine = text[starts[rank::world, None] + offsets]
        yield Batch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())


class Block(nn.Module):
    """Attention to the past, then a layer of its own for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _attend(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.qkv(x).view(count, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return seen.transpose(1, 2).reshape(count, length, width)


class CharGPT(nn.Module):
    """Guesses the next character from those before it."""

    def __init__(
        self,
        vocab: int = VOCAB,
        context: int = 64,
        width: int = 64,
        heads: int = 4,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocab, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.apply(_initialise)
        for block in self.blocks:  # so that the sum over blocks begins at the size of one
            for layer in (block.out, block.down):
                layer.weight.data.div_((2 * depth) ** 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        places = self.places.weight[: inputs.shape[1]]
        return self.head(self.norm(self.blocks(self.characters(inputs) + places)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the next character, in nats; ``model`` may be wrapped."""
    guesses = model(batch.inputs)
    return F.cross_entropy(guesses.flatten(0, 1), batch.targets.flatten())


def main(steps: int = 300) -> None:
    torch.manual_seed(0)
    model = CharGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    began, recent = time.perf_counter(), []
    for step, batch in zip(range(1, steps + 1), batches(), strict=False):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        recent.append(float(loss.detach()))
        if step % 50 == 0:
            seconds = time.perf_counter() - began
            print(f"step {step:4d}  loss {sum(recent[-50:]) / 50:.3f}  {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
