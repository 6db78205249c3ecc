"""What tests of averages that a program waits for itself share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.groups import Group
from paceline.testing import run_ranks
from tests.ddp.toys import data, mean_grads, stack


def batch(rank: int, step: int = 0) -> Tensor:
    return data(4, 3, seed=10 * step + rank)


def loss(model: Any, rank: int, step: int = 0) -> Tensor:
    return model(batch(rank, step)).square().sum()


def model() -> nn.Sequential:
    return stack(3, 4, 2)


def manual(group: Group, module: nn.Module | None = None, **options: Any) -> Any:
    ddp = DDP(model() if module is None else module, process_group=group, **options)
    ddp.require_manual_backward_finalization = True
    return ddp


def expected(step: int = 0, ranks: int = 2) -> Any:
    return mean_grads(model(), ranks, lambda m, rank: loss(m, rank, step))


def backward(ddp: Any, group: Group, step: int = 0) -> None:
    loss(ddp, group.rank(), step).backward()


def in_two(one_rank: Callable[[Group], None]) -> None:
    run_ranks(2, one_rank)


def slow_average(group, bucket):
    """A hook of which nobody knows whether it sends something more when it is waited for."""
    work = group.all_reduce(bucket.buffer().div_(group.size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
