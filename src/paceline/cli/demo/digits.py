"""Handwritten digits, and a small convolutional net that reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TRAINING = 1440  # of 1797; the rest is for the test
NEEDS = "the digits come with scikit-learn; install it (pip install scikit-learn)"


@dataclass(frozen=True)
class Digits:
    """Pairs of images (1 x 8 x 8, from 0 to 1) and labels."""

    training: TensorDataset
    test: TensorDataset


def load_digits() -> Digits:
    """scikit-learn's digits, shuffled the same way every time."""
    from sklearn import datasets  # type: ignore[import-untyped, unused-ignore]

    found = datasets.load_digits()
    images = torch.tensor(found.images).float().unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = [TensorDataset(images[at], labels[at]) for at in (order[:TRAINING], order[TRAINING:])]
    return Digits(*parts)


def make_net() -> nn.Module:
    """Two convolutions with batch norm, then one layer for the ten digits."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32)):
        layers.append(nn.Conv2d(before, after, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4, 10))


def draw(image: Tensor) -> list[str]:
    """An image as lines of text."""
    shades = " .:*#"
    rows = (image.squeeze(0) * (len(shades) - 1)).round().long().tolist()
    return ["".join(2 * shades[value] for value in row) for row in rows]
