"""Five mistakes that make ranks wait for each other, each planted on rank 1.

A line that the verdict has to name ends in a comment with its name; :func:`line` finds it.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.groups import Group, Store


def line(name: str) -> str:
    """Where the line with this name is, as verdicts write it."""
    for number, text in enumerate(Path(__file__).read_text().splitlines(), start=1):
        if text.endswith(f"# {name}"):
            return f"bugs.py:{number}"
    raise LookupError(name)


def model_on(group: Group) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return paceline.DistributedDataParallel(model, process_group=group)


def skipped_backward(group: Group, _store: Store) -> None:
    model = model_on(group)
    for step in range(3):
        loss = model(torch.ones(2, 8)).sum()  # the forward
        if group.rank() == 1 and step == 1:
            continue
        loss.backward()  # the backward
    group.barrier()  # the barrier


def swapped_order(group: Group, _store: Store) -> None:
    small, large = torch.zeros(4), torch.zeros(1000)
    group.barrier()
    if group.rank() == 0:
        group.all_reduce(small)  # the sum first
        group.broadcast(large, 0)
    else:
        group.broadcast(large, 0)  # the broadcast first
        group.all_reduce(small)


def other_shape(group: Group, _store: Store) -> None:
    group.barrier()
    if group.rank() == 0:
        group.all_reduce(torch.zeros(5))  # five
    else:
        group.all_reduce(torch.zeros(4))  # four
    while True:  # gloo may take the wrong size for the right one, and break at the next call
        group.all_reduce(torch.zeros(5))


def early_exit(group: Group, _store: Store) -> None:
    for step in range(3):
        group.all_reduce(torch.zeros(4))  # the last one
        if group.rank() == 1 and step == 1:
            return


def stuck_loader(group: Group, store: Store) -> None:
    def batches() -> Iterator[torch.Tensor]:
        for step in range(3):
            if group.rank() == 1 and step == 2:
                store.wait(["explained"])  # the loader
            yield torch.ones(2, 8)

    for batch in batches():
        group.all_reduce(batch)  # the step


BUGS = (skipped_backward, swapped_order, other_shape, early_exit, stuck_loader)
