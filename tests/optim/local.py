"""What tests of local training share: a model, its data, and how a rank trains alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.ddp.ranks import batch, seeded

Weights = dict[str, Tensor]


class Small(nn.Module):
    """Two layers with a batch norm between them: parameters, real buffers and a whole number."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(6, dtype=dtype)
        self.last = nn.Linear(6, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


def small(seed: int = 0, dtype: torch.dtype = torch.float64) -> Small:
    """The same one for the same seed."""
    return seeded(lambda: Small(dtype), seed)


def plain(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """One without buffers, of four parameters."""
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(4, 6, dtype=dtype), nn.Tanh(), nn.Linear(6, 2, dtype=dtype)
        ),
        seed,
    )


def loss_of(model: nn.Module, rank: int, step: int, size: int = 3) -> Tensor:
    """The loss of ``rank`` in ``step``, of the sum over its samples divided by their number."""
    dtype = next(model.parameters()).dtype
    out: Tensor = model(batch(rank, step, shape=(size, 4), dtype=dtype))
    return (out - 0.1 * (rank + 1)).pow(2).mean()


def train(model: nn.Module, opt: Any, rank: int, steps: range, **step: Any) -> None:
    """Train on the data of ``rank``."""
    for number in steps:
        opt.zero_grad()
        loss_of(model, rank, number).backward()
        opt.step(**step)


def weights_of(model: nn.Module) -> Weights:
    """Copies of parameters and buffers, by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(a: Weights, b: Weights) -> bool:
    """Whether they are equal to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def assert_all_equal(found: list[Weights]) -> None:
    """All ranks have the same bits."""
    for rank, other in enumerate(found[1:], 1):
        for name, value in found[0].items():
            assert torch.equal(value, other[name]), f"rank {rank}: {name} differs"


def assert_close(a: Weights, b: Weights, **close: Any) -> None:
    """The same names, the same numbers."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], msg=lambda text, name=name: f"{name}: {text}", **close
        )


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    """Plain SGD on all of a model."""
    return torch.optim.SGD(model.parameters(), lr, **options)


Make = Callable[[nn.Module], Any]
