"""CodecHook on processes: shared memory, gloo, torch's own groups and wrapper, resumed runs."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import DistributedDataParallel as DDP
from paceline.groups import Group
from paceline.hooks import CodecHook
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.hooks.test_codec_hook import (
    CLOSE,
    MAKERS,
    MODEL,
    SMALL,
    TINY,
    expected,
    loss,
    off,
    steps_of,
    toy,
    wrapped,
)

Runs = dict[str, Tensor]


def all_codecs(group: Group) -> Runs:
    """Three steps with each codec."""
    return {
        kind: steps_of(wrapped(group, make())[0], group.rank(), 3) for kind, make in MAKERS.items()
    }


def in_process(meeting: Meeting, backend: str) -> Runs:
    with meeting.new_group(backend) as group:
        return all_codecs(group)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_two_processes_have_the_bits_that_two_threads_have(backend: str) -> None:
    wanted = run_ranks(2, all_codecs)[0]
    for found in spawn_ranks(2, in_process, backend):
        for kind, rows in found.items():
            assert torch.equal(rows, wanted[kind]), kind


@pytest.mark.parametrize(("backend", "ranks"), [("shm", 4), ("gloo", 3)])
def test_more_processes_have_the_same_bits_and_the_mean(backend: str, ranks: int) -> None:
    results = spawn_ranks(ranks, in_process, backend)
    wanted = expected(ranks, 3)
    for kind, rows in results[0].items():
        for other in results[1:]:
            assert torch.equal(other[kind], rows), kind
        assert off(rows, wanted) < CLOSE.get(kind, 1.0), kind


# torch's groups, and torch's wrapper.


def in_torch_world(_meeting: Meeting) -> list[Runs]:
    dist.init_process_group("gloo")
    found = [with_wrapper(DDP), with_wrapper(TorchDDP)]
    dist.destroy_process_group()
    return found


def with_wrapper(wrapper: type[nn.Module]) -> Runs:
    found = {}
    for kind, make in MAKERS.items():
        model = toy()
        model.load_state_dict(MODEL.state_dict())
        ddp = wrapper(model, bucket_cap_mb=TINY)
        hook = CodecHook(make(), small=SMALL)
        hook.register(ddp)
        found[kind] = steps_of(ddp, dist.get_rank(), 3)  # type: ignore[arg-type]
        assert 0 < hook.bytes_sent < hook.group.traffic.bytes_sent
    return found


def test_in_torchs_default_group_and_in_torchs_wrapper_it_gives_the_same_bits() -> None:
    wanted = run_ranks(2, all_codecs)[0]
    for ours, torchs in spawn_ranks(2, in_torch_world):
        for kind, rows in wanted.items():
            assert torch.equal(ours[kind], rows), kind
            assert torch.equal(torchs[kind], rows), kind


# Resumed runs.


def train(meeting: Meeting, saved: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Train with each codec, to the end or from a checkpoint to the end."""
    with meeting.new_group("shm") as group:
        return {
            kind: train_one(group, kind, None if saved is None else saved[meeting.rank][kind][1])
            for kind in MAKERS
        }


def train_one(group: Group, kind: str, saved: bytes | None) -> tuple[Tensor, bytes]:
    """The weights after eight steps, and a checkpoint of this rank after four."""
    ddp, hook = wrapped(group, MAKERS[kind]())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    things = ddp, optimizer, hook
    if saved is not None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for thing, state in zip(things, states, strict=True):
            thing.load_state_dict(state)
    checkpoint = io.BytesIO()
    for step in range(0 if saved is None else 4, 8):
        if step == 4:
            torch.save([thing.state_dict() for thing in things], checkpoint)
        optimizer.zero_grad()
        with ddp.samples(1 + (step + group.rank()) % 3):
            loss(ddp, group.rank(), step).backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    return weights, checkpoint.getvalue()


def test_processes_that_resume_from_checkpoints_come_to_the_same_bits() -> None:
    whole = spawn_ranks(2, train, None)
    resumed = spawn_ranks(2, train, whole)
    for kind, (weights, _) in whole[0].items():
        for results in (*whole, *resumed):
            assert torch.equal(results[kind][0], weights), kind
