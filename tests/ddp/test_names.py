"""Public names of what we make of a model: torch's, and no others that code for torch asks for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as torch_replicate
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from paceline import DistributedDataParallel, replicate
from paceline.groups import Group
from paceline.testing import run_ranks

# What initializers, loggers, optimizers and checkpoints look for on a module with ``hasattr``.
ASKED_FOR = frozenset(
    {"weight", "bias", "data", "grad", "shape", "dtype", "config", "in_features", "out_features"}
    | {"num_features", "embedding_dim", "weight_g", "parametrizations", "init_weights"}
    | {"reset_parameters", "hparams", "step", "count", "size", "rank", "name", "requires_grad"}
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Embedding(4, 2))


def start_anew(module: nn.Module) -> None:
    """The initializer that is in every second training script."""
    if hasattr(module, "weight") and module.weight is not None:
        nn.init.constant_(module.weight, 0.5)
    if hasattr(module, "bias") and module.bias is not None:
        nn.init.zeros_(module.bias)


def public(module: nn.Module) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_")}


@pytest.mark.parametrize("wrap", ["wrapper", "replicate", "SyncBatchNorm", "all of it"])
def test_an_initializer_that_asks_for_weight_and_bias_may_be_applied(wrap: str) -> None:
    expected = model().apply(start_anew).state_dict()

    def train(group: Group) -> list[torch.Tensor]:
        made: nn.Module = model()
        if wrap in ("SyncBatchNorm", "all of it"):
            made = paceline.SyncBatchNorm.convert_sync_batchnorm(made, group)
        if wrap in ("wrapper", "all of it"):
            made = DistributedDataParallel(made, process_group=group)
        elif wrap == "replicate":
            made = replicate(made, process_group=group)
        made.apply(start_anew)
        return list(made.state_dict().values())

    for found in run_ranks(2, train):
        for ours, theirs in zip(found, expected.values(), strict=True):
            assert torch.equal(ours, theirs)


def test_nothing_of_ours_has_a_public_name_that_code_for_torch_asks_modules_for() -> None:
    def names(group: Group) -> list[set[str]]:
        ddp = DistributedDataParallel(model(), process_group=group)
        return [
            public(ddp) - public(TorchDDP) - {"module"},
            public(replicate(model(), process_group=group)) - public(model()),
            public(paceline.SyncBatchNorm(2)) - public(nn.SyncBatchNorm(2)),
        ]

    (found,) = run_ranks(1, names)
    assert [added & ASKED_FOR for added in found] == [set()] * 3


def test_the_wrapper_has_no_public_name_beyond_torchs_and_those_that_the_page_lists() -> None:
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    of_torch, only_here = page.split("Only here:")
    listed = names_in_rows(only_here.split("\n## ")[0])
    newer = names_in_rows("\n".join(r for r in of_torch.splitlines() if "As torch 2.15" in r))
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        theirs = public(TorchDDP(model()))
        ours = public(DistributedDataParallel(model()))
    finally:
        dist.destroy_process_group()
    unseen = {"buffer_hook"}  # a property that is there, as in torch, once a hook is registered
    since = {"batched_grad_copy", "forward_sync_buffers"}  # in torch after 2.11
    assert ours - theirs - unseen == (listed | newer | since) - theirs
    assert theirs <= ours


def names_in_rows(page: str) -> set[str]:
    """What the first cells of its tables name."""
    cells = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    return set(re.findall(r"`(\w+)", " ".join(cells)))


def test_a_replicated_module_has_the_methods_that_torchs_has_and_no_others() -> None:
    def names(group: Group) -> set[str]:
        return public(replicate(model(), process_group=group))

    (ours,) = run_ranks(1, names)
    assert ours == public(torch_replicate(model()))
