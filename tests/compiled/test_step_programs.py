"""Whatever a program does around its steps, a compiled step does what the same loop by hand does.

Programs are made up: which layers each rank uses in each step, layers that are frozen and thawed,
other learning rates, optimizer states that are loaded, eager steps in between. The graph's code is
untraced, and ranks are threads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

import paceline
from paceline.compiled import Step, train_step
from paceline.groups import Group
from paceline.testing import run_ranks

HEADS, RANKS = 3, 3


@pytest.fixture(autouse=True, scope="module")
def _untraced() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Step, "_compile", lambda self, function: function)
        yield


class Headed(nn.Module):
    """A layer with BatchNorm, and several heads, of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)  # BatchNorm would cancel its gradient
        self.norm = nn.BatchNorm1d(7)
        self.heads = nn.ModuleList(nn.Linear(7, 3) for _ in range(HEADS))
        source = torch.Generator().manual_seed(3)
        for param in self.parameters():
            param.data.copy_(torch.randn(param.shape, generator=source) / 2)

    def forward(self, x: Tensor, used: frozenset[int]) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        return torch.stack([self.heads[head](hidden) for head in sorted(used)]).sum(0)


def loss_of(model: nn.Module, x: Tensor, used: frozenset[int]) -> Tensor:
    return model(x, used).square().mean()


@dataclass(frozen=True)
class Recipe:
    """How a model is trained."""

    optimizer: Callable[..., Optimizer]
    hyperparameters: dict[str, Any]
    max_norm: float | None
    accumulate: int
    keep_grads: bool
    scaled: bool

    def options(self) -> dict[str, Any]:
        """What train_step is told."""
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2) if self.scaled else None
        names = ("max_norm", "accumulate", "keep_grads")
        return {**{name: getattr(self, name) for name in names}, "scaler": scaler}


class ByHand:
    """The loop that a step stands for."""

    def __init__(self, ddp: Any, optimizer: Optimizer, options: dict[str, Any]) -> None:
        self.ddp, self.optimizer, self.options = ddp, optimizer, options

    def __call__(self, x: Tensor, used: frozenset[int]) -> None:
        scaler = self.options["scaler"] or GradScaler("cpu", enabled=False)
        with self.ddp.accumulate(self.options["accumulate"]) as last:
            scaler.scale(loss_of(self.ddp, x, used)).backward()
        if not last:
            return
        scaler.unscale_(self.optimizer)
        if self.options["max_norm"] is not None:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), self.options["max_norm"])
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()


class Training:
    """One model, trained by a compiled step or by hand."""

    def __init__(self, group: Group, recipe: Recipe, *, compiled: bool) -> None:
        self.rank, self.accumulate = group.rank(), recipe.accumulate
        ddp = paceline.DistributedDataParallel(Headed(), process_group=group, bucket_cap_mb=1e-4)
        self.ddp: Any = ddp
        self.optimizer = recipe.optimizer(ddp.parameters(), **recipe.hyperparameters)
        options = recipe.options()
        self.by_hand = ByHand(ddp, self.optimizer, options)
        self.step: Callable[..., Any] = (
            train_step(ddp, self.optimizer, loss_of, **options) if compiled else self.by_hand
        )
        self._seed = 100 * self.rank

    def _batch(self) -> Tensor:
        self._seed += 1
        return torch.randn(6, 5, generator=torch.Generator().manual_seed(self._seed))

    def train(self, used: tuple[frozenset[int], ...], *, eager: bool = False) -> None:
        """One step of the optimizer; each rank uses heads of its own."""
        for _ in range(self.accumulate):
            (self.by_hand if eager else self.step)(self._batch(), used[self.rank])
        self.optimizer.zero_grad()

    def freeze(self, head: int) -> None:
        """From here on it is not trained."""
        for param in self.ddp.module.heads[head].parameters():
            param.requires_grad_(False)

    def thaw(self) -> None:
        """Everything is trained again."""
        for param in self.ddp.parameters():
            param.requires_grad_(True)

    def set(self, name: str, number: float) -> None:
        """Another hyperparameter."""
        for group in self.optimizer.param_groups:
            group[name] = number

    def reload(self) -> None:
        """Load the optimizer's own state, as from a checkpoint."""
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def outcome(self) -> tuple[dict[str, Tensor], list[int]]:
        """Weights and buffers, and which parameters have a state."""
        states = self.optimizer.state_dict()["state"]
        weights = {n: t.detach().clone() for n, t in self.ddp.module.state_dict().items()}
        return weights, sorted(number for number, state in states.items() if state)


Event = Callable[[Training], None]

heads = st.frozensets(st.integers(0, HEADS - 1), min_size=1)
uses = st.tuples(*[heads] * RANKS)
steps: st.SearchStrategy[Event] = st.builds(lambda used: lambda t: t.train(used), uses)
others: st.SearchStrategy[Event] = st.one_of(
    st.builds(lambda used: lambda t: t.train(used, eager=True), uses),
    st.builds(lambda head: lambda t: t.freeze(head), st.integers(0, HEADS - 1)),
    st.just(lambda t: t.thaw()),
    st.just(lambda t: t.reload()),
    st.builds(lambda n: lambda t: t.set("lr", n), st.sampled_from([0.01, 0.1])),
    st.builds(lambda n: lambda t: t.set("weight_decay", n), st.sampled_from([0.0, 0.02])),
)
events = st.lists(st.one_of(steps, steps, others), min_size=3, max_size=9)

sgd = st.fixed_dictionaries(
    {
        "lr": st.just(0.05),
        "momentum": st.sampled_from([0.0, 0.9]),
        "dampening": st.sampled_from([0.0, 0.5]),
        "maximize": st.booleans(),
    }
)
adam = st.fixed_dictionaries({"lr": st.just(0.02), "amsgrad": st.booleans()})
recipes = st.builds(
    lambda chosen, *rest: Recipe(*chosen, *rest),
    st.one_of(st.tuples(st.just(SGD), sgd), st.tuples(st.sampled_from([Adam, AdamW]), adam)),
    st.sampled_from([None, 0.1]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
)


def both(group: Group, recipe: Recipe, program: list[Event]) -> list[Any]:
    second = group.split(list(range(group.size())))
    assert second is not None
    trainings = [
        Training(group, recipe, compiled=True),
        Training(second, recipe, compiled=False),
    ]
    for event in program:
        for training in trainings:
            event(training)
    return [training.outcome() for training in trainings]


@given(recipe=recipes, program=events, ranks=st.integers(1, RANKS))
@settings(max_examples=15, deadline=None)
def test_any_program_ends_with_the_weights_of_a_loop_by_hand(
    recipe: Recipe, program: list[Event], ranks: int
) -> None:
    for (found, stepped), (expected, by_hand) in run_ranks(
        ranks, lambda group: both(group, recipe, program)
    ):
        assert stepped == by_hand
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-4)
