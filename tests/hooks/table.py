"""Every hook in a table, and the models and losses that tests give them.

Ranks that are threads share torch's random numbers; nothing here draws from those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline import hooks
from tests.ddp.toys import data, fill

WIDE = 12  # wide enough for matrices of rank 2 to be worth it


@dataclass(frozen=True)
class Entry:
    """A hook, the state it wants for a group, and how much of its average may be wrong."""

    hook: Callable[..., Any]
    state: Callable[[Any], Any] = lambda group: group
    close: float = 0.0  # relative; 0: as close as without a hook


def power(group: Any, **settings: Any) -> hooks.PowerSGDState:
    """A state that approximates from the third pass on."""
    settings = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2} | settings
    return hooks.PowerSGDState(group, **settings)


def whole(group: Any) -> hooks.PowerSGDState:
    """One whose approximations are exact: as many columns as there are."""
    return power(group, matrix_approximation_rank=WIDE, min_compression_rate=0.1)


def forgetful(group: Any) -> hooks.PowerSGDState:
    """One that projects gradients as they are: no more than all of a bucket gets lost."""
    return power(group, use_error_feedback=False)


def local(group: Any) -> hooks.PostLocalSGDState:
    """Local steps from the third pass on, in a subgroup of all."""
    return hooks.PostLocalSGDState(group, group, 2)


TABLE: dict[str, Entry] = {
    "allreduce": Entry(hooks.allreduce_hook),
    "fp16": Entry(hooks.fp16_compress_hook, close=2e-3),
    "bf16": Entry(hooks.bf16_compress_hook, close=2e-2),
    "fp16 wrapper": Entry(hooks.fp16_compress_wrapper(hooks.allreduce_hook), close=2e-3),
    "bf16 wrapper": Entry(hooks.bf16_compress_wrapper(hooks.allreduce_hook), close=2e-2),
    "8 bits": Entry(hooks.quantization_pertensor_hook, close=2e-2),
    "8 bits a row": Entry(hooks.quantization_perchannel_hook, close=2e-2),
    "PowerSGD": Entry(hooks.powerSGD_hook, power, close=1.0),
    "PowerSGD in full": Entry(hooks.powerSGD_hook, whole, close=1e-9),
    "PowerSGD in 16 bits": Entry(
        hooks.fp16_compress_wrapper(hooks.powerSGD_hook), whole, close=5e-3
    ),
    "batched PowerSGD": Entry(hooks.batched_powerSGD_hook, forgetful, close=1.5),
    "post-local SGD": Entry(hooks.post_localSGD_hook, local),
}


class Net(nn.Module):
    """Two matrices of one shape, one of another, and vectors."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.a = nn.Linear(WIDE, WIDE, dtype=dtype)
        self.b = nn.Linear(WIDE, WIDE, dtype=dtype)
        self.c = nn.Linear(WIDE, 7, dtype=dtype)
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def batch(rank: int, step: int = 0, *, rows: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    """What ``rank`` trains on in ``step``."""
    return data(rows, WIDE, seed=100 * step + rank).to(dtype)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over the batch, not too even."""
    return model(x).square().mean()


def assert_near(found: dict[str, Any], expected: dict[str, Any], close: float) -> None:
    """The length of what is wrong, relative to that of what is right."""
    for name, value in expected.items():
        wrong = float((found[name] - value).norm() / value.norm())
        assert wrong <= (close or 1e-12), f"{name}: {wrong:.3g} of it is wrong"
