"""DistributedDataParallel with each of its keywords."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import DistributedDataParallel as DDP
from tests.ddp.toys import TINY, Branches, assert_same, fill, grads, stack, weights

from .scene import Scene, assert_close, on_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def loss(scene: Scene, model: Any, rank: int, step: int = 0) -> Tensor:
    return model(scene.data(4, 3, seed=10 * step + rank)).square().mean()


def check(scene: Scene, ddp: nn.Module, model: nn.Module, steps: int = 4) -> None:
    """Gradients of several passes are the means over ranks, and the same bits on each."""
    for step in range(steps):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        loss(scene, ddp, scene.rank, step).backward()
        expected = scene.mean_grads(model, lambda m, rank, step=step: loss(scene, m, rank, step))
        assert_same(grads(ddp), expected, **EXACT)
        scene.assert_same_bits([p.grad for p in ddp.parameters() if p.grad is not None])


KEYWORDS: dict[str, dict[str, Any]] = {
    "none": {},
    "small buckets": {"bucket_cap_mb": TINY},
    "a list of caps": {"bucket_cap_mb_list": [TINY, 1.0]},
    "views": {"gradient_as_bucket_view": True},
    "no views": {"gradient_as_bucket_view": False},
    "no views, small": {"gradient_as_bucket_view": False, "bucket_cap_mb": TINY},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static, small": {"static_graph": True, "bucket_cap_mb": TINY},
    "buffers stay": {"broadcast_buffers": False},
    "buffers in forward": {"forward_sync_buffers": True},
    "no first sync": {"init_sync": False},
    "batched copies": {"batched_grad_copy": True},
    "skip unused": {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
    "lazy": {"lazy_bucket_allocation": True},
    "lazy, small": {"lazy_bucket_allocation": True, "bucket_cap_mb": TINY},
}


@on_ranks
@pytest.mark.parametrize("keywords", KEYWORDS)
def test_gradients_are_those_of_one_process_on_all_data(scene: Scene, keywords: str) -> None:
    model = stack(3, 5, 4, 2)
    ddp = DDP(scene.place(model), process_group=scene.group, **KEYWORDS[keywords])
    check(scene, ddp, model)


@on_ranks
def test_torchs_default_group_serves_as_well(scene: Scene) -> None:
    model = stack(3, 5, 2)
    check(scene, DDP(scene.place(model)), model)


@on_ranks
def test_a_device_mesh_serves_as_well(scene: Scene) -> None:
    model = stack(3, 5, 2)
    mesh = init_device_mesh(scene.device.type, (scene.size,))
    check(scene, DDP(scene.place(model), device_mesh=mesh), model)


@on_ranks
def test_the_form_without_a_wrapper_averages_too(scene: Scene) -> None:
    model = stack(3, 5, 2)
    check(scene, paceline.replicate(scene.place(model), process_group=scene.group), model)


@on_ranks
def test_parameters_whose_average_is_delayed_get_it_too(scene: Scene) -> None:
    model = stack(3, 5, 4, 2)
    own = scene.place(model)
    late = [(name, p) for name, p in own.named_parameters() if name.startswith("4.")]
    first = next(own.parameters())
    ddp = DDP(
        own,
        process_group=scene.group,
        delay_all_reduce_named_params=late,
        param_to_hook_all_reduce=first,
    )
    check(scene, ddp, model)


@on_ranks(cuda=True)
def test_inputs_on_the_cpu_are_moved_to_the_device(scene: Scene) -> None:
    model = stack(3, 5, 2)
    ddp = DDP(scene.place(model), device_ids=[scene.device.index], process_group=scene.group)
    for step in range(3):
        ddp.zero_grad()
        x = scene.data(4, 3, seed=10 * step + scene.rank).cpu()
        ddp(x.pin_memory() if step else x).square().mean().backward()
        expected = scene.mean_grads(model, lambda m, rank, step=step: loss(scene, m, rank, step))
        assert_same(grads(ddp), expected, **EXACT)


class Normed(nn.Module):
    """A layer and a batch norm, whose buffers change in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = fill(nn.Linear(3, 4, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


@on_ranks
def test_all_ranks_start_from_rank_0_and_take_over_its_buffers(scene: Scene) -> None:
    model = scene.place(fill(Normed(), seed=scene.rank))
    ddp = DDP(model, process_group=scene.group)
    scene.assert_same_bits(dict(model.state_dict()))
    assert_same(weights(model), weights(scene.place(fill(Normed(), seed=0))), rtol=0, atol=0)
    for step in range(3):
        loss(scene, ddp, scene.rank, step).backward()
        mine = model.norm.running_mean.clone()
    ddp(scene.data(4, 3))  # a forward begins with rank 0's buffers
    alone = scene.place(Normed())
    for step in range(3):
        loss(scene, alone, 0, step)
    if scene.rank == 0:
        assert_close(mine, alone.norm.running_mean, **EXACT)
    alone(scene.data(4, 3))
    assert_close(model.norm.running_mean, alone.norm.running_mean, **EXACT)


class Nested(nn.Module):
    """Takes and gives nested structures, keeps nothing for backward, and shares a weight."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.second = nn.Linear(3, 3, dtype=torch.float64)
        self.tied = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        fill(self)
        self.tied.weight = self.first.weight
        self.reentrant = reentrant

    def forward(self, given: dict[str, list[Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
        x = torch.tanh(self.first(given["x"][0]))
        x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return {"out": (self.tied(x), x)}


@on_ranks
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_tied_weights_and_nested_outputs_work(scene: Scene, reentrant: bool) -> None:
    def nested_loss(model: Any, rank: int, step: int) -> Tensor:
        left, right = model({"x": [scene.data(4, 3, seed=10 * step + rank)]})["out"]
        return left.square().mean() + right.mean()

    model = Nested(reentrant)
    ddp = DDP(scene.place(model), process_group=scene.group, bucket_cap_mb=TINY)
    for step in range(3):
        ddp.zero_grad()
        nested_loss(ddp, scene.rank, step).backward()
        expected = scene.mean_grads(model, lambda m, rank, step=step: nested_loss(m, rank, step))
        assert_same(grads(ddp), expected, **EXACT)


@on_ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_models_of_other_types_are_averaged_in_theirs(scene: Scene, dtype: torch.dtype) -> None:
    def low_loss(model: Any, rank: int) -> Tensor:
        return model(scene.data(4, 3, seed=rank, dtype=dtype)).float().square().mean()

    model = stack(3, 5, 2).to(dtype)
    ddp = DDP(scene.place(model), process_group=scene.group)
    ddp(scene.data(4, 3, seed=scene.rank, dtype=dtype)).float().square().mean().backward()
    close = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    expected = scene.mean_grads(model, low_loss)
    assert_same(grads(ddp), expected, rtol=close, atol=close)
    assert all(p.grad.dtype == dtype for p in ddp.parameters())


class Mixed(nn.Module):
    """Parameters of two types, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = fill(nn.Linear(3, 3, dtype=torch.float64))
        self.narrow = fill(nn.Linear(3, 3, dtype=torch.float32))
        self.wide.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x.float()).double())


