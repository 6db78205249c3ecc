"""On a GPU: compiled code on one rank over NCCL is what eager mode is."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import paceline
from paceline import DistributedDataParallel as DDP
from paceline import Group
from paceline.compiled import train_step

from .marks import no_instances

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    no_instances,
]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setenv("PACELINE_SKIP_ALONE", "0")
    torch._dynamo.reset()
    store = dist.HashStore()
    with paceline.new_group(
        "nccl", timedelta(seconds=60), "cuda:0", store=store, rank=0, world_size=1
    ) as opened:
        yield opened


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).cuda()


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def test_a_function_with_collectives_is_one_graph(group: Group) -> None:
    def mix(x: Tensor) -> Tensor:
        twice, more = x * 2, x + 1
        work = dist.all_reduce(more, group=group, async_op=True)
        group.all_reduce(twice)
        work.wait()
        return twice + more

    x = torch.randn(64, device="cuda")
    assert_close(torch.compile(mix, fullgraph=True)(x), mix(x))


@pytest.mark.parametrize("way", ["train_step", "torch.compile"])
def test_weights_after_some_steps_are_those_of_eager_mode(group: Group, way: str) -> None:
    nets = [DDP(model(), device_ids=[0], process_group=group) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    whole = train_step(nets[1], optimizers[1], loss_of)
    compiled = torch.compile(nets[1])

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        loss_of(net, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(4):
        torch.manual_seed(number)
        x = torch.randn(32, 16, device="cuda")
        step(nets[0], optimizers[0], x)
        if way == "train_step":
            whole(x)
        else:
            step(compiled, optimizers[1], x)
    assert whole.reason == ""
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert_close(p, q, rtol=1e-4, atol=1e-5)
