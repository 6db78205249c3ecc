"""What tests of the sharded optimizer share: a model, some training, groups of every kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.groups import ProcessGroup
from paceline.testing import Meeting
from tests.ddp.toys import data, stack

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
}


def model() -> nn.Sequential:
    """Four parameters, 66 elements: nothing divides them by four ranks."""
    return stack(5, 7, 3)


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    """Some steps on data that depends on their numbers only."""
    for step in steps:
        optimizer.zero_grad()
        net(data(4, 5, seed=step)).square().sum().backward()
        optimizer.step()


def weights(net: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [param.detach().clone() for param in net.parameters()]


def alone(name: str, steps: int = 4) -> tuple[list[Tensor], dict[str, Any]]:
    """What one process gets with the ordinary optimizer."""
    kind, settings = OPTIMIZERS[name]
    net = model()
    optimizer = kind(net.parameters(), **settings)
    train(net, optimizer, range(steps))
    return weights(net), optimizer.state_dict()


def assert_equal_weights(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit."""
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b), float((a - b).abs().max())


def assert_equal_states(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same state dict, bit for bit."""
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, own in expected["state"].items():
        assert list(found["state"][number]) == list(own)
        for name, value in own.items():
            other = found["state"][number][name]
            if isinstance(value, Tensor):
                assert torch.equal(other, value), (number, name)
                assert other.stride() == value.stride()
            else:
                assert other == value


@contextmanager
def group_of(meeting: Meeting, backend: str) -> Any:
    """A group of ours, or with "torch" torch's own default group over gloo."""
    if backend != "torch":
        with meeting.new_group(backend) as group:
            yield group
        return
    store, rank, size = meeting.store(), meeting.rank, meeting.size
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
        dist.barrier()  # else one ends while the other connects to it
    finally:
        dist.destroy_process_group()


Ranks = Callable[[ProcessGroup], Any]
