"""Which backend opens where a script for torch asks for gloo, and where its ranks meet."""

import os
from unittest import mock

import pytest
import torch.distributed as dist

import paceline
from paceline.groups.torch_init import instead_of, quickest

MEETS = {
    "PACELINE_MASTER": "127.0.0.1:29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize("asked", ["gloo", "GLOO", "cpu:gloo", dist.Backend.GLOO])
def test_gloo_in_every_spelling_becomes_paceline_on_a_machine_of_cpus(asked) -> None:
    assert instead_of(asked, "auto", False) == "paceline"


def test_with_an_accelerator_gloo_stays_until_an_engine_is_asked_for() -> None:
    assert instead_of("gloo", "auto", True) == "gloo"
    assert instead_of("gloo", "shm", True) == "paceline"
    assert instead_of(None, "shm", True) is None


@pytest.mark.parametrize("asked", ["nccl", "mpi", "cpu:gloo,cuda:nccl", "fake"])
def test_other_backends_stay(asked) -> None:
    assert instead_of(asked, "shm", False) == asked


def opened(method=None, **env):
    """Whether the agent's store would be used, as torch's function sees it."""
    seen = []

    def torchs(backend, *args, **kwargs):
        seen.append(os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))

    with (
        mock.patch.dict(os.environ, MEETS | env),
        mock.patch.object(dist, "get_rank", return_value=1),
    ):
        quickest(torchs, lambda: True)("gloo", init_method=method)
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # as before
    return seen


@pytest.mark.parametrize("method", [None, "env://", "tcp://127.0.0.1:29500", "file:///tmp/x"])
def test_ranks_that_meet_where_the_launcher_says_use_its_store(method) -> None:
    assert opened(method) == ["True"]


def test_ranks_that_meet_on_a_port_of_their_own_open_a_store_there() -> None:
    assert opened(MASTER_PORT="12355") == ["False"]
    assert opened("tcp://127.0.0.1:23456") == ["False"]


def test_torch_keeps_its_function_once_the_engine_is_not_asked_for_any_more() -> None:
    torchs = dist.init_process_group
    with paceline.install():
        assert dist.init_process_group is torchs
        with paceline.install(names=False, engine=True):
            ours = dist.init_process_group
            assert ours is not torchs
            assert ours.__wrapped__ is torchs
    assert dist.init_process_group is torchs
