"""Weights, buffers and optimizer states are the same bits on any number of ranks."""

from __future__ import annotations

from contextlib import ExitStack
from hashlib import sha256
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.groups import Group
from paceline.testing import Meeting, spawn_ranks
from tests.shards.runs import Run, Trainee, require_equal, train

PARTS = ("dropout", "batchnorm", "layernorm", "shared", "branches", "counted", "checkpoint")

runs = st.builds(
    Run,
    shards=st.integers(1, 24),
    parts=st.sets(st.sampled_from(PARTS)).map(lambda found: tuple(sorted(found))),
    optimizer=st.sampled_from(["SGD", "AdamW"]),
    zero=st.booleans(),
    clip=st.sampled_from([0.0, 0.1]),
    tokens=st.booleans(),
    seed=st.integers(0, 1 << 20),
)


@given(run=runs, ranks=st.sampled_from([2, 3, 4, 5, 8]))
@settings(max_examples=12, deadline=None)
def test_any_run_has_the_same_bits_on_any_number_of_ranks(run: Run, ranks: int) -> None:
    require_equal(train(run, 1), train(run, ranks))


@pytest.mark.slow
@given(run=runs)
@settings(max_examples=25, deadline=None)
def test_any_run_of_twenty_steps_has_the_same_bits(run: Run) -> None:
    long = Run(**{**vars(run), "steps": 20})
    alone = train(long, 1)
    for ranks in (2, 3, 4, 5, 8):
        require_equal(alone, train(long, ranks))


def test_weights_do_change() -> None:
    short, long = Run(steps=1), Run(steps=2)
    with pytest.raises(AssertionError, match="these differ"):
        require_equal(train(short, 1), train(long, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_have_the_same_bits(dtype: Any) -> None:
    run = Run(shards=7, parts=("dropout",), dtype=dtype)
    require_equal(train(run, 1), train(run, 3))


def test_a_reentrant_checkpoint_draws_the_same_random_numbers() -> None:
    run = Run(shards=5, parts=("checkpoint", "dropout", "reentrant"))
    require_equal(train(run, 1), train(run, 2))
    plain = Run(shards=5, parts=("dropout",))
    require_equal(train(run, 1), train(plain, 1))


def one_process(meeting: Meeting, backend: str, run: Run) -> dict[str, Any]:
    torch.set_num_threads(1)
    group = meeting.new_group(backend)
    try:
        trainee = Trainee(run, group)
        trainee.train(0, run.steps)
        return trainee.state()
    finally:
        group.shutdown()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes_have_the_same_bits(backend: str) -> None:
    run = Run(shards=7, parts=PARTS, optimizer="AdamW", clip=0.1, tokens=True, seed=3)
    (alone,) = spawn_ranks(1, one_process, backend, run)
    for ranks in (2, 3):
        for found in spawn_ranks(ranks, one_process, backend, run):
            require_equal(alone, found)


SIZES = (1, 2, 3, 4, 5, 8)


def digests(meeting: Meeting, backend: str, trained: list[Run]) -> list[dict[int, str]]:
    """The state of each run on the first so many ranks, by their number, where this is one."""
    torch.set_num_threads(1)
    with meeting.new_group(backend) as everyone, ExitStack() as opened:
        groups = {n: everyone.split(range(n)) for n in SIZES}
        mine = {n: opened.enter_context(group) for n, group in groups.items() if group is not None}
        found = []
        for run in trained:
            found.append({n: digest_of(run, group) for n, group in mine.items()})
            everyone.barrier()
        return found


def digest_of(run: Run, group: Group) -> str:
    trainee = Trainee(run, group)
    trainee.train(0, run.steps)
    hashed = sha256()
    for name, tensor in trainee.state().items():
        hashed.update(name.encode())
        hashed.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@given(drawn=st.lists(runs, min_size=3, max_size=3))
@settings(max_examples=3, deadline=None, derandomize=True)
def test_processes_have_the_same_bits_after_twenty_steps_on_any_number_of_ranks(
    backend: str, drawn: list[Run]
) -> None:
    trained = [Run(**{**vars(run), "steps": 20}) for run in drawn]
    ranks = spawn_ranks(max(SIZES), digests, backend, trained)
    for number, run in enumerate(trained):
        found = {(n, r): state for r, rank in enumerate(ranks) for n, state in rank[number].items()}
        assert len(found) == sum(SIZES)
        assert len(set(found.values())) == 1, f"{run}: {found}"


def one_part(meeting: Meeting, run: Run, path: str, first: int, last: int) -> dict[str, Any]:
    """Steps of a run that was saved after ``first`` steps, and is saved again."""
    torch.set_num_threads(1)
    group = meeting.new_group("gloo")
    try:
        trainee = Trainee(run, group)
        if first:
            saved = torch.load(f"{path}/{first}", weights_only=True)
            trainee.ddp.module.load_state_dict(saved["model"])
            trainee.optimizer.load_state_dict(saved["optimizer"])
            trainee.ddp.require_conditions(saved["conditions"])
        trainee.train(first, last)
        if run.zero:
            trainee.optimizer.consolidate_state_dict(0)
        if group.rank() == 0:
            optimizer = trainee.optimizer.state_dict()
            model, found = trainee.ddp.module.state_dict(), trainee.ddp.conditions()
            saved = {"model": model, "optimizer": optimizer, "conditions": found}
            torch.save(saved, f"{path}/{last}")
        return trainee.state()
    finally:
        group.shutdown()


@pytest.mark.parametrize("zero", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_that_goes_on_on_fewer_ranks_is_the_run_on_one(tmp_path: Any, zero: bool) -> None:
    parts = ("dropout", "batchnorm", "branches")
    run = Run(shards=6, parts=parts, optimizer="AdamW", zero=zero, steps=6, tokens=True)
    (whole,) = spawn_ranks(1, one_part, run, str(tmp_path), 0, 6)
    for ranks, first, last in ((4, 0, 2), (3, 2, 4), (1, 4, 6)):
        states = spawn_ranks(ranks, one_part, run, str(tmp_path), first, last)
    require_equal(whole, states[0])
