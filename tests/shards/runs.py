"""Runs that must have the same bits whoever computes what: models, data, training, comparison."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel as DDP
from paceline.data import Shard
from paceline.groups import Group
from paceline.optim import ZeroRedundancyOptimizer, clip_grad_norm_
from paceline.testing import run_ranks

WORDS, WIDTH = 11, 6
_alone = threading.Lock()  # ranks that are threads have torch's random numbers together


class Net(nn.Module):
    """Everything that could make a shard's result depend on who computes it, as asked for."""

    def __init__(self, parts: Sequence[str], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = frozenset(parts)
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=dtype)
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.batch_norm = nn.BatchNorm1d(WIDTH, dtype=dtype) if "batchnorm" in parts else None
        self.layer_norm = nn.LayerNorm(WIDTH, dtype=dtype) if "layernorm" in parts else None
        self.left = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.right = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.unused = nn.Linear(3, 2, dtype=dtype)
        self.out = nn.Linear(WIDTH, WORDS, dtype=dtype)
        self.register_buffer("seen", torch.zeros(WORDS, dtype=torch.int64))
        if "shared" in parts:
            self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        if "counted" in self.parts:
            self.seen += torch.bincount(words.flatten(), minlength=WORDS)
        x = self.embed(words)
        if "checkpoint" in self.parts:
            x = checkpoint(self._middle, x, use_reentrant="reentrant" in self.parts)
        else:
            x = self._middle(x)
        if "branches" in self.parts:
            x = self.left(x) if int(words.sum()) % 2 else self.right(x)
        return self.out(x)

    def _middle(self, x: Tensor) -> Tensor:
        x = self.inner(x).tanh()
        if self.batch_norm is not None:
            x = self.batch_norm(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return F.dropout(x, 0.3) if "dropout" in self.parts else x


@dataclass(frozen=True)
class Run:
    """What a run is, apart from who computes it."""

    shards: int = 4
    parts: tuple[str, ...] = ()
    optimizer: str = "SGD"
    zero: bool = False
    clip: float = 0.0
    tokens: bool = False  # shards count as their numbers of words, which differ and may be 0
    steps: int = 3
    seed: int = 0
    dtype: torch.dtype = torch.float32
    ddp: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, shard: Shard) -> tuple[Tensor, Tensor, int]:
        """The words of a shard, what follows them, and how many count."""
        source = random.Random(f"{self.seed} {shard.step} {shard.index}")
        rows = source.randrange(2, 6)
        words = torch.tensor([source.randrange(WORDS) for _ in range(rows)])
        counted = source.choice([0, 0, rows, rows]) if self.tokens else rows
        return words, (words + 1) % WORDS, counted

    def shares(self, step: int, ranks: int) -> list[list[int]]:
        """Who computes what in a step, another way in each: some ranks may have nothing."""
        source = random.Random(f"{self.seed} {step} {ranks}")
        numbers = list(range(self.shards))
        source.shuffle(numbers)
        found: list[list[int]] = [[] for _ in range(ranks)]
        for number in numbers:
            found[source.randrange(ranks)].append(number)
        return found


@dataclass
class Trainee:
    """One rank's model and optimizer in a run."""

    run: Run
    group: Group
    device: Any = "cpu"

    def __post_init__(self) -> None:
        run = self.run
        with _alone, torch.random.fork_rng():
            torch.manual_seed(run.seed)
            net = Net(run.parts, run.dtype).to(self.device)
        self.ddp = DDP(net, process_group=self.group, shards=run.shards, **run.ddp)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> Optimizer:
        kind, settings = {
            "SGD": (SGD, {"lr": 0.1, "momentum": 0.9}),
            "AdamW": (AdamW, {"lr": 0.01}),
        }[self.run.optimizer]
        if not self.run.zero:
            return kind(self.ddp.parameters(), **settings)
        return ZeroRedundancyOptimizer(
            self.ddp.parameters(), kind, self.group, ddp=self.ddp, **settings
        )

    def train(self, first: int, last: int) -> None:
        """The steps from ``first`` up to ``last``."""
        for step in range(first, last):
            mine = self.run.shares(step, self.group.size())[self.group.rank()]
            for index in self.ddp.shards_of(mine):
                self.compute(Shard(self.run.seed, step, index, self.run.shards))
            if self.run.clip:
                clip_grad_norm_(self.optimizer, self.run.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def compute(self, shard: Shard) -> None:
        """The forward and backward pass of one shard."""
        words, targets, counted = self.run.batch(shard)
        with _alone, self.ddp.shard(shard):
            if self.run.tokens:
                self.ddp.samples(counted)
            words, targets = words.to(self.device), targets.to(self.device)
            F.cross_entropy(self.ddp(words), targets).backward()

    def state(self) -> dict[str, Tensor]:
        """All weights, buffers and what the optimizer keeps."""
        found = {name: t.clone() for name, t in self.ddp.module.state_dict().items()}
        for number, values in self._kept().items():
            for name, value in values.items():
                if value is not None:
                    found[f"optimizer.{number}.{name}"] = torch.as_tensor(value).clone()
        return found

    def _kept(self) -> dict[int, Any]:
        if not isinstance(self.optimizer, ZeroRedundancyOptimizer):
            return self.optimizer.state_dict()["state"]
        kept: dict[int, Any] = {}
        for rank in range(self.group.size()):
            self.optimizer.consolidate_state_dict(rank)
            if rank == self.group.rank():
                kept = dict(sorted(self.optimizer.state_dict()["state"].items()))
        return kept


def train(run: Run, ranks: int) -> dict[str, Tensor]:
    """The state after a run on so many ranks, which all must have."""

    def one_rank(group: Group) -> dict[str, Tensor]:
        trainee = Trainee(run, group)
        trainee.train(0, run.steps)
        return trainee.state()

    first, *others = run_ranks(ranks, one_rank)
    for other in others:
        require_equal(first, other)
    return first


def require_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Fail unless both have the same tensors, to the last bit."""
    assert list(one) == list(other)
    wrong = [name for name in one if not same(one[name], other[name])]
    assert not wrong, f"these differ: {wrong}"


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits; NaN is NaN."""
    return torch.equal(one, other) or (
        one.shape == other.shape and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    )
