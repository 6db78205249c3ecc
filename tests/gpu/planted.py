"""Tests with planted faults, for tests of the crew; nobody collects them."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from .scene import Scene


def _adds_up(scene: Scene) -> None:
    ones = torch.ones(3, device=scene.device)
    scene.group.all_reduce(ones)
    assert ones.tolist() == [scene.size] * 3


def _raises_on_one(scene: Scene) -> None:
    assert scene.rank != 1, "planted"
    scene.group.all_reduce(torch.ones(3, device=scene.device))  # rank 1 never comes
    scene.wait()


def _hangs_on_one(scene: Scene) -> None:
    scene.group.barrier()  # so that the other's time is not over before this one's
    if scene.rank == 1:
        threading.Event().wait()
    _adds_up(scene)


def _dies_on_one(scene: Scene) -> None:
    if scene.rank == 1:
        os._exit(7)
    _adds_up(scene)


def _wrong_on_one(scene: Scene) -> None:
    scene.assert_same_bits([torch.full((2,), float(scene.rank == 1), device=scene.device)])


def _skips(scene: Scene) -> None:
    pytest.skip("planted")


def _tells_its_process(scene: Scene, variable: str) -> None:
    assert os.getenv(variable) is None, f"{variable} is left from another test"
    os.environ[variable] = "1"


adds_up, raises_on_one, hangs_on_one, dies_on_one, wrong_on_one, skips, tells_its_process = (
    SimpleNamespace(scenario=function)
    for function in (
        _adds_up,
        _raises_on_one,
        _hangs_on_one,
        _dies_on_one,
        _wrong_on_one,
        _skips,
        _tells_its_process,
    )
)
