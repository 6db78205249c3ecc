"""Gradients that came by a way on which nobody saw them are said before an optimizer uses them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel
from paceline.groups import Group
from paceline.testing import run_ranks

LAYERS = 20  # more than are listened to


class Aside(nn.Module):
    """Leaves a loss of one layer on itself, besides what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(LAYERS))
        self.aside: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 4:
                self.aside = layer(x.detach()).sum()
        return x


def train(group: Group) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Aside(), process_group=group)
    for _ in range(2):
        ddp(torch.ones(2, 2)).sum().backward()
        ddp.zero_grad()
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def test_an_optimizer_is_warned_of_gradients_that_nobody_saw() -> None:
    first, second = run_ranks(2, _warned_one_after_the_other)
    assert first.startswith("rank 0: layers.4.")
    assert second == "not asked"


def _warned_one_after_the_other(group: Group) -> str:
    """Warnings are caught for the whole process, so the ranks take turns."""
    ddp, optimizer = train(group)
    ddp(torch.ones(2, 2))
    assert ddp.module.aside is not None
    ddp.module.aside.backward()
    text = "not asked"
    if group.rank() == 0:
        with pytest.warns(RuntimeWarning, match="no backward pass was seen") as caught:
            optimizer.step()
        text = str(caught[0].message)
    else:
        ddp.replica.reducer.listeners.hear_all()
    group.barrier()
    optimizer.zero_grad()
    ddp(torch.ones(2, 2))
    (ddp.module.aside * (2.0 * group.rank() + 1)).backward()  # now it is seen, and averaged
    assert ddp.module.layers[4].bias.grad.tolist() == [4.0, 4.0]
    return text


def test_nothing_is_said_of_what_was_averaged_or_set_by_nobody() -> None:
    def one_rank(group: Group) -> None:
        ddp, optimizer = train(group)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                ddp(torch.ones(2, 2)).sum().backward()
                ddp(torch.ones(2, 2))  # and no backward pass
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(1, one_rank)
    run_ranks(2, one_rank)
