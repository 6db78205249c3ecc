"""The ways in which two ranks may share what they learn, for ``wire.py``.

Every way makes a :class:`Trainer` from the same model. All use the same AdamW with the same rate.

**torch's PowerSGD** gets one bucket for all parameters. Over gloo it needs that: its callbacks
start further collectives whenever the ones before happen to be done, and with two buckets in an
order that differs between the ranks, which gloo answers by ending the process.

**DiLoCo's outer optimizer** is plain SGD with a rate of 1, so an exchange takes the mean of the
ranks' models. The usual Nesterov momentum of 0.9 pays off over hundreds of exchanges; here there
are about ten.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import paceline
from paceline import hooks
from paceline.groups import Group
from paceline.optim import DiLoCo
from paceline.testing import Meeting

RATE = 5e-4
ONE_BUCKET = 25.0  # MiB
WARM_UP = 2  # steps that are sent whole, by codecs as by torch's PowerSGD
ROUND = 10  # steps between two exchanges of DiLoCo
OUTER = partial(SGD, lr=1.0)
ALONE, REFERENCE = "no exchange", "torch DDP"


@dataclass(frozen=True)
class Trainer:
    """What makes a step."""

    model: nn.Module
    optimizer: Optimizer
    group: Group | None = None  # paceline's, whose traffic is counted

    def payload(self) -> float:
        """Bytes that the group has counted so far; torch's count nothing."""
        return self.group.traffic.bytes_sent if self.group is not None else 0.0


Build = Callable[[nn.Module, Meeting, ExitStack], Trainer]


@dataclass(frozen=True)
class Way:
    """How to make its trainer, and how many times the reference's steps it may take."""

    build: Build
    patience: float = 1.0
    always: bool = True  # else only where there is time


def make_optimizer(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=RATE, fused=True)


def alone(model: nn.Module, meeting: Meeting, opened: ExitStack) -> Trainer:
    return Trainer(model, make_optimizer(model))


# -- torch's ----------------------------------------------------------------------------------


def torch_ddp(
    hook: Callable[[DistributedDataParallel], None] | None = None, cap: float | None = None
) -> Build:
    def build(model: nn.Module, meeting: Meeting, opened: ExitStack) -> Trainer:
        dist.init_process_group(
            "gloo", store=meeting.store(), rank=meeting.rank, world_size=meeting.size
        )
        opened.callback(dist.destroy_process_group)
        ddp = DistributedDataParallel(model, bucket_cap_mb=cap)
        if hook is not None:
            hook(ddp)
        return Trainer(ddp, make_optimizer(model))

    return build


def fp16(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def power_sgd(rank: int) -> Callable[[DistributedDataParallel], None]:
    def register(ddp: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=WARM_UP,
            min_compression_rate=1,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


# -- paceline's -------------------------------------------------------------------------------


def open_group(meeting: Meeting, opened: ExitStack) -> Group:
    return opened.enter_context(meeting.new_group("gloo"))


def paceline_ddp(codec: Callable[[], hooks.Codec] | None = None) -> Build:
    def build(model: nn.Module, meeting: Meeting, opened: ExitStack) -> Trainer:
        group = open_group(meeting, opened)
        ddp = paceline.DistributedDataParallel(model, process_group=group)
        if codec is not None:
            hooks.CodecHook(codec(), warm_up=WARM_UP).register(ddp)
        return Trainer(ddp, make_optimizer(model), group)

    return build


def diloco(codec: Callable[[], hooks.Codec] | None = None, **settings: Any) -> Build:
    def build(model: nn.Module, meeting: Meeting, opened: ExitStack) -> Trainer:
        group = open_group(meeting, opened)
        optimizer = DiLoCo(
            model,
            make_optimizer(model),
            OUTER,
            sync_every=ROUND,
            codec=codec() if codec else None,
            process_group=group,
            **settings,
        )
        return Trainer(model, optimizer, group)

    return build


WAYS = {
    ALONE: Way(alone, 0.3),
    REFERENCE: Way(torch_ddp()),
    "paceline": Way(paceline_ddp()),
    "torch DDP, fp16": Way(torch_ddp(fp16), 1.2),
    "paceline, Int8": Way(paceline_ddp(hooks.Int8), 1.2),
    "torch DDP, PowerSGD 1": Way(torch_ddp(power_sgd(1), ONE_BUCKET), 2.0),
    "paceline, PowerSGD 1": Way(paceline_ddp(lambda: hooks.PowerSGD(1)), 2.0),
    "torch DDP, PowerSGD 4": Way(torch_ddp(power_sgd(4), ONE_BUCKET), 1.5, always=False),
    "paceline, PowerSGD 4": Way(paceline_ddp(lambda: hooks.PowerSGD(4)), 1.5, always=False),
    "paceline, TopK 1%, Int8": Way(
        paceline_ddp(lambda: hooks.TopK(0.01) | hooks.Int8()), 2.0, always=False
    ),
    "paceline, Sign": Way(paceline_ddp(hooks.Sign), 1.5),
    "paceline, DiLoCo": Way(diloco(), 2.0, always=False),
    "paceline, DiLoCo, Int8": Way(diloco(hooks.Int8), 2.0),
    "paceline, DiLoCo, Int8, streaming": Way(diloco(hooks.Int8, fragments=2, overlap=1), 2.0),
}
