"""Where the ranks run: on GPUs over NCCL if it takes them, else over gloo; without a GPU, on CPUs.

NCCL takes several ranks on one GPU from 2.30 on, when a variable says so. Whether it does is tried,
in processes of their own, since an old NCCL fails in ways that its version does not tell.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from paceline.errors import RanksFailedError
from paceline.testing import Meeting, spawn_ranks
from tests.marks import USUAL

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PROBE_DEADLINE = 120.0
RANKS = (2, 4)


@dataclass(frozen=True)
class Machine:
    """A kind of device, how many there are, and the backend that joins the ranks on them."""

    device: str
    count: int
    backend: str
    why: str = ""  # not the backend that one would expect
    names: tuple[str, ...] = field(default=())

    @property
    def ranks(self) -> tuple[int, ...]:
        """How many ranks to test with; on a CPU two tell enough."""
        return RANKS if self.device == "cuda" else RANKS[:1]

    @property
    def torch_backend(self) -> str:
        """What torch's own default group is made with beside it."""
        return "nccl" if self.backend == "nccl" else "gloo"

    def environment(self, ranks: int) -> dict[str, str]:
        """What ranks that share a GPU need."""
        if self.device == "cpu" or ranks <= self.count:
            return {}
        own = -(-ranks // self.count)
        return {SHARING: "1", PERCENTAGE: os.environ.get(PERCENTAGE, str(100 // own))}

    def __str__(self) -> str:
        over = f"{' and '.join(map(str, self.ranks))} ranks over {self.backend}"
        if self.device == "cpu":
            return f"tests/gpu: no GPU here, so on the CPU: {over}; what needs CUDA is skipped"
        cards = f"{self.count} GPU{'s' if self.count > 1 else ''} ({', '.join(self.names)})"
        return f"tests/gpu: {over} on {cards}{f'; {self.why}' if self.why else ''}"


def all_reduce_once(meeting: Meeting) -> float:
    """What two ranks get from NCCL here; a function of its own, since it runs in a process."""
    device = torch.device("cuda", meeting.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    with meeting.new_group("nccl", device=device) as group:
        ranks = torch.full((1,), meeting.rank + 1.0, device=device)
        group.all_reduce(ranks)
        return float(ranks)


def why_not_nccl(count: int, ranks: int = 2) -> str:
    """Why NCCL does not take ``ranks`` on ``count`` GPUs; empty if it does."""
    machine = Machine("cuda", count, "nccl")
    try:
        spawn_ranks(ranks, all_reduce_once, deadline=PROBE_DEADLINE, env=machine.environment(ranks))
    except RanksFailedError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line or "NCCL" in line]
        return (told or lines)[-1].strip()
    return ""


def choose(
    count: int, names: tuple[str, ...], refusal: Callable[[int], str] = why_not_nccl
) -> Machine:
    """The machine to test on, given how many GPUs there are and what NCCL says to sharing them."""
    if not count:
        return Machine("cpu", 0, USUAL)
    why = refusal(count)
    if why:
        return Machine("cuda", count, "gloo", f"not over nccl, which said: {why}", names)
    return Machine("cuda", count, "nccl", "", names)


@functools.cache
def here() -> Machine:
    """This machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = tuple(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    return choose(count, names)
