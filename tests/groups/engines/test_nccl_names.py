"""Which of torch's NCCL engines a name means; with stand-ins, since most machines have no GPU."""

from __future__ import annotations

from collections import namedtuple
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline._torch import nccl as torchs
from paceline.errors import EngineUnavailableError
from paceline.groups import capabilities
from paceline.groups.engines import nccl
from paceline.groups.engines.around import engine_around
from paceline.groups.engines.gloo.engine import open_gloo
from paceline.groups.engines.nccl import NcclEngine
from paceline.testing import spawn_ranks

GPU = torch.device("cuda", 0)
MINUTE = timedelta(minutes=1)
Plugin = namedtuple("Plugin", ["creator_fn", "extended_api"])


def options() -> Any:
    return SimpleNamespace(_timeout=MINUTE, group_name="")


def engine(made: list[Any], name: str) -> Any:
    """A function that opens an engine, and what it is told."""

    def opens(*told: Any) -> str:
        made.append(told)
        return name

    return opens


def test_torchs_own_function_for_a_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    plugins = {name: Plugin(engine(told, name), True) for name in ("NCCL", "NCCL2")}
    monkeypatch.setattr(dist.Backend, "_plugins", plugins)
    group, settings = dist.ProcessGroup(dist.HashStore(), 1, 2), options()
    for name in ("nccl", "nccl2"):
        opened = torchs.open_engine(name, group, GPU, dist.HashStore(), 1, 2, settings)
        assert opened == name.upper()
        asked, given = told.pop()
        assert (asked.group_rank, asked.group_size, asked.timeout) == (1, 2, MINUTE)
        if hasattr(asked, "process_group"):  # nccl2 looks there for its device
            assert asked.process_group.bound_device_id == GPU
        assert given is settings


def test_a_torch_without_such_functions_has_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    monkeypatch.setattr(dist.Backend, "_ensure_backend_registered", lambda name: None, False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", engine(told, "old"), raising=False)
    store, settings = dist.HashStore(), options()
    group = dist.ProcessGroup(store, 0, 1)
    assert torchs.open_engine("nccl", group, GPU, store, 0, 1, settings) == "old"
    assert told == [(store, 0, 1, settings)]


def test_a_name_that_this_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torchs, "entry_points", lambda group: ())
    assert nccl.missing() == ""
    assert "has no nccl2; nccl is the engine" in nccl.missing("nccl2")
    found = capabilities()
    assert found["nccl"].available
    assert not found["nccl2"].available


def _open_where_there_is_no_gpu(meeting: Any, name: str) -> str:
    with pytest.raises(EngineUnavailableError) as caught:
        meeting.new_group(name, device="cuda")
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["nccl2", "nccl-legacy"])
def test_each_name_says_why_it_cannot_be_used(name: str) -> None:
    (said,) = spawn_ranks(1, _open_where_there_is_no_gpu, name)
    assert f"the {name} backend cannot be used here" in said


@pytest.mark.parametrize("name", torchs.NAMES)
def test_a_group_of_torchs_is_wrapped_as_nccl_by_whatever_name_it_has(name: str) -> None:
    cpu = torch.device("cpu")
    inner = open_gloo(dist.HashStore(), 0, 1, MINUTE, cpu)  # any engine: it is not called
    assert isinstance(engine_around(inner, name, cpu), NcclEngine)


@pytest.mark.skipif(not torchs.is_known("nccl2"), reason="torch has nccl2 since 2.14")
def test_nccl_is_what_torchs_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    for value, expected in (
        ("0", c10d._create_nccl_process_group),
        ("1", c10d._create_nccl2_process_group),
    ):
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", value)
        monkeypatch.setattr(dist.Backend, "_plugins", {})
        assert torchs._opener("nccl") is expected
