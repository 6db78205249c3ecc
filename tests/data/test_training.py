"""A wrapped model with shards and a ShardedLoader, together: what a user writes."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from hashlib import sha256
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from paceline.data import Shard, ShardedLoader, ShardedStep, keyed_random
from paceline.ddp import DistributedDataParallel
from paceline.errors import PeerError, StepMismatchError
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks

SHARDS, BATCH = 5, 13


class Rows(Dataset[Any]):
    """Noisy samples, drawn when they are fetched."""

    def __init__(self, length: int = 43) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(torch.arange(6.0) * index) + 0.1 * torch.randn(6)
        return x, x.sum(0, keepdim=True)


class Broken(Rows):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise OSError(f"sample {index} cannot be read")


def make_model() -> nn.Module:
    with keyed_random(Shard(seed=3, step=0, index=0, count=1)):  # ranks may be threads
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )


class Training:
    """A model, its optimizer and its loader."""

    def __init__(self, group: Group, **options: Any) -> None:
        self.loader = ShardedLoader(
            options.pop("dataset", Rows()), shards=SHARDS, batch=BATCH, group=group, **options
        )
        self.ddp = DistributedDataParallel(make_model(), process_group=group, shards=SHARDS)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)

    def do(self, step: ShardedStep) -> None:
        for shard, (x, y) in self.ddp.shards_of(step):
            with self.ddp.shard(shard):
                mse_loss(self.ddp(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epochs(self, count: int) -> None:
        for _ in range(self.loader.epoch, count):
            for step in self.loader:
                self.do(step)

    def state(self) -> dict[str, Any]:
        parts = {"model": self.ddp.module, "optimizer": self.optimizer, "loader": self.loader}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        state = deepcopy(state)  # ranks are threads, and an optimizer keeps the tensors it is given
        self.ddp.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])

    def bits(self) -> str:
        tensors = [*self.ddp.module.state_dict().values()]
        tensors += [v for s in self.optimizer.state_dict()["state"].values() for v in s.values()]
        found = sha256()
        for tensor in tensors:
            found.update(tensor.detach().contiguous().numpy().tobytes())
        return found.hexdigest()


def trained(group: Group, **options: Any) -> str:
    training = Training(group, **options)
    training.epochs(2)
    training.loader.close()
    return training.bits()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As many here as in processes that are started: bits may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(one_thread: None) -> str:
    (bits,) = run_ranks(1, trained)
    return bits


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_that_are_threads_end_with_the_bits_of_one_rank(alone: str, ranks: int) -> None:
    assert run_ranks(ranks, trained) == [alone] * ranks


def test_processes_with_and_without_workers_end_with_the_bits_of_one_rank(alone: str) -> None:
    assert spawn_ranks(2, in_process) == [[alone, alone]] * 2


def in_process(meeting: Meeting) -> list[str]:
    torch.set_num_threads(1)
    with meeting.new_group("gloo") as group:
        return [trained(group, num_workers=workers) for workers in (0, 2)]


def test_a_run_that_is_saved_on_three_ranks_goes_on_on_two_and_on_one(alone: str) -> None:
    def begin(group: Group) -> dict[str, Any]:
        training = Training(group)
        for _, step in zip(range(2), training.loader, strict=False):
            training.do(step)
        return training.state()

    def go_on(group: Group) -> dict[str, Any]:
        training = Training(group)
        training.load(state)
        training.do(next(iter(training.loader)))
        return training.state()

    def end(group: Group) -> str:
        training = Training(group)
        training.load(state)
        training.epochs(2)
        return training.bits()

    state = run_ranks(3, begin)[2]
    state = run_ranks(2, go_on)[0]
    assert run_ranks(1, end) == [alone]


def test_a_rank_whose_dataset_has_another_length_is_told_before_anything_is_averaged() -> None:
    def one_rank(group: Group) -> str:
        training = Training(group, dataset=Rows(43 + group.rank()))
        with pytest.raises(StepMismatchError) as caught:
            training.do(next(iter(training.loader)))
        return caught.value.said[1]

    for said in run_ranks(2, one_rank):
        assert said.endswith("44 samples shuffled, 13 to a step")


def test_a_sample_that_cannot_be_read_on_one_rank_is_told_to_the_others() -> None:
    def one_rank(group: Group) -> str:
        training = Training(group, dataset=Broken() if group.rank() == 1 else Rows())
        with pytest.raises(OSError if group.rank() == 1 else PeerError) as caught:
            training.do(next(iter(training.loader)))
        return str(caught.value)

    assert all("cannot be read" in said for said in run_ranks(2, one_rank))
