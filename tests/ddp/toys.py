"""Small models with known weights, their data, and the ranks' losses in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from paceline.groups import Group

TINY = 1e-4  # MiB: a hundred bytes, so that every layer has a bucket of its own

Grads = dict[str, "Tensor | None"]


def data(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that are the same on every rank and in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    """Known weights: torch's random state is shared by ranks that are threads."""
    for number, param in enumerate(module.parameters()):
        param.data.copy_(data(*param.shape, seed=1000 * seed + number) * 0.3)
    return module


def stack(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Linear layers with tanh between them, in float64."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, dtype=torch.float64), nn.Tanh()]
    return fill(nn.Sequential(*layers[:-1]), seed)  # type: ignore[return-value]


class Branches(nn.Module):
    """A first layer, then those of three others that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.others = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))
        fill(self)

    def forward(self, x: Tensor, chosen: Sequence[int] = (0, 1, 2)) -> Tensor:
        x = self.first(x)
        for number in chosen:
            x = torch.tanh(self.others[number](x))
        return x


def grads(module: nn.Module) -> Grads:
    """Copies of the gradients by name, without a wrapper's prefix."""
    module = getattr(module, "module", module)
    return {
        name: None if p.grad is None else p.grad.detach().to_dense().clone()
        for name, p in module.named_parameters()
    }


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights by name, without a wrapper's prefix."""
    module = getattr(module, "module", module)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def mean_grads(module: nn.Module, ranks: int, loss: Callable[[Any, int], Tensor]) -> Grads:
    """What one process gets from the mean of ``loss(model, rank)`` over the ranks."""
    module = copy.deepcopy(module)
    (sum(loss(module, rank) for rank in range(ranks)) / ranks).backward()  # type: ignore[union-attr]
    return grads(module)


def assert_same(found: Any, expected: Any, **close: Any) -> None:
    """The same names, the same ones None, the same numbers."""
    assert [n for n, g in found.items() if g is None] == [
        n for n, g in expected.items() if g is None
    ]
    for name, value in expected.items():
        if value is not None:
            assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **close)


def count_calls(group: Group) -> list[str]:
    """A list that grows with every collective this rank begins."""
    calls: list[str] = []
    group.register_hooks(lambda call: calls.append(call.kind), None)
    return calls
