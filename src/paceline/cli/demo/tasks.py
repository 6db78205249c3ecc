"""What the demo can train: a GPT over characters, a net that reads digits. One class for each.

A task knows its model, its data and its measure, and nothing of ranks but how to deal the data.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from ... import metrics
from ...data import DistributedSampler
from ...groups import Group
from . import digits, gpt
from .text import Batch, batches, cut, load_library


class DemoTask(Protocol):
    """Something to train; ``Any`` is its kind of batch."""

    title: str
    measure: str  # what check() returns
    unit: str  # of it; empty if it has none
    steps: int  # enough for a good result
    seconds: float  # on a slow machine it ends here, with fewer steps

    def model(self) -> nn.Module:
        """A new model; the same on every rank, if the seed is."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        """What trains it, with the highest learning rate that it will be given."""

    def batches(self, group: Group) -> Iterator[Any]:
        """This rank's batches, without end."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over a batch."""

    def samples(self, batch: Any) -> int:
        """How many samples a batch has."""

    def check(self, model: nn.Module, group: Group) -> float:
        """The measure, on data that is not trained on; all ranks share the work."""

    def show(self, model: nn.Module) -> str:
        """What the model can do, to look at."""


class GptTask:
    """Characters of the standard library's source."""

    title = "a GPT over characters, on the standard library's source"
    measure, unit = "held-out loss", "nats per character"
    steps, seconds = 800, 180.0
    batch, context, asked = 8, 64, 256  # sequences of a rank, their length, sequences of a check

    def model(self) -> nn.Module:
        """About 300 thousand parameters."""
        return gpt.CharGPT(
            context=self.context,
            width=96,
            heads=3,
            depth=2,
            recent=4,
            columns=True,
            bend=gpt.squared_relu,
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW, as usual for a GPT."""
        return AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def batches(self, group: Group) -> Iterator[Batch]:
        """Stretches from anywhere in the training files."""
        text = load_library().training
        return batches(
            group.rank(), group.size(), batch_size=self.batch, context=self.context, text=text
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Nats per character."""
        return gpt.loss_of(model, batch)

    def samples(self, batch: Batch) -> int:
        """How many sequences."""
        return len(batch)

    def check(self, model: nn.Module, group: Group) -> float:
        """The mean loss over stretches of the held-out files."""
        text = load_library().held_out
        generator = torch.Generator().manual_seed(1)
        starts = torch.randint(len(text) - self.context, (self.asked,), generator=generator)
        mine = cut(text, starts[group.rank() :: group.size()], self.context)
        losses = torch.cat([gpt.losses_of(model, part) for part in mine.split(64)])
        return float(metrics.mean(losses, group))

    def show(self, model: nn.Module) -> str:
        """A page that it writes."""
        assert isinstance(model, gpt.CharGPT)
        return gpt.write(model, "class Reader:\n    def ", 500, warmth=0.8)


class DigitsTask:
    """Handwritten digits; the last batch of an epoch is smaller, which weights make exact."""

    title = "a convolutional net, on handwritten digits"
    measure, unit = "test accuracy", ""
    steps, seconds = 240, 60.0
    batch = 32

    def model(self) -> nn.Module:
        """About six thousand parameters, and buffers of batch norm."""
        return digits.make_net()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Plain SGD with momentum."""
        return SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batches(self, group: Group) -> Iterator[list[Tensor]]:
        """Epoch after epoch, each in another order."""
        images = digits.load_digits().training
        sampler = DistributedSampler(images, group=group)
        loader = DataLoader(images, batch_size=self.batch, sampler=sampler)
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Cross entropy."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def samples(self, batch: list[Tensor]) -> int:
        """How many images."""
        return len(batch[1])

    def check(self, model: nn.Module, group: Group) -> float:
        """The share of test images that it reads right."""
        images, labels = digits.load_digits().test[group.rank() :: group.size()]
        model.eval()
        with torch.no_grad():
            right = model(images).argmax(1) == labels
        model.train()
        return float(metrics.mean(right, group))

    def show(self, model: nn.Module) -> str:
        """Some test images side by side, and what it takes them for."""
        images, labels = digits.load_digits().test[:4]  # what fits on 80 columns
        model.eval()
        with torch.no_grad():
            read = model(images).argmax(1).tolist()
        lines = ["  ".join(row) for row in zip(*map(digits.draw, images), strict=True)]
        said = [f"read as {guess}, is {label}" for guess, label in zip(read, labels, strict=True)]
        return "\n".join([*lines, "  ".join(f"{text:16}" for text in said)])


TASKS: dict[str, type[DemoTask]] = {"gpt": GptTask, "digits": DigitsTask}


def missing(name: str) -> str:
    """What a task needs that is not here, in words; empty if nothing is."""
    if name == "digits" and importlib.util.find_spec("sklearn") is None:
        return digits.NEEDS
    return ""
