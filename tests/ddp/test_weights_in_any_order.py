"""Steps in any order: weighted and plain passes, freezing, clearing, failures; against the rule.

The rule: the mean is ``sum(w * g) / sum(w)`` over ranks and passes since the last average, beside
what ``.grad`` held before them. :class:`Rule` computes it from a list of steps, on plain numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline import DistributedDataParallel as DDP
from paceline.groups import Group
from paceline.testing import run_ranks

from .test_weights import line

PARTS, RANKS = 3, 2


@dataclass(frozen=True)
class Step:
    """What both ranks do at the same time."""

    does: str
    part: int = 0
    counts: tuple[float | None, ...] = ()  # of each rank; None: a plain pass
    grads: tuple[tuple[float, ...], ...] = ()  # of each rank, for each part


@dataclass
class Rule:
    """What ``.grad`` of each part holds after each average, on each rank."""

    wanted: list[bool] = field(default_factory=lambda: [True] * PARTS)
    trained: list[bool] = field(default_factory=lambda: [True] * PARTS)  # at the last forward
    before: list[list[float | None]] = field(
        default_factory=lambda: [[None] * PARTS for _ in range(RANKS)]
    )
    gave: list[list[list[tuple[float, float]]]] = field(
        default_factory=lambda: [[[] for _ in range(PARTS)] for _ in range(RANKS)]
    )
    counts: list[list[float]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    divisors: list[list[float]] = field(
        default_factory=lambda: [[1.0] * PARTS for _ in range(RANKS)]
    )
    weighted: bool = False
    noted: set[int] = field(default_factory=set)  # parts in which the last pass left something
    cleared: set[int] = field(default_factory=set)  # since then

    def take(self, step: Step) -> None:
        match step.does:
            case "forward":
                self._forward()
            case "toggle":
                self.wanted[step.part] = not self.wanted[step.part]
            case "clear":
                self._clear(step.part)
            case "clear all":
                for part in range(PARTS):
                    self._clear(part)
            case "gather" | "fail" | "average":
                self._forward()
                self._forget_cleared()
                getattr(self, "_" + step.does)(step)

    def _clear(self, part: int) -> None:
        for rank in range(RANKS):
            self.before[rank][part], self.gave[rank][part] = None, []
        self.cleared.add(part)

    def _forget_cleared(self) -> None:
        if self.counts[0] and self.noted and self.noted <= self.cleared:
            self._end()

    def _forward(self) -> None:
        if self.wanted == self.trained:
            return
        self._forget_cleared()
        stay = {p for p in range(PARTS) if self.wanted[p] and self.trained[p]}
        back = {p for p in range(PARTS) if self.wanted[p] and not self.trained[p]}
        back = {p for p in back if any(self.gave[rank][p] for rank in range(RANKS))}
        for part in range(PARTS):
            if self.trained[part] and not self.wanted[part]:
                for rank in range(RANKS):
                    self.divisors[rank][part] = sum(self.counts[rank]) if self.weighted else 1.0
        self.trained = list(self.wanted)
        if not stay | back:
            self._end()
        elif self.counts[0]:
            self.noted = (self.noted & stay) | back or self.noted

    def _end(self) -> None:
        """Nothing is owed any more: what is frozen keeps its own mean, or sum of plain passes."""
        for rank in range(RANKS):
            for part, gave in enumerate(self.gave[rank]):
                if gave:
                    own = sum(w * g for w, g in gave) / self.divisors[rank][part]
                    self.before[rank][part] = (self.before[rank][part] or 0.0) + own
                self.gave[rank][part] = []
            self.counts[rank] = []
        self.noted, self.cleared, self.weighted = set(), set(), False

    def _gather(self, step: Step) -> None:
        parts = {p for p in range(PARTS) if self.wanted[p]}
        for rank, (count, grads) in enumerate(zip(step.counts, step.grads, strict=True)):
            self.weighted = self.weighted or count is not None
            self.counts[rank].append(count or 1.0)
            for part in parts:
                self.gave[rank][part].append((count or 1.0, grads[part]))
        self.noted, self.cleared = parts, set()

    def _fail(self, step: Step) -> None:
        self.weighted = self.weighted or bool(self.counts[0])

    def _average(self, step: Step) -> None:
        self._gather(step)
        totals = [sum(counts) for counts in self.counts]
        for part in self.noted:
            mean = sum(w * g for gave in self.gave for w, g in gave[part]) / sum(totals)
            kept = [t * (b[part] or 0.0) for t, b in zip(totals, self.before, strict=True)]
            for rank in range(RANKS):
                self.before[rank][part] = mean + sum(kept) / sum(totals)
                self.gave[rank][part] = []
        self._end()


def some_steps(seed: int) -> list[Step]:
    draw, trained = random.Random(seed), set(range(PARTS))

    def a_pass(does: str, *, plain: bool = False) -> Step:
        counts = tuple(None if plain else float(draw.randint(1, 4)) for _ in range(RANKS))
        grads = [tuple(float(draw.randint(1, 5)) for _ in range(PARTS)) for _ in range(RANKS)]
        return Step(does, counts=counts, grads=tuple(grads))

    kinds = ["gather"] * 3 + ["toggle"] * 2
    kinds += ["fail", "clear", "clear all", "average", "clip", "forward"]
    steps = [a_pass("average")]
    for _ in range(draw.randint(3, 12)):
        does, part = draw.choice(kinds), draw.randrange(PARTS)
        if does in ("gather", "fail", "average"):
            steps.append(a_pass(does, plain=does == "gather" and draw.random() < 0.5))
        elif does != "toggle":
            steps.append(Step(does, part))
        elif trained ^ {part}:
            trained ^= {part}
            steps.append(Step(does, part))
    return [*steps, a_pass("average")]


class Beside(nn.Module):
    """Layers, each of which gets its own input as gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(line() for _ in range(PARTS)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x[:, n : n + 1]) for n, part in enumerate(self.parts))


