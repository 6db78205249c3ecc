"""Hooks by name, the group that None stands for, and torch's mixed-precision hook."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms import ddp_comm_hooks

import paceline
from paceline import DistributedDataParallel as DDP
from paceline import groups, hooks
from paceline.ddp import _MixedPrecision
from paceline.groups import Group
from paceline.testing import run_ranks
from tests.ddp.toys import assert_same, grads, mean_grads
from tests.hooks.table import Net, assert_near, batch, loss

MEAN = mean_grads(Net(), 2, lambda model, rank: loss(model, batch(rank)))
KINDS = list(hooks.DDPCommHookType)


def test_every_name_that_torch_has_is_there() -> None:
    assert [kind.name for kind in KINDS] == [k.name for k in ddp_comm_hooks.DDPCommHookType]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_hook_is_registered_by_name(kind: hooks.DDPCommHookType) -> None:
    def one_rank(group: Group) -> Any:
        ddp = DDP(Net(), process_group=group)
        hooks.register_ddp_comm_hook(kind, ddp, group)
        for _ in range(2):
            ddp.zero_grad()
            loss(ddp, batch(group.rank())).backward()
        return grads(ddp), ddp._get_ddp_logging_data()["comm_hook"]

    for rank, (found, name) in enumerate(run_ranks(2, one_rank)):
        if kind is hooks.DDPCommHookType.NOOP:
            own = mean_grads(Net(), 1, lambda model, _, rank=rank: loss(model, batch(rank)))
            assert_same(found, own)
        else:
            assert_near(found, MEAN, 0.02)
        assert name == kind.value.keywords["comm_hook"].__qualname__


def test_none_stands_for_the_current_group() -> None:
    def one_rank(group: Group) -> Any:
        with paceline.process_group(group):
            ddp = DDP(Net())
            ddp.register_comm_hook(None, hooks.fp16_compress_hook)
            loss(ddp, batch(group.rank())).backward()
        return grads(ddp)

    for found in run_ranks(2, one_rank):
        assert_near(found, MEAN, 2e-3)


def test_none_without_any_group_says_so() -> None:
    with pytest.raises(ValueError, match="process group"):
        groups.group_or_default(None)


PAIRS = {
    name: (getattr(hooks, name), getattr(module, name))
    for module, names in {
        ddp_comm_hooks.default_hooks: [
            "allreduce_hook",
            "fp16_compress_hook",
            "bf16_compress_hook",
            "fp16_compress_wrapper",
            "bf16_compress_wrapper",
        ],
        ddp_comm_hooks.debugging_hooks: ["noop_hook"],
        ddp_comm_hooks.quantization_hooks: [
            "quantization_pertensor_hook",
            "quantization_perchannel_hook",
        ],
        ddp_comm_hooks.powerSGD_hook: [
            "powerSGD_hook",
            "batched_powerSGD_hook",
            "PowerSGDState",
        ],
        ddp_comm_hooks.optimizer_overlap_hooks: ["_hook_then_optimizer", "_OptimizerHookState"],
        ddp_comm_hooks: ["register_ddp_comm_hook"],
    }.items()
    for name in names
}


@pytest.mark.parametrize("name", PAIRS)
def test_arguments_are_called_as_in_torch(name: str) -> None:
    ours, theirs = (inspect.signature(f).parameters.values() for f in PAIRS[name])
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


@pytest.mark.parametrize("name", [name for name in PAIRS if name.endswith("_hook")])
def test_annotations_are_those_that_torchs_ddp_looks_for(name: str) -> None:
    if name == "register_ddp_comm_hook":
        return
    signature = inspect.signature(getattr(hooks, name))
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]


def test_torchs_mixed_precision_hook_averages_in_the_type_it_is_told() -> None:
    def one_rank(group: Group) -> Any:
        ddp = DDP(Net(), process_group=group)
        ddp.mixed_precision = _MixedPrecision(reduce_dtype=torch.bfloat16)
        state = hooks._AllreduceUpcastHookState(weakref.ref(ddp))
        ddp.register_comm_hook(state, hooks._reducer_allreduce_and_upcast_hook)
        loss(ddp, batch(group.rank())).backward()
        return grads(ddp)

    for found in run_ranks(2, one_rank):
        assert_near(found, MEAN, 2e-2)
        assert all(value.dtype == torch.float64 for value in found.values())
        assert not torch.equal(found["a.weight"], MEAN["a.weight"])
