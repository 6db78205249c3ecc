"""On a GPU: one rank over NCCL, with the collectives that a group of one could leave out."""

import os
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import DistributedDataParallel as DDP
from paceline import Group
from paceline._reducer import runner
from paceline.errors import PeerError
from paceline.testing import Meeting, spawn_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setenv("PACELINE_SKIP_ALONE", "0")
    store = torch.distributed.HashStore()
    with paceline.new_group(
        "nccl", timedelta(seconds=60), "cuda:0", store=store, rank=0, world_size=1
    ) as opened:
        yield opened


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.norm = nn.BatchNorm1d(64)
        self.unused = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)

    def forward(self, given: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        x = given["x"][0]
        hidden = self.norm(self.first(x)).relu()
        return {"out": checkpoint(self.last, hidden, use_reentrant=False)}


class OfItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return self.weight.square().sum()


def test_a_forward_without_inputs_has_nothing_to_move(group: Group) -> None:
    ddp = DDP(OfItself().cuda(), device_ids=[0], process_group=group)
    ddp().backward()
    assert_close(ddp.module.weight.grad, torch.full((3,), 2.0, device="cuda"))


def test_inputs_are_moved_and_gradients_are_those_of_the_model_alone(group: Group) -> None:
    torch.manual_seed(0)
    model, alone = Model().cuda(), Model().cuda()
    alone.load_state_dict(model.state_dict())
    ddp = DDP(model, device_ids=[0], process_group=group, bucket_cap_mb=0.001)
    for step in range(4):
        x = torch.randn(16, 8)  # on the CPU
        for net in (model, alone):
            net.zero_grad(set_to_none=step % 2 == 0)
        ddp({"x": [x]})["out"].square().mean().backward()
        alone({"x": [x.cuda()]})["out"].square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert_close(p.grad, q.grad)


def test_weights_and_accumulation_are_exact(group: Group) -> None:
    model, alone = nn.Linear(4, 3).cuda().double(), nn.Linear(4, 3).cuda().double()
    alone.load_state_dict(model.state_dict())
    ddp = DDP(model, process_group=group)
    for _ in range(3):
        parts = [torch.randn(n, 4, device="cuda", dtype=torch.float64) for n in (5, 2, 7)]
        model.zero_grad()
        alone.zero_grad()
        for x in parts:
            with ddp.accumulate(3), ddp.samples(len(x)):
                ddp(x).square().mean().backward()
        alone(torch.cat(parts)).square().mean().backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


def test_autocast_and_a_scaler_work(group: Group) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
    ddp = DDP(model, device_ids=[0], process_group=group)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    x = torch.randn(64, 8, device="cuda")
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = (ddp(x).float() - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_mixed_precision_and_a_hook_work(group: Group) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    precise = paceline._MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Linear(8, 8).cuda()
    ddp = DDP(model, device_ids=[0], process_group=group, mixed_precision=precise)
    ddp(torch.randn(4, 8, device="cuda")).float().sum().backward()
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32

    group.register("gpu_test")
    hooked = DDP(nn.Linear(8, 8).cuda(), device_ids=[0], process_group=group)
    hooked.register_comm_hook(group, fp16_compress_hook)
    for _ in range(2):
        hooked(torch.randn(4, 8, device="cuda")).sum().backward()
    assert os.environ["PACELINE_SKIP_ALONE"] == "0"


# Two ranks on one GPU: over gloo, and over NCCL where it takes them (2.30 with this variable set).

BACKENDS = ["gloo", *(["nccl"] if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else [])]
two_ranks = pytest.mark.parametrize("backend", BACKENDS)


def line() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer.cuda()


def backward(ddp: DDP, value: float, weight: float | None = None) -> float:
    ddp.zero_grad()
    if weight is not None:
        ddp.samples(weight)
    ddp(torch.full((1, 1), value, device="cuda")).sum().backward()
    return float(ddp.module.weight.grad)


def _some_with_weights(meeting: Meeting, backend: str) -> list[float]:
    with meeting.new_group(backend, device="cuda:0") as group:
        ddp, rank = DDP(line(), process_group=group), meeting.rank
        plain = [backward(ddp, 1.0 + rank) for _ in range(2)]
        mixed = [backward(ddp, 1.0 + rank, weight=3.0 if rank else None) for _ in range(4)]
        return [*plain, *mixed, backward(ddp, 1.0 + rank)]


@two_ranks
def test_ranks_without_a_weight_divide_as_those_with_one(backend: str) -> None:
    for found in spawn_ranks(2, _some_with_weights, backend):
        assert found == [1.5, 1.5, 1.75, 1.75, 1.75, 1.75, 1.5]


def _hold_something(meeting: Meeting, backend: str) -> list[float]:
    found, ones = [], torch.ones(1, 1, device="cuda")
    with meeting.new_group(backend, device="cuda:0") as group:
        ddp, rank = DDP(line(), process_group=group), meeting.rank
        for step in range(4):
            ddp.zero_grad()
            ddp.module(ones * 10.0 * rank).sum().backward()  # of this rank alone
            ddp.samples(0.0 if step == 3 else 1.0 + 2 * rank)
            ddp(ones * (1.0 + rank)).sum().backward()
            found.append(float(ddp.module.weight.grad))
    return found


@two_ranks
def test_what_a_rank_holds_is_averaged_with_a_weighted_pass(backend: str) -> None:
    mean = (1 * 1 + 3 * 12) / 4
    for found in spawn_ranks(2, _hold_something, backend):
        assert found == pytest.approx([mean, mean, mean, 5.0])  # no rank counts in the last


class Unlucky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, fails: bool) -> Tensor:
        if fails:
            raise ArithmeticError("no luck")
        return self.layer(x)


def _fail_last(meeting: Meeting, backend: str, saves: bool) -> tuple[str, bool]:
    zeros = False
    try:
        with meeting.new_group(backend, device="cuda:0") as group:
            ddp = DDP(Unlucky().cuda(), process_group=group)
            for step in range(3):
                ddp.zero_grad()
                try:
                    fails = meeting.rank == 1 and step == 2
                    ddp(torch.ones(4, 3, device="cuda"), fails).sum().backward()
                except ArithmeticError:
                    continue
            zeros = all(p.grad is None or not p.grad.any() for p in ddp.parameters())
            if saves:
                ddp.module.state_dict()
    except PeerError as error:
        return str(error), zeros
    return "", zeros


@two_ranks
@pytest.mark.parametrize("saves", [True, False])
def test_a_failure_in_the_last_pass_is_heard_at_the_end(backend: str, saves: bool) -> None:
    heard, failed = spawn_ranks(2, _fail_last, backend, saves)
    assert "in the last pass" in heard[0]
    assert heard[1]
    assert not failed[0]


def _warm_up(meeting: Meeting, backend: str) -> float:
    with meeting.new_group(backend, device="cuda:0") as group:
        ddp, rank = DDP(line(), process_group=group), meeting.rank
        backward(ddp, 1.0)
        for _ in range(3 if rank else 0):
            ddp.module(torch.ones(1, 1, device="cuda")).sum().backward()
        return backward(ddp, 1.0 + rank)


@two_ranks
def test_one_rank_may_use_the_module_alone(backend: str) -> None:
    assert spawn_ranks(2, _warm_up, backend) == [1.5, 1.5]


class Detour(nn.Module):
    """Its parameter and its output are on the CPU; what it computes in between need not be."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.weight, self.inside = nn.Parameter(torch.ones(1)), inside

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        between = x * self.weight
        if self.inside:
            between = between.cuda()
        if fails:
            between.register_hook(_fail)
        return between.mul(1.0).cpu()


def _fail(_grad: Tensor) -> None:
    raise ArithmeticError


def _clear_after_a_failure(meeting: Meeting, inside: bool) -> float:
    call, went_on = runner.call_after_backward, threading.Event()
    holders = list[threading.Thread]()

    def hold(held: list[object]) -> None:
        went_on.wait(0.5)  # it does not, when it waits for us
        held.clear()

    def call_and_hold(ending: object) -> None:
        call(ending)
        holders.append(threading.Thread(target=hold, args=([ending],)))
        holders[-1].start()

    def loss(value: float, fails: bool = False) -> Tensor:
        out = ddp(torch.full((1,), value), fails)
        return (out if inside else out.cuda()).sum()

    with meeting.new_group("gloo", device="cpu") as group:
        ddp = DDP(Detour(inside), process_group=group)
        with ddp.no_sync(), ddp.samples(1):
            loss(5.0).backward()
            failing = loss(1.0, fails=True)
            runner.call_after_backward = call_and_hold
            with pytest.raises(ArithmeticError):
                failing.backward()
            runner.call_after_backward = call
        ddp.zero_grad()
        went_on.set()
        for holder in holders:
            holder.join()
        ddp.samples(1)
        loss(3.0).backward()
        assert len(holders) == 1
        return float(ddp.module.weight.grad)


@pytest.mark.parametrize("inside", [True, False], ids=["in between", "the loss"])
def test_gradients_stay_cleared_after_a_failure_though_little_is_on_the_gpu(inside: bool) -> None:
    assert spawn_ranks(2, _clear_after_a_failure, inside) == [3.0] * 2