def taken(group: Group, steps: list[Step]) -> list[list[float | None]]:
    """What each average left, by the wrapper."""

    def refuse(_grad: torch.Tensor) -> None:
        raise ArithmeticError

    def train(step: Step) -> None:
        count = step.counts[group.rank()]
        if count is not None:
            ddp.samples(count)
        x = torch.tensor([step.grads[group.rank()]], dtype=torch.float64)
        if step.does == "fail":
            x.requires_grad_().register_hook(refuse)
        if step.does == "average":
            ddp(x).sum().backward()
            return
        with ddp.no_sync():
            loss = ddp(x).sum()
            if step.does == "gather":
                loss.backward()
            else:
                with pytest.raises(ArithmeticError):
                    loss.backward()

    model, found = Beside(), []
    ddp = DDP(model, process_group=group)
    params = [part.weight for part in model.parts]
    trained = [True] * PARTS  # at the last forward
    for step in steps:
        if step.does in ("gather", "fail", "average", "forward"):
            trained = [param.requires_grad for param in params]
        match step.does:
            case "forward":
                ddp(torch.ones(1, PARTS, dtype=torch.float64))
            case "toggle":
                params[step.part].requires_grad_(not params[step.part].requires_grad)
            case "clear":
                params[step.part].grad = None
            case "clear all":
                ddp.zero_grad()
            case "clip":
                for param, is_trained in zip(params, trained, strict=True):
                    if param.requires_grad and is_trained and param.grad is not None:
                        param.grad.mul_(1.0)
            case _:
                train(step)
        if step.does == "average":
            found.append([None if p.grad is None else p.grad.item() for p in params])
    return found


@settings(max_examples=250)
@given(seed=st.integers(0, 2**32))
def test_any_steps_leave_the_means_of_the_rule(seed: int) -> None:
    steps, rule = some_steps(seed), Rule()
    expected: list[list[list[float | None]]] = [[] for _ in range(RANKS)]
    for step in steps:
        rule.take(step)
        if step.does == "average":
            for rank in range(RANKS):
                expected[rank].append(list(rule.before[rank]))
    ranks = run_ranks(RANKS, lambda group: taken(group, steps))
    for found, wanted in zip(ranks, expected, strict=True):
        for left, right in zip(found, wanted, strict=True):
            assert left == [None if mean is None else pytest.approx(mean) for mean in right]
