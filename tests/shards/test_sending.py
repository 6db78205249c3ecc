"""Sums that leave in the last backward pass of a rank's last shard: when, and what can go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline import DistributedDataParallel as DDP
from paceline._reducer import step_sums
from paceline.data import Shard
from paceline.errors import ModuleArgumentError, PeerError, StepMismatchError
from paceline.groups import Call, Group
from paceline.testing import run_ranks
from tests.shards.runs import Run, require_equal, train

DISTURBED = ("again", "clipped", "by data", "dropped", "counted late")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter has a bucket of its own."""
    monkeypatch.setattr(step_sums, "_BUCKET", {"cpu": 64})


class Chain(nn.Module):
    """Three products, one after the other, and one of which a shard may do without."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((9,), w) for w in (0.5, 0.7, 1.1))
        self.rare = nn.Parameter(torch.ones(9))

    def forward(self, x: Tensor, *, rare: bool = False) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x * weight)
        return x * self.rare if rare else x


class Watched:
    """A wrapped chain that notes what is sent, and whether a backward pass ran then."""

    def __init__(self, group: Group, shards: int = 4) -> None:
        self.model, self.group, self.shards = Chain(), group, shards
        self.ddp = DDP(self.model, process_group=group, shards=shards)
        self.in_backward = False
        self.sent: list[tuple[int, bool]] = []
        self._handle = group.register_hooks(before=self._note)
        self.index = 0  # of the shard that is computed

    def _note(self, call: Call) -> None:
        self.sent.append((call.inputs[0].numel(), self.in_backward))

    def step(self, number: int, mine: Any, size: float = 1.0, **options: Any) -> list[bool]:
        """Take a step; whether each bucket of a parameter left in a backward pass."""
        self.sent.clear()
        for index in self.ddp.shards_of(mine):
            self.index = index
            with self.ddp.shard(Shard(0, number, index, self.shards)):
                x = torch.full((2, 9), 0.1 * (index + 1))
                loss = self.ddp(x, **options).sum() * size
                self.in_backward = True
                loss.backward()
                self.in_backward = False
        return [early for numel, early in self.sent if numel == 16]

    def fail_in_last(self, error: type[BaseException]) -> Any:
        """Have the last backward pass of rank 1's last shard fail when most of it is done."""

        def fail(_: Tensor) -> None:
            if self.index == 3:
                raise error("on purpose")

        return self.model.weights[0].register_hook(fail)

    def grads(self) -> list[Any]:
        found = [None if p.grad is None else p.grad.clone() for p in self.ddp.parameters()]
        self.ddp.zero_grad()
        return found


def shares(group: Group, shards: int = 4) -> list[int]:
    return list(range(group.rank(), shards, group.size()))


def alone(*sizes: float) -> list[Any]:
    """The gradients of each step on one rank, whose gradients have these sizes."""

    def one_rank(group: Group) -> list[Any]:
        model, found = Watched(group), []
        for number, size in enumerate(sizes):
            model.step(number, range(4), size)
            found.append(model.grads())
        return found

    return run_ranks(1, one_rank)[0]  # type: ignore[no-any-return]


def same(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True)
    return all(p is q or (p is not None and q is not None and torch.equal(p, q)) for p, q in pairs)


def test_sums_leave_in_the_last_backward_pass_from_the_second_step_on() -> None:
    def one_rank(group: Group) -> None:
        model = Watched(group)
        assert model.step(0, shares(group)) == [False] * 3, "no rank knows of levels"
        for number in (1, 2, 3):
            assert model.step(number, shares(group)) == [True] * 3
            assert len(model.sent) == 4, "with the account, and nothing twice"

    run_ranks(2, one_rank)


def test_a_rank_that_does_not_know_its_last_shard_sends_at_the_end() -> None:
    def one_rank(group: Group) -> list[bool]:
        model = Watched(group)
        for number in (0, 1):
            mine = shares(group)
            found = model.step(number, iter(mine) if group.rank() else mine)
        return found

    assert run_ranks(2, one_rank) == [[True] * 3, [False] * 3]


def test_ranks_without_shards_and_levels_that_change_are_not_seen_in_the_result() -> None:
    sizes = (1.0, 1.0, 1e6, 1e6, 1e-6, 0.0, 1.0, 3e4)
    expected = alone(*sizes)

    def one_rank(group: Group) -> None:
        model = Watched(group)
        for number, size in enumerate(sizes):
            model.step(number, range(4) if number % 3 == group.rank() else [], size)
            assert same(model.grads(), expected[number]), f"step {number}"

    run_ranks(3, one_rank)


def test_a_parameter_that_is_used_again_or_no_more_has_the_right_gradient() -> None:
    def one_rank(group: Group) -> list[Any]:
        model, found = Watched(group), []
        for number, rare in enumerate((False, True, True, False, False, True)):
            model.step(number, shares(group), rare=rare)
            found.append(model.grads())
        return found

    (expected,) = run_ranks(1, one_rank)
    for found in run_ranks(2, one_rank):
        assert all(map(same, found, expected))
        assert [grads[0] is None for grads in found] == [True, False, False, True, True, False]


def disturb(model: Watched, kind: str, index: int) -> None:
    """Change gradients of a shard behind its backward pass."""
    params = list(model.ddp.parameters())
    if kind == "again":
        (model.ddp(torch.full((2, 9), 0.3)).sum() * index).backward()
    elif kind == "clipped":
        torch.nn.utils.clip_grad_norm_(params, 0.1)
    elif kind == "by data":
        for param in params[-1:]:
            param.grad.data.mul_(0.3)  # of which autograd does not know
    elif kind == "dropped":
        params[-1].grad = None
    elif kind == "counted late":
        model.ddp.samples(index)


