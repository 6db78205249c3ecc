"""A small GPT over characters: the model of ``paceline demo``, of some benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .text import NEWLINE, VOCAB, Batch, to_numbers, to_text


class Block(nn.Module):
    """A transformer block: causal attention, then a feed-forward layer."""

    def __init__(self, width: int, heads: int, bend: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.heads, self.bend = heads, bend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of attention and of the feed-forward layer to ``x``."""
        x = x + self.out(self._attend(self.norm1(x)))
        y: Tensor = self.down(self.bend(self.up(self.norm2(x))))
        return x + y

    def _attend(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.qkv(x).view(count, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return seen.transpose(1, 2).reshape(count, length, width)


class CharGPT(nn.Module):
    """Guesses the next character from those before it.

    Two things that attention would find out by itself, after long training, can be told to it. With
    ``recent`` above 1 each place starts from that many characters, not only from its own. With
    ``columns`` it also knows how far it is from the start of its line.
    """

    def __init__(
        self,
        vocab: int = VOCAB,
        context: int = 64,
        width: int = 64,
        heads: int = 4,
        depth: int = 2,
        recent: int = 1,
        columns: bool = False,
        bend: Callable[[Tensor], Tensor] = F.gelu,
    ) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(vocab, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, bend) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.before = nn.ModuleList(nn.Embedding(vocab, width) for _ in range(recent - 1))
        self.columns = nn.Embedding(2 * context, width) if columns else None
        self.apply(_initialise)
        for block in self.blocks.children():  # so that the sum over blocks begins at one's size
            for name in ("out", "down"):
                block.get_submodule(name).get_parameter("weight").data.div_((2 * depth) ** 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """For each place, a number for every character that may follow."""
        x = self.characters(inputs) + self.places.weight[: inputs.shape[1]]
        for back, earlier in enumerate(self.before, 1):
            x = x + F.pad(earlier(inputs[:, :-back]), (0, 0, back, 0))
        if self.columns is not None:
            x = x + self.columns(columns_of(inputs, self.context))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def columns_of(inputs: Tensor, context: int) -> Tensor:
    """How many characters ago the line began; ``context`` more where that is out of sight."""
    places = torch.arange(1, inputs.shape[1] + 1)
    last = (places * (inputs == NEWLINE)).cummax(1).values
    return torch.where(last > 0, places - last, context - 1 + places)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def squared_relu(x: Tensor) -> Tensor:
    """The activation: GELU would take a quarter of a step on some CPUs."""
    return F.relu(x).square()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the next character, in nats; ``model`` may be wrapped."""
    guesses = model(batch.inputs)
    return F.cross_entropy(guesses.flatten(0, 1), batch.targets.flatten())


@torch.no_grad()
def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of each sequence of a batch, without gradients."""
    guesses = model(batch.inputs).flatten(0, 1)
    each = F.cross_entropy(guesses, batch.targets.flatten(), reduction="none")
    return each.view_as(batch.targets).mean(1)


@torch.no_grad()
def write(model: CharGPT, prompt: str, length: int, *, warmth: float = 0.7, seed: int = 0) -> str:
    """``prompt`` and ``length`` characters more, as the model would go on."""
    generator = torch.Generator().manual_seed(seed)
    row = to_numbers(prompt)
    for _ in range(length):
        guesses = model(row[:, -model.context :])[0, -1] / warmth
        drawn = torch.multinomial(guesses.softmax(0), 1, generator=generator)
        row = torch.cat([row, drawn[None]], dim=1)
    return to_text(row[0].tolist())
