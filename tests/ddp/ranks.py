"""What tests of the wrapper share: data that each rank can tell, averages to compare, calls seen.

Ranks that are threads share torch's random numbers; nothing here draws from those.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.groups import Call, Group

M = TypeVar("M", bound=nn.Module)
_building = threading.Lock()


def seeded(make: Callable[[], M], seed: int = 0) -> M:
    """The model that ``make`` builds, the same one for the same seed."""
    with _building, torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def batch(
    rank: int, step: int = 0, *, shape: Sequence[int] = (3, 4), dtype: torch.dtype = torch.float32
) -> Tensor:
    """What ``rank`` trains on in ``step``."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=source, dtype=dtype)


def mlp() -> nn.Sequential:
    """Four inputs, two outputs, four parameters."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of what ``.grad`` holds, by name."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def mean_grads(
    model: nn.Module, ranks: int, backward: Callable[[nn.Module, int], None]
) -> dict[str, Tensor]:
    """The mean over ranks of the gradients one process has when it does each rank's work."""
    model = copy.deepcopy(model)
    for rank in range(ranks):
        backward(model, rank)
    return {n: p.grad / ranks for n, p in model.named_parameters() if p.grad is not None}


def watch(group: Group) -> list[tuple[str, int]]:
    """A list that each collective of ``group`` is added to, as its kind and number of elements."""
    seen: list[tuple[str, int]] = []

    def note(call: Call) -> None:
        seen.append((call.kind, sum(t.numel() for t in call.inputs)))

    group.register_hooks(before=note)
    return seen