@pytest.mark.parametrize("kind", DISTURBED)
def test_gradients_that_change_after_they_were_sent_are_corrected(kind: str) -> None:
    def one_rank(group: Group) -> list[Any]:
        model, found = Watched(group), []
        for number in range(4):
            model.sent.clear()
            for index in model.ddp.shards_of(shares(group)):
                with model.ddp.shard(Shard(0, number, index, 4)):
                    model.in_backward = True
                    model.ddp(torch.full((2, 9), 0.1 * (index + 1))).sum().backward()
                    model.in_backward = False
                    if number == 2 and (kind != "dropped" or index == 3):
                        disturb(model, kind, index)
            early = [early for numel, early in model.sent if numel == 16]
            assert group.size() == 1 or any(early) == (number in (1, 2)), "and no rank sends early"
            found.append(model.grads())
        return found

    (expected,) = run_ranks(1, one_rank)
    assert not same(expected[1], expected[2])
    for found in run_ranks(2, one_rank):
        assert all(map(same, found, expected))


def test_nonfinite_gradients_that_were_sent_can_be_taken_back() -> None:
    def one_rank(group: Group) -> list[Any]:
        model, found = Watched(group), []
        for number in range(3):
            for index in model.ddp.shards_of(shares(group)):
                with model.ddp.shard(Shard(0, number, index, 4)):
                    bad = float("nan") if index == 3 else float("inf")
                    model.ddp(torch.full((2, 9), 0.1)).mul(
                        bad if number == 1 else 1
                    ).sum().backward()
                    if index == 3 and number == 1:
                        for param in model.ddp.parameters():
                            if param.grad is not None:
                                param.grad.nan_to_num_(2.0)
            found.append([g if g is None else g.nan_to_num(7, 8, 9) for g in model.grads()])
        return found

    (expected,) = run_ranks(1, one_rank)
    for found in run_ranks(2, one_rank):
        assert all(map(same, found, expected))


def test_a_rank_that_fails_after_sums_have_left_is_named_and_all_can_go_on() -> None:
    expected = alone(1.0)

    def one_rank(group: Group) -> None:
        model = Watched(group)
        model.step(0, shares(group))
        model.grads()
        handle = model.fail_in_last(ZeroDivisionError)
        kind: Any = ZeroDivisionError if group.rank() else PeerError
        for attempt in range(2):  # the second time nothing is promised
            with pytest.raises(kind, match="on purpose"):
                model.step(1, shares(group))
            buckets = [early for numel, early in model.sent if numel == 16]
            assert any(buckets) == (attempt == 0)
            model.in_backward = False
        handle.remove()
        assert all(grad is None for grad in model.grads())
        for _ in range(3):
            model.step(0, shares(group))
            assert same(model.grads(), expected[0])

    run_ranks(2, one_rank)


def test_a_rank_that_fails_before_its_step_leaves_gradients_as_they_are() -> None:
    def one_rank(group: Group) -> None:
        model = Watched(group)
        model.step(0, shares(group))
        before = [None if p.grad is None else p.grad.clone() for p in model.ddp.parameters()]
        kind: Any = ModuleArgumentError if group.rank() else PeerError
        with pytest.raises(kind):
            if group.rank():
                with model.ddp.shard(Shard(0, 1, 0, 5)):
                    pass
            else:
                model.step(1, shares(group))
        assert same([p.grad for p in model.ddp.parameters()], before)

    run_ranks(2, one_rank)


def test_a_step_that_was_interrupted_after_sums_have_left_is_told_to_all() -> None:
    expected = alone(1.0)

    def one_rank(group: Group) -> None:
        model = Watched(group)
        model.step(0, shares(group))
        model.grads()
        if group.rank():
            handle = model.fail_in_last(KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                model.step(1, shares(group))
            handle.remove()
            assert any(early for _, early in model.sent)
        with pytest.raises(PeerError, match="interrupted of which a part had been sent"):
            model.step(1, shares(group))
        for _ in range(3):
            model.step(0, shares(group))
            assert same(model.grads(), expected[0])

    run_ranks(2, one_rank)


@pytest.mark.parametrize("everywhere", [False, True])
def test_parameters_that_are_frozen_change_what_is_sent_on_all_ranks_alike(
    everywhere: bool,
) -> None:
    def one_rank(group: Group) -> None:
        model = Watched(group)
        model.step(0, shares(group))
        model.grads()
        if everywhere or group.rank():
            model.model.weights[1].requires_grad_(False)
        if everywhere:
            model.step(1, shares(group))
            return
        with pytest.raises(StepMismatchError, match="trained parameters"):
            model.step(1, shares(group))

    run_ranks(2, one_rank)


runs = st.builds(
    Run,
    shards=st.integers(2, 9),
    parts=st.sets(
        st.sampled_from(("dropout", "batchnorm", "shared", "branches", "checkpoint", "reentrant"))
    ).map(lambda found: tuple(sorted(found))),
    zero=st.booleans(),
    tokens=st.booleans(),
    steps=st.just(3),
    seed=st.integers(0, 1 << 20),
)


@given(run=runs, ranks=st.sampled_from([2, 3]))
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_run_whose_sums_leave_in_many_buckets_has_the_same_bits(run: Run, ranks: int) -> None:
    require_equal(train(run, 1), train(run, ranks))
