"""Compiled wrappers and whole compiled steps, against one process in eager mode."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.compiled import Settings, train_step
from paceline.errors import PeerError
from tests.ddp.toys import assert_same, fill, grads, weights

from .scene import Scene, on_ranks

# On the CPU they test what tests/compiled does.
pytestmark = [] if torch.cuda.is_available() else [pytest.mark.slow]
SMALL = 1e-3  # MiB
STEPS = 4
CLOSE = {"rtol": 2e-4, "atol": 2e-5}
DEADLINE = 300.0  # seconds: Inductor compiles, one rank after the other


def model() -> nn.Module:
    return fill(
        nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    ).float()


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def batch(scene: Scene, rank: int, step: int, rows: int = 8) -> Tensor:
    return scene.data(rows, 6, seed=10 * step + rank, dtype=torch.float32)


def loss(scene: Scene, net: Any, rank: int, step: int) -> Tensor:
    return loss_of(net, batch(scene, rank, step))


def backend(scene: Scene) -> str:
    """The real compiler on a GPU; on the CPU there may be none, and it is tested elsewhere."""
    return "inductor" if scene.on_gpu else "aot_eager"


def wrapped(scene: Scene, **options: Any) -> DDP:
    return DDP(scene.place(model()), process_group=scene.group, bucket_cap_mb=SMALL, **options)


@on_ranks(deadline=DEADLINE)
@pytest.mark.parametrize("keywords", [{}, {"gradient_as_bucket_view": False}], ids=str)
def test_a_compiled_wrapper_averages_as_one_process(scene: Scene, keywords: Any) -> None:
    ddp = wrapped(scene, **keywords)
    compiled = torch.compile(ddp, backend=backend(scene))
    for step in range(STEPS):
        ddp.zero_grad()
        loss(scene, compiled, scene.rank, step).backward()
        expected = scene.mean_grads(model(), lambda m, rank, s=step: loss(scene, m, rank, s))
        assert_same(grads(ddp), expected, **CLOSE)
        scene.assert_same_bits([p.grad for p in ddp.parameters()])


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@on_ranks(deadline=DEADLINE)
@pytest.mark.parametrize("max_norm", [None, 0.05], ids=["", "clipped"])
def test_a_compiled_step_steps_as_one_process_does(scene: Scene, max_norm: float | None) -> None:
    ddp = wrapped(scene)
    optimizer = adamw(ddp.parameters())
    step = train_step(ddp, optimizer, loss_of, max_norm=max_norm, backend=backend(scene))
    for number in range(STEPS):
        step(batch(scene, scene.rank, number))
    assert step.reason == ""
    found = weights(ddp)
    scene.assert_same_bits(found)
    loss_alone = partial(loss, scene)
    assert_same(
        found, scene.trained_alone(model(), adamw, loss_alone, STEPS, max_norm=max_norm), **CLOSE
    )


@on_ranks(deadline=DEADLINE)
def test_weights_count_in_a_compiled_step(scene: Scene) -> None:
    ddp = wrapped(scene)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step = train_step(ddp, optimizer, loss_of, backend=backend(scene), dynamic=True)
    alone = scene.place(model())
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(STEPS):
        parts = [batch(scene, rank, number, rows=3 + rank) for rank in range(scene.size)]
        step(parts[scene.rank], samples=3 + scene.rank)
        plain.zero_grad()
        loss_of(alone, torch.cat(parts)).backward()
        plain.step()
    assert step.reason == ""
    assert_same(weights(ddp), weights(alone), **CLOSE)


@on_ranks(deadline=DEADLINE)
def test_compiled_steps_that_accumulate_average_at_the_last(scene: Scene) -> None:
    ddp = wrapped(scene)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step = train_step(ddp, optimizer, loss_of, accumulate=2, backend=backend(scene))
    alone = scene.place(model())
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(STEPS):
        step(batch(scene, scene.rank, number))
        (sum(loss(scene, alone, r, number) for r in range(scene.size)) / scene.size).backward()
        if number % 2:
            plain.step()
            plain.zero_grad()
    assert step.reason == ""
    assert_same(weights(ddp), weights(alone), **CLOSE)


@on_ranks(deadline=DEADLINE)
def test_a_compiled_step_under_autocast_learns_what_one_process_does(scene: Scene) -> None:
    ddp = wrapped(scene)
    step = train_step(
        ddp,
        torch.optim.SGD(ddp.parameters(), lr=0.1),
        loss_of,
        autocast=torch.bfloat16,
        backend=backend(scene),
    )
    alone = scene.place(model())
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(STEPS):
        step(batch(scene, scene.rank, number))
        plain.zero_grad()
        with torch.autocast(scene.device.type, torch.bfloat16):
            losses = [loss(scene, alone, rank, number) for rank in range(scene.size)]
        (sum(losses) / scene.size).backward()
        plain.step()
    assert step.reason == ""
    assert_same(weights(ddp), weights(alone), rtol=2e-2, atol=2e-3)
    scene.assert_same_bits(weights(ddp))


@on_ranks(deadline=DEADLINE)
def test_averages_of_a_compiled_step_stay_in_grad_when_they_are_wanted(scene: Scene) -> None:
    ddp = wrapped(scene)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    step = train_step(ddp, optimizer, loss_of, keep_grads=True, backend=backend(scene))
    for number in range(3):
        step(batch(scene, scene.rank, number))
        expected = scene.mean_grads(model(), lambda m, rank, n=number: loss(scene, m, rank, n))
        assert_same(grads(ddp), expected, **CLOSE)


@on_ranks(deadline=DEADLINE)
def test_a_rank_that_fails_in_a_compiled_step_is_heard(scene: Scene) -> None:
    def fallible(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    with scene.new_group() as group:
        ddp = DDP(scene.place(model()), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        step = train_step(ddp, optimizer, fallible, backend=backend(scene))
        for number in range(2):
            step(batch(scene, scene.rank, number))
        raised = ""
        for number in range(2, 5):
            x = batch(scene, scene.rank, number)
            try:
                if scene.rank == 1 and number == 2:
                    x = x[:, :5]  # no such layer
                step(x)
            except (RuntimeError, PeerError) as error:
                raised += f"{type(error).__name__}: {error}\n"
        try:
            ddp.module.state_dict()
        except PeerError as error:
            raised += f"{type(error).__name__}: {error}\n"
        assert raised
        assert scene.rank == 1 or "PeerError" in raised


@on_ranks(deadline=DEADLINE)
def test_a_function_with_collectives_is_one_graph(scene: Scene) -> None:
    group = scene.group

    def mix(x: Tensor) -> Tensor:
        twice, more = x * 2, x + 1
        work = group.all_reduce(more, async_op=True)
        group.all_reduce(twice)
        work.wait()
        return twice + more

    x = scene.data(64, seed=scene.rank)
    found = torch.compile(mix, fullgraph=True, backend=backend(scene))(x)
    total = sum(scene.data(64, seed=rank) for rank in range(scene.size))
    torch.testing.assert_close(found, 3 * total + scene.size)


HAS_GRAPH = "graph" in {field.name for field in fields(Settings)}


@on_ranks(deadline=DEADLINE, cuda=True)
def test_a_step_in_one_cuda_graph_steps_as_one_process_does(scene: Scene) -> None:
    if not HAS_GRAPH or scene.machine.backend != "nccl":
        pytest.skip("no whole step in a CUDA graph here")
    ddp = wrapped(scene)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    step = train_step(ddp, optimizer, loss_of, graph=True)
    for number in range(8):
        step(batch(scene, scene.rank, number))
    assert step.reason == ""
    found = weights(ddp)
    scene.assert_same_bits(found)
    alone = scene.trained_alone(
        model(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), partial(loss, scene), 8
    )
    assert_same(found, alone, **CLOSE)
