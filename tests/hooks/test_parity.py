"""The same training under torch's DDP with torch's hooks and under ours, over real transports."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import ddp_comm_hooks as theirs
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline import hooks
from paceline.hooks.quantization import pack, unpack
from paceline.testing import Meeting, spawn_ranks
from tests.ddp.toys import TINY, Grads, assert_same, data, fill, grads
from tests.hooks.table import TABLE, Net, assert_near, batch, loss

TorchDDP = nn.parallel.DistributedDataParallel
STEPS = 4


def gradients(wrap: Any, group: Any, state: Any, hook: Any, **options: Any) -> Grads:
    """The average of the last of a few steps."""
    ddp = wrap(Net(torch.float32), process_group=group, bucket_cap_mb=TINY, **options)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    for _ in range(STEPS):
        ddp.zero_grad()
        loss(ddp, batch(group.rank(), dtype=torch.float32)).backward()
    return grads(ddp)


# Each of our hooks with our DDP, on each transport, all in one start of processes.


def _all_hooks(meeting: Meeting, backend: str) -> dict[str, Grads]:
    if backend == "stock gloo":
        dist.init_process_group("gloo")
        group: Any = dist.group.WORLD
    else:
        group = meeting.new_group(backend)
    found = {"none": gradients(DDP, group, None, None)}
    for name, entry in TABLE.items():
        found[name] = gradients(DDP, group, entry.state(group), entry.hook)
    if backend == "stock gloo":
        dist.destroy_process_group()
    else:
        group.shutdown()
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo", "stock gloo"])
def test_every_hook_averages_over(backend: str) -> None:
    ranks = spawn_ranks(2, _all_hooks, backend)
    for found in ranks:
        for name, entry in TABLE.items():
            assert_near(found[name], found["none"], max(entry.close, 1e-5))
            assert_same(found[name], ranks[0][name], rtol=0, atol=0)


# Our hooks under torch's DDP, beside torch's own.


def _under_torch(meeting: Meeting) -> dict[str, tuple[Grads, Grads]]:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    pairs = {
        "allreduce": (hooks.allreduce_hook, theirs.default_hooks.allreduce_hook),
        "fp16": (hooks.fp16_compress_hook, theirs.default_hooks.fp16_compress_hook),
        "noop": (hooks.noop_hook, theirs.debugging_hooks.noop_hook),
    }
    found = {
        name: (gradients(TorchDDP, world, world, ours), gradients(TorchDDP, world, world, torchs))
        for name, (ours, torchs) in pairs.items()
    }
    here = hooks.PostLocalSGDState(None, None, 1)
    found["post-local"] = (
        gradients(DDP, world, here, hooks.post_localSGD_hook),
        found["allreduce"][0],
    )
    dist.destroy_process_group()
    return found


CLOSE = {"allreduce": 1e-6, "fp16": 1e-3, "noop": 0.0, "post-local": 1e-6}


def test_our_hooks_give_under_torchs_ddp_what_torchs_give() -> None:
    for found in spawn_ranks(2, _under_torch):
        for name, (ours, torchs) in found.items():
            assert_near(ours, torchs, CLOSE[name])


# torch's quantization hooks cannot be had here: they misread what gloo's gathers return.


@pytest.mark.filterwarnings("ignore")  # torch's observers warn of their own deprecation
def test_8_bits_are_cut_into_the_steps_that_torch_cuts_them_into() -> None:
    from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver

    torchs = theirs.quantization_hooks
    rows = torch.cat([data(3, 40), data(3, 40).abs(), -data(3, 40).abs() * 1e3]).float()
    observer = PerChannelMinMaxObserver()
    observer(rows)
    step, zero = observer.calculate_qparams()
    coded = torchs._quantize_per_channel_backend(rows, step, zero)
    expected = torchs._dequantize_per_channel_backend(coded, step, zero)
    assert_close(unpack(pack(rows), 9, 40), expected)
    observer = MinMaxObserver()
    observer(rows)
    step, zero = observer.calculate_qparams()
    coded = torchs._quantize_per_tensor_backend(rows, step, zero)
    expected = torchs._dequantize_per_tensor_backend(coded, step, zero)
    assert_close(unpack(pack(rows.view(1, -1)), 1, 360).view(9, 40), expected)


# PowerSGD: training that ends as low as with torch's.


class Deep(nn.Module):
    """Wide enough that two columns of each matrix are a small part of it."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(24, 24) for _ in range(3)]
        self.layers = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _losses(wrap: Any, world: Any, kind: Any, hook: Any, warm: bool) -> list[float]:
    several = {} if kind is theirs.powerSGD_hook.PowerSGDState else {"bucket_cap_mb": 0.003}
    ddp = wrap(Deep(), process_group=world, **several)  # torch's might hang with several buckets
    if kind is not None:
        state = kind(world, 2, start_powerSGD_iter=2, warm_start=warm, random_seed=3)
        ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x, y = data(32, 24, seed=world.rank()).float(), data(32, 24, seed=9).float().tanh()
    found = []
    for _ in range(60):
        optimizer.zero_grad()
        value = (ddp(x) - y).square().mean()
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def _train_with_power(meeting: Meeting) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    world, power = dist.group.WORLD, theirs.powerSGD_hook
    found = {"none": _losses(TorchDDP, world, None, None, True)}
    for warm in (True, False):
        found[f"torch {warm}"] = _losses(
            TorchDDP, world, power.PowerSGDState, power.powerSGD_hook, warm
        )
        for wrap in (TorchDDP, DDP):
            found[f"{wrap.__module__} {warm}"] = _losses(
                wrap, world, hooks.PowerSGDState, hooks.powerSGD_hook, warm
            )
    dist.destroy_process_group()
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch's hook asks for a GPU wherever there is one"
)
def test_powersgd_learns_as_well_as_torchs() -> None:
    for found in spawn_ranks(2, _train_with_power):
        none = found.pop("none")
        assert none[-1] < 0.5 * none[0]
        for name, losses in found.items():
            assert losses[0] == pytest.approx(none[0])
            reference = found[f"torch {name.split()[-1]}"]
            assert losses[-1] < 1.05 * reference[-1], name
            assert losses[-1] < 1.2 * none[-1], name


def test_a_state_and_its_hook_can_be_copied_with_what_they_remember() -> None:
    state = hooks.PowerSGDState(None, 3, 7)
    state.error_dict[0] = torch.ones(2)
    twin = copy.deepcopy(state)
    twin.error_dict[0].zero_()
    assert (twin.matrix_approximation_rank, twin.start_powerSGD_iter) == (3, 7)
    assert state.error_dict[0].sum() == 2
