"""What the examples share: a small task, a small model, and how a script gets its ranks."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import TensorDataset


def spirals(samples: int = 512) -> TensorDataset:
    """Points on two spirals, wound around each other, and which of the two each is on."""
    side = torch.arange(samples) % 2
    turn = torch.linspace(1, 5, samples)
    angle = turn + math.pi * side
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 5
    return TensorDataset(points, side)


def make_model() -> nn.Module:
    """The same on every call and every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )


def start(main: Callable[[], None], ranks: int = 2) -> None:
    """Call ``main`` if a launcher started this process; else become a launcher of ``ranks``."""
    if "RANK" in os.environ:
        main()
        return
    print(f"paceline run --nproc {ranks} {' '.join(sys.argv)}", flush=True)
    launcher = ["-m", "paceline", "run", "--nproc", str(ranks)]
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])
