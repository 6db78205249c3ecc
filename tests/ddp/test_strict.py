"""Strict wrappers raise what torch's raise, in the same pass; headers read at once or late."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline import ddp as paceline_ddp
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import Branches, data


@pytest.fixture
def strict() -> Iterator[None]:
    paceline_ddp.set_strict(True)
    yield
    paceline_ddp.set_strict(False)


class Adds(nn.Module):
    """Adds a parameter that it is given."""

    def __init__(self, param: nn.Parameter, factor: float) -> None:
        super().__init__()
        self.param, self.factor = param, factor

    def forward(self, x: Any) -> Tensor:
        return x + self.param * self.factor


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("size", [10, 100_000])
def test_a_weight_shared_by_two_modules_and_by_wrappers_before_is_used(
    late: bool, size: int
) -> None:
    def one_rank(group: Group) -> None:
        param, factor = nn.Parameter(torch.zeros(size)), group.rank() + 1.0
        wrappers = []  # kept: they still listen
        for views in (False, True, False):
            model = nn.Sequential(Adds(param, factor), Adds(param, factor))
            ddp = DDP(model, process_group=group, gradient_as_bucket_view=views, bucket_cap_mb=1)
            if late:
                ddp.replica.read_late()
            wrappers.append(ddp)
            for step in range(3):
                ddp.zero_grad(set_to_none=step % 2 == 0)
                ddp(1).sum().backward()
                assert torch.equal(param.grad, torch.full((size,), 3.0))

    run_ranks(2, one_rank)


PLANS = {
    "from the first pass": [(0, 1)] * 4,
    "from the third pass": [(0, 1, 2), (0, 1, 2), (0, 1), (0, 1, 2)],
    "never": [(0, 1, 2)] * 4,
}
OPTIONS: list[dict[str, bool]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


def first_error(ddp: Any, plan: list[tuple[int, ...]], rank: int) -> tuple[int, str, str]:
    """The step, the half of it and torch's sentence."""
    for step, chosen in enumerate(plan):
        half = "forward"
        try:
            loss = ddp(data(4, 3, seed=10 * step + rank), chosen).sum()
            half = "backward"
            loss.backward()
        except RuntimeError as error:
            return step, half, re.split(r"[.,]", str(error))[0].removeprefix(f"Rank {rank}: ")
    return len(plan), "", ""


def _errors_under_both(meeting: Meeting) -> dict[str, list[Any]]:
    dist.init_process_group("gloo")
    paceline_ddp.set_strict(True)
    found: dict[str, list[Any]] = {}
    for name, plan in PLANS.items():
        for options in OPTIONS:
            row = found.setdefault(f"{name} {options}", [])
            for late in (False, True):
                ours = DDP(Branches(), **options)
                if late:
                    ours.replica.read_late()
                row.append(first_error(ours, plan, meeting.rank))
            theirs = nn.parallel.DistributedDataParallel(Branches(), **options)
            row.append(first_error(theirs, plan, meeting.rank))
    return found


def test_unused_parameters_are_refused_in_the_pass_in_which_torch_refuses_them() -> None:
    for found in spawn_ranks(2, _errors_under_both):
        for name, (at_once, late, theirs) in found.items():
            assert (name, at_once) == (name, theirs)
            assert (name, late) == (name, theirs)


def test_what_cannot_be_overlapped_is_refused_in_torchs_words() -> None:
    def one_rank(group: Group) -> None:
        ddp = DDP(nn.Linear(2, 2), process_group=group)
        with pytest.raises(RuntimeError, match=r"does not support overlapped DDP\. Please file an"):
            ddp._register_fused_optim(int)

    run_ranks(1, one_rank)