@on_ranks
def test_parameters_of_several_types_and_frozen_ones_work(scene: Scene) -> None:
    model = Mixed()
    ddp = DDP(scene.place(model), process_group=scene.group)
    for step in range(3):
        ddp.zero_grad()
        loss(scene, ddp, scene.rank, step).backward()
        expected = scene.mean_grads(model, lambda m, rank, step=step: loss(scene, m, rank, step))
        assert_same(grads(ddp), expected, rtol=1e-5, atol=1e-6)
    assert ddp.module.wide.bias.grad is None


@on_ranks
def test_sparse_gradients_are_averaged(scene: Scene) -> None:
    def sparse_loss(model: Any, rank: int) -> Tensor:
        rows = torch.tensor([rank, rank + 1, 5], device=scene.device)
        return model(rows).square().mean()

    model = fill(nn.Embedding(8, 3, sparse=True, dtype=torch.float64))
    ddp = DDP(scene.place(model), process_group=scene.group)
    for _ in range(2):
        ddp.zero_grad()
        sparse_loss(ddp, scene.rank).backward()
        assert ddp.module.weight.grad.is_sparse
        assert_same(grads(ddp), scene.mean_grads(model, sparse_loss), **EXACT)


@on_ranks
def test_channels_last_weights_keep_their_layout(scene: Scene) -> None:
    def image_loss(model: Any, rank: int) -> Tensor:
        x = scene.data(2, 3, 5, 5, seed=rank).to(memory_format=torch.channels_last)
        return model(x).square().mean()

    model = fill(nn.Conv2d(3, 4, 3, dtype=torch.float64)).to(memory_format=torch.channels_last)
    ddp = DDP(scene.place(model), process_group=scene.group)
    for _ in range(3):
        ddp.zero_grad()
        image_loss(ddp, scene.rank).backward()
        assert_same(grads(ddp), scene.mean_grads(model, image_loss), rtol=1e-9, atol=1e-12)
        assert ddp.module.weight.grad.is_contiguous(memory_format=torch.channels_last)


