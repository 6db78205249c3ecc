"""The ranks of ``compiled.py --device cuda``: GPT-2, on GPUs that ranks may share."""

from __future__ import annotations

import os
from collections.abc import Sequence

import step_gpu
import torch
import torch.distributed as dist
from compiled_ways import (
    CAPTURED,
    GPU_WAYS,
    GRAPHED,
    HAS_GRAPH,
    LIMIT,
    Step,
    make_step,
    mode_of,
    wrap,
)
from step import Times
from step_gpu import Load, Setting
from torch import Tensor, nn

from paceline.testing import Meeting, spawn_ranks

DEADLINE = 3600.0  # seconds for all ways at one load
WARM_UP = 4
MANY = 4096  # tokens of a rank from which on a block has few steps


def loads_of(text: str) -> list[Load]:
    """Batches such as ``16x1024;2x256``."""
    found = []
    for word in text.split(";"):
        batch, tokens = (int(number) for number in word.split("x"))
        found.append(Load(batch, tokens, 5 if batch * tokens >= MANY else 20))
    return found


def ways_here(device: str) -> list[str]:
    """Those that this paceline and this device have."""
    lacking = {GRAPHED} if not HAS_GRAPH else set()
    lacking |= set(CAPTURED) if device == "cpu" else set()
    return [way for way in GPU_WAYS if way not in lacking]


def measure_gpu(
    setting: Setting, load: Load, ways: Sequence[str], ranks: int, rounds: int
) -> dict[str, Times]:
    """Times of all ways, on the slowest rank."""
    by_rank = spawn_ranks(
        ranks, time_ways, setting, load, ways, rounds, deadline=DEADLINE, env=sharing(ranks)
    )
    return {way: Times(own.wall, own.cpu) for way, own in step_gpu.slowest(by_rank).items()}


def sharing(ranks: int) -> dict[str, str]:
    """What ranks that share a GPU need; `paceline run --ranks-per-gpu` sets the same."""
    count = torch.cuda.device_count()
    if not count or ranks <= count:
        return {}
    own = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // -(-ranks // count)),
    }
    return {name: os.environ.get(name, value) for name, value in own.items()}


def time_ways(
    meeting: Meeting, setting: Setting, load: Load, ways: Sequence[str], rounds: int
) -> dict[str, step_gpu.Times]:
    """One rank's blocks; all ways take turns."""
    if setting.device == "cuda":
        torch.cuda.set_device(meeting.rank % torch.cuda.device_count())
    dist.init_process_group(setting.backend)
    made: dict[str, Step] = {}
    for way in ways:
        with mode_of(way):
            made[way] = _step(way, setting, load)
            for _ in range(WARM_UP):
                made[way]()
    times = {way: step_gpu.Times([], []) for way in ways}
    for number in range(rounds):
        turn = number % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            with mode_of(way):
                wall, cpu = step_gpu._time_block(made[way], load.steps, setting.device)
            times[way].wall.append(wall)
            times[way].cpu.append(cpu)
    dist.barrier()
    dist.destroy_process_group()
    return times


def _step(way: str, setting: Setting, load: Load) -> Step:
    torch.manual_seed(0)
    model = wrap(way, step_gpu.GPT2(setting.config).to(setting.device), dist.new_group)
    options = {"capturable": True} if way == LIMIT else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, **options)
    shape = (2, load.batch, load.tokens)
    batch = torch.randint(setting.config.vocabulary, shape, device=setting.device)
    autocast = torch.bfloat16 if setting.device == "cuda" else None
    return make_step(way, model, optimizer, _direct, list(batch), autocast=autocast)


def _direct(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return model(tokens, targets)  # type: ignore[no-any-return]
