"""Compiled wrappers whose averages the program waits for itself."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd

import paceline
from paceline.errors import ModuleStateError, UnfinalizedError

from .marks import no_instances
from .ranks import Open, Results, Row, check, launch
from .steps import batch, loss_of, seeded

ROWS: dict[str, Row] = {}


def row(function: Row) -> Row:
    ROWS[function.__name__] = function
    return function


def _compiled_autograd() -> Any:
    return compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager"))


def train(open_: Open, around: Any) -> None:
    group = open_()
    plain, ddp = (
        paceline.DistributedDataParallel(seeded("mlp"), process_group=group) for _ in range(2)
    )
    ddp.require_manual_backward_finalization = True
    compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        for model in (plain, ddp):
            model.zero_grad()
        loss_of(plain, *batch(group.rank(), step)).backward()
        loss = loss_of(compiled, *batch(group.rank(), step))
        with around():
            loss.backward()
        assert all(p.grad is None for p in ddp.parameters())
        with pytest.raises(UnfinalizedError):
            optimizer.step()
        ddp.finalize_backward()
        for mine, other in zip(ddp.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)


@row
def a_compiled_forward(open_: Open) -> None:
    train(open_, contextlib.nullcontext)


@row
def a_compiled_backward(open_: Open) -> None:
    train(open_, _compiled_autograd)


@row
def train_step_refuses_it_by_name(open_: Open) -> None:
    group = open_()
    ddp = paceline.DistributedDataParallel(seeded("mlp"), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step = paceline.compiled.train_step(ddp, optimizer, loss_of, backend="eager")
    ddp.require_manual_backward_finalization = group.rank() == 0
    expected = ModuleStateError if group.rank() == 0 else paceline.errors.PeerError
    with pytest.raises(expected, match="require_manual_backward_finalization"):
        step(*batch(group.rank(), 0))
    ddp.require_manual_backward_finalization = False
    step(*batch(group.rank(), 1))


@pytest.fixture(scope="module")
def results() -> Results:
    return launch(__name__, list(ROWS))


@no_instances
@pytest.mark.parametrize("name", list(ROWS))
def test_a_compiled_wrapper_is_finalized_by_hand(results: Results, name: str) -> None:
    check(results, name)