@on_ranks
def test_a_few_steps_end_with_the_weights_of_torchs_wrapper(scene: Scene) -> None:
    def train(ddp: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            loss(scene, ddp, scene.rank, step).backward()
            optimizer.step()
        return weights(ddp)

    model = stack(3, 5, 2)
    theirs = train(nn.parallel.DistributedDataParallel(scene.place(model)))
    found = train(DDP(scene.place(model), process_group=scene.group))
    assert_same(found, theirs, rtol=1e-10, atol=1e-12)
    scene.assert_same_bits(found)


@on_ranks
def test_install_makes_torchs_name_ours(scene: Scene) -> None:
    model = stack(3, 5, 2)
    paceline.install()
    try:
        ddp = nn.parallel.DistributedDataParallel(scene.place(model))
        assert type(ddp).__module__.startswith("paceline")
        check(scene, ddp, model, steps=2)
    finally:
        paceline.uninstall()


# Graphs that leave parameters out, or change.


def branch_loss(scene: Scene, model: Any, rank: int, step: int, chosen: Any) -> Tensor:
    return model(scene.data(4, 3, seed=10 * step + rank), chosen(rank, step)).square().mean()


GRAPHS = {
    "the same on all": lambda rank, step: (0, 2),
    "other on each rank": lambda rank, step: (rank % 3,),
    "other in each step": lambda rank, step: (step % 3,),
    "other in each step and rank": lambda rank, step: ((step + rank) % 3, (step * rank) % 3),
    "none on one rank": lambda rank, step: () if rank == 1 else (0, 1),
    "in another order": lambda rank, step: (2, 0, 1) if (rank + step) % 2 else (0, 1, 2),
    "one of them twice": lambda rank, step: (1, 1, step % 3),
}


@on_ranks
@pytest.mark.parametrize("cap", [None, TINY], ids=["", "small buckets"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "no views"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_that_leave_parameters_out_average_as_one_process(
    scene: Scene, graph: str, views: bool, cap: float | None
) -> None:
    chosen = GRAPHS[graph]
    ddp = DDP(
        scene.place(Branches()),
        process_group=scene.group,
        bucket_cap_mb=cap,
        gradient_as_bucket_view=views,
    )
    for step in range(6):
        ddp.zero_grad()
        branch_loss(scene, ddp, scene.rank, step, chosen).backward()
        expected = scene.mean_grads(
            Branches(), lambda m, rank, step=step: branch_loss(scene, m, rank, step, chosen)
        )
        assert_same(grads(ddp), expected, **EXACT)
        scene.assert_same_bits([p.grad for p in ddp.parameters() if p.grad is not None])


@on_ranks
def test_a_penalty_on_the_gradient_itself_is_averaged(scene: Scene) -> None:
    def penalised(model: Any, rank: int, step: int) -> Tensor:
        x = scene.data(4, 3, seed=10 * step + rank).requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    model = stack(3, 4, 2)
    ddp = DDP(scene.place(model), process_group=scene.group)
    for step in range(3):
        ddp.zero_grad()
        penalised(ddp, scene.rank, step).backward()
        expected = scene.mean_grads(model, lambda m, rank, step=step: penalised(m, rank, step))
        assert_same(grads(ddp), expected, rtol=1e-10, atol=1e-12)


@on_ranks
def test_two_forwards_before_one_backward_are_one_pass(scene: Scene) -> None:
    def both(model: Any, rank: int, step: int) -> Tensor:
        return loss(scene, model, rank, step) + loss(scene, model, rank, step + 50)

    model = stack(3, 4, 2)
    ddp = DDP(scene.place(model), process_group=scene.group, bucket_cap_mb=TINY)
    for step in range(3):
        ddp.zero_grad()
        both(ddp, scene.rank, step).backward()
        expected = scene.mean_grads(model, lambda m, rank, step=step: both(m, rank, step))
        assert_same(grads(ddp), expected, **EXACT)


def test_torch_has_a_default_group_in_the_ranks_only() -> None:
    assert not dist.is_initialized()
