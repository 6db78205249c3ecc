"""What a test gets in a rank: a number, a device, groups of all ranks, something to compare with.

``@on_ranks`` makes a function of a scene into a test that runs on every rank::

    @on_ranks
    def test_the_sum_reaches_every_rank(scene: Scene) -> None:
        ones = torch.ones(3, device=scene.device)
        scene.group.all_reduce(ones)
        assert_close(ones, torch.full_like(ones, scene.size))
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import paceline
from paceline.groups import Group
from paceline.testing import Meeting
from tests.ddp.toys import Grads, data, grads, weights

from .machine import Machine

N = TypeVar("N", bound=nn.Module)
Loss = Callable[[Any, int], Tensor]  # of a model, on the data of a rank
DEADLINE = 60.0  # seconds for a test


@dataclass(eq=False)
class Scene:
    """One rank's place in a test."""

    meeting: Meeting
    machine: Machine
    device: torch.device
    group: Group  # of all ranks; tests that end or break a group open one of their own
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _folders: list[str] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def opened(cls, meeting: Meeting, machine: Machine) -> Iterator[Scene]:
        """With torch's default group and one of ours; both end with the scene."""
        device = torch.device("cpu")
        if machine.device == "cuda":
            device = torch.device("cuda", meeting.rank % machine.count)
            torch.cuda.set_device(device)
        store, rank, size = meeting.store(), meeting.rank, meeting.size  # a port may be taken
        dist.init_process_group(machine.torch_backend, store=store, rank=rank, world_size=size)
        try:
            with meeting.new_group(machine.backend, device=device) as group:
                yield cls(meeting, machine, device, group)
        finally:
            dist.destroy_process_group()

    @property
    def rank(self) -> int:
        return self.meeting.rank

    @property
    def size(self) -> int:
        return self.meeting.size

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def new_group(self, **options: Any) -> Group:
        """Open one more group of all ranks; every rank calls it, and closes it by ``with``."""
        options = {"device": self.device} | options
        return paceline.new_group(
            options.pop("backend", self.machine.backend),
            store=dist.PrefixStore(f"group{next(self._numbers)}", self.meeting.store()),
            rank=self.rank,
            world_size=self.size,
            **options,
        )

    def place(self, model: N) -> N:
        """A copy of a model on this rank's device."""
        return copy.deepcopy(model).to(self.device)

    def data(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        """Numbers on the device, the same on every rank for the same seed."""
        return data(*shape, seed=seed).to(self.device, dtype)

    def wait(self) -> None:
        """Let the device finish, so that what went wrong on it is heard here."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def clean_up(self) -> None:
        """Forget what a test left, and hear of what still went wrong."""
        self.wait()
        torch._dynamo.reset()
        gc.collect()
        self.group.barrier()
        self.wait()
        while self._folders:
            shutil.rmtree(self._folders.pop())

    def folder(self) -> Path:
        """A folder that all ranks share, gone after the test."""
        if self.rank == 0:
            self._folders.append(tempfile.mkdtemp(prefix="paceline-gpu-"))
        return Path(self.gathered(self._folders[-1] if self.rank == 0 else "")[0])

    # -- compared with one process ------------------------------------------------------------

    def mean_grads(self, model: nn.Module, loss: Loss) -> Grads:
        """What one process gets that does all ranks' work: the gradient of their mean loss."""
        model = self.place(model)
        (sum(loss(model, rank) for rank in range(self.size)) / self.size).backward()
        return grads(model)

    def trained_alone(
        self,
        model: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        loss: Callable[[Any, int, int], Tensor],
        steps: int,
        max_norm: float | None = None,
    ) -> dict[str, Tensor]:
        """The weights of one process that does all ranks' ``loss(model, rank, step)``."""
        model = self.place(model)
        stepper = optimizer(model.parameters())
        for step in range(steps):
            stepper.zero_grad()
            (sum(loss(model, rank, step) for rank in range(self.size)) / self.size).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            stepper.step()
        return weights(model)

    def assert_same_bits(self, values: dict[str, Tensor] | Sequence[Tensor]) -> None:
        """Every rank has the very numbers of this one."""
        tensors = list(values.values()) if isinstance(values, dict) else list(values)
        own = torch.cat([t.detach().reshape(-1).double() for t in tensors])
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self.group.all_gather(rows, own)
        for rank, row in enumerate(rows):
            assert torch.equal(row, own), f"rank {rank} has other numbers than rank {self.rank}"

    def gathered(self, value: object) -> list[Any]:
        """What each rank has, by rank."""
        return list(self.group.all_gather_object(value))


def on_ranks(
    function: Callable[..., None] | None = None, *, deadline: float = DEADLINE, cuda: bool = False
) -> Any:
    """Make ``function(scene, **params)`` a test that runs on every rank of the crew.

    With ``cuda`` it is skipped where there is no GPU.
    """
    if function is None:
        return functools.partial(on_ranks, deadline=deadline, cuda=cuda)
    names = [name for name in inspect.signature(function).parameters if name != "scene"]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def test(crew: Any, **params: Any) -> None:
        from .crew import Task

        if cuda and crew.machine.device != "cuda":
            pytest.skip("no GPU")
        judge(crew.run(Task(function.__module__, function.__name__, params, deadline)))

    test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in ("crew", *names)]
    )
    test.__name__, test.__doc__ = function.__name__, function.__doc__
    test.__module__, test.scenario = function.__module__, function  # type: ignore[attr-defined]
    test.pytestmark = getattr(function, "pytestmark", [])  # type: ignore[attr-defined]
    return test


def judge(outcomes: Sequence[Any]) -> None:
    """Fail with what each rank said, unless all passed."""
    bad = [(r, o) for r, o in enumerate(outcomes) if o.how in ("failed", "lost")]
    if bad:
        told = "\n".join(f"rank {rank} {outcome.how}: {outcome.text}" for rank, outcome in bad)
        passed = [rank for rank in range(len(outcomes)) if rank not in dict(bad)]
        pytest.fail(f"{told}\n{f'ranks {passed} passed' if passed else ''}", pytrace=False)
    for outcome in outcomes:
        if outcome.how == "skipped":
            pytest.skip(outcome.text)


__all__ = ["Grads", "Scene", "assert_close", "judge", "on_ranks"]
