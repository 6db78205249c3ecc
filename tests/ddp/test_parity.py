"""The same training on ranks, in one process on the whole batch, and under torch's own DDP."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import TINY, Grads, assert_same, data, fill, grads, weights

WIDTH = 3
KINDS = ("linear", "single", "norm", "frozen", "tied", "embedding", "sparse")
TURNS = ("always", "never", "even steps", "first rank", "alternating", "late", "early")


@dataclass(frozen=True)
class Block:
    """A layer, and when it takes part."""

    kind: str
    turn: str

    def takes_part(self, step: int, rank: int) -> bool:
        return {
            "always": True,
            "never": False,
            "even steps": step % 2 == 0,
            "first rank": rank == 0,
            "alternating": (step + rank) % 2 == 0,
            "late": step >= 2,
            "early": step < 2,
        }[self.turn]


@dataclass(frozen=True)
class Training:
    """A model and how it is trained."""

    blocks: tuple[Block, ...]
    always_at: int  # where the block stands that is always used
    backwards: bool  # odd steps go through the blocks the other way round
    cap: float | None
    views: bool | None
    set_to_none: bool
    momentum: float
    accumulate: int  # steps between two of the optimizer
    steps: int = 5

    @property
    def close(self) -> dict[str, float]:
        single = any(block.kind == "single" for block in self.blocks)
        return {"rtol": 1e-3, "atol": 1e-4} if single else {"rtol": 1e-9, "atol": 1e-10}


class Net(nn.Module):
    """Residual blocks."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        at = training.always_at % (len(training.blocks) + 1)
        blocks = training.blocks
        self.plan = (*blocks[:at], Block("linear", "always"), *blocks[at:])
        self.backwards = training.backwards
        self.layers = nn.ModuleList(self._layer(block.kind) for block in self.plan)
        self.unused = nn.Linear(2, 2, dtype=torch.float64)
        fill(self)

    def _layer(self, kind: str) -> nn.Module:
        if kind in ("embedding", "sparse"):
            return nn.Embedding(5, WIDTH, sparse=kind == "sparse", dtype=torch.float64)
        if kind == "norm":
            return nn.LayerNorm(WIDTH, dtype=torch.float64)
        dtype = torch.float32 if kind == "single" else torch.float64
        layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        if kind == "tied":
            self.tied = getattr(self, "tied", layer.weight)
            layer.weight = self.tied
        return layer.requires_grad_(kind != "frozen")

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        numbers = (x[:, 0] * 10).long() % 5
        pairs = list(zip(self.plan, self.layers, strict=True))
        for block, layer in reversed(pairs) if self.backwards and step % 2 else pairs:
            if not block.takes_part(step, rank):
                continue
            if isinstance(layer, nn.Embedding):
                x = x + layer(numbers)
            elif block.kind == "single":
                x = x + torch.tanh(layer(x.float())).double()
            else:
                x = x + torch.tanh(layer(x))
        return x


Trace = list[tuple[Grads, dict[str, Tensor]]]


def train(model: nn.Module, training: Training, ranks: list[int]) -> Trace:
    """Gradients and weights after every step, on the batches of ``ranks``."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=training.momentum)
    trace = []
    for step in range(training.steps):
        losses = [
            model(data(4, WIDTH, seed=100 * step + rank), step, rank).square().mean()
            for rank in ranks
        ]
        (sum(losses) / len(losses)).backward()
        trace.append((grads(model), weights(model)))
        if (step + 1) % training.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=training.set_to_none)
    return trace


def assert_same_trace(found: Trace, expected: Trace, training: Training) -> None:
    for (mine, my_weights), (theirs, their_weights) in zip(found, expected, strict=True):
        assert_same(mine, theirs, **training.close)
        assert_same(my_weights, their_weights, **training.close)


# Against one process.

blocks = st.builds(Block, st.sampled_from(KINDS), st.sampled_from(TURNS))
trainings = st.builds(
    Training,
    blocks=st.lists(blocks, min_size=1, max_size=6).map(tuple),
    always_at=st.integers(0, 6),
    backwards=st.booleans(),
    cap=st.sampled_from([None, TINY, 3 * TINY]),
    views=st.sampled_from([None, True, False]),
    set_to_none=st.booleans(),
    momentum=st.sampled_from([0.0, 0.9]),
    accumulate=st.integers(1, 2),
)


@settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(training=trainings, ranks=st.integers(1, 4))
def test_ranks_train_as_one_process_on_the_whole_batch(training: Training, ranks: int) -> None:
    def one_rank(group: Group) -> Trace:
        ddp = DDP(
            Net(training),
            process_group=group,
            bucket_cap_mb=training.cap,
            gradient_as_bucket_view=training.views,
        )
        return train(ddp, training, [group.rank()])

    expected = train(Net(training), training, list(range(ranks)))
    for found in run_ranks(ranks, one_rank):
        assert_same_trace(found, expected, training)


# Against torch.


def some_training(seed: int) -> Training:
    """Nothing sparse: beside a sparse gradient torch divides the dense ones twice (2.13, gloo)."""
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS if kind != "sparse"]
    some = [Block(rng.choice(kinds), rng.choice(TURNS)) for _ in range(rng.randint(2, 6))]
    return Training(
        tuple(some),
        always_at=rng.randrange(6),
        backwards=rng.random() < 0.5,
        cap=rng.choice([None, TINY]),
        views=rng.choice([True, False]),
        set_to_none=rng.random() < 0.7,
        momentum=rng.choice([0.0, 0.9]),
        accumulate=rng.choice([1, 2]),
    )


def _train_under_both(meeting: Meeting, seeds: range) -> list[tuple[Trace, Trace]]:
    dist.init_process_group("gloo")
    both = []
    for seed in seeds:
        training = some_training(seed)
        options: dict[str, Any] = {
            "bucket_cap_mb": training.cap,
            "gradient_as_bucket_view": training.views,
        }
        theirs = nn.parallel.DistributedDataParallel(
            Net(training),
            find_unused_parameters=True,
            **options,
        )
        expected = train(theirs, training, [meeting.rank])
        ours = DDP(Net(training), **options)
        found = train(ours, training, [meeting.rank])
        both.append((found, expected))
    dist.destroy_process_group()
    return both


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(10)), (3, range(10, 16))])
def test_ranks_train_as_under_torchs_ddp(ranks: int, seeds: range) -> None:
    for results in spawn_ranks(ranks, _train_under_both, seeds):
        for seed, (found, expected) in zip(seeds, results, strict=True):
            assert_same_trace(found, expected, some_training(seed))
