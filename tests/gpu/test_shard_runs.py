"""Shards: weights, buffers and optimizer states are those of one rank, to the last bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from paceline.errors import ModuleArgumentError
from tests.shards.runs import Run, Trainee, require_equal

from .scene import Scene, on_ranks

PARTS = ("dropout", "batchnorm", "layernorm", "shared", "branches", "checkpoint")
SETTING = "CUBLAS_WORKSPACE_CONFIG"

RUNS = {
    "SGD": Run(shards=6, parts=PARTS, clip=0.1, tokens=True),
    "AdamW": Run(shards=7, parts=PARTS, optimizer="AdamW"),
    "AdamW, ZeRO": Run(shards=5, parts=PARTS, optimizer="AdamW", zero=True, tokens=True),
    "float64": Run(shards=5, parts=("dropout",), dtype=torch.float64),
    "bfloat16": Run(shards=5, parts=("dropout",), dtype=torch.bfloat16),
}


@on_ranks
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_rank(scene: Scene, name: str) -> None:
    together = trained(scene, RUNS[name], scene.group)
    groups = [scene.group.split([rank]) for rank in range(scene.size)]
    with groups[scene.rank] as own:
        require_equal(trained(scene, RUNS[name], own), together)


def trained(scene: Scene, run: Run, group: Any) -> dict[str, Any]:
    trainee = Trainee(run, group, scene.device)
    trainee.train(0, run.steps)
    return trainee.state()


@on_ranks
def test_a_gpu_whose_products_may_differ_is_refused(scene: Scene) -> None:
    if not scene.on_gpu:
        pytest.skip("needs a GPU")
    before = os.environ.pop(SETTING)
    try:
        with pytest.raises(ModuleArgumentError, match=SETTING):
            Trainee(Run(), scene.group, scene.device)
    finally:
        os.environ[SETTING] = before
