"""DistributedDataParallel in a Join context: ranks that have run out stand in, and cost nothing."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing import assert_close

from paceline import DistributedDataParallel as DDP
from paceline import Join
from paceline.ddp.mixed_precision import _MixedPrecision
from paceline.ddp.sync_batchnorm import SyncBatchNorm
from paceline.errors import (
    GroupError,
    InputsExhaustedError,
    ModuleStateError,
    PeerDiedUnjoinedError,
    PeerError,
    PeerExhaustedError,
    PeerFailedError,
    RanksFailedError,
)
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.toys import TINY, Branches, data, fill, weights
from tests.join.test_protocol import Counter

WIDE = 4
STEPS = (2, 4, 0, 3)  # of each rank


def model_of(kind: str = "plain") -> nn.Module:
    norms = {"plain": nn.Identity, "batch norm": nn.BatchNorm1d, "sync": SyncBatchNorm}
    model = nn.Sequential(nn.Linear(WIDE, 5), norms[kind](5), nn.Tanh(), nn.Linear(5, 1))
    return fill(model.double())


def batch(rank: int, step: int) -> Tensor:
    return data(3, WIDE, seed=100 * rank + step)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def train(
    ddp: DDP, group: Any, steps: Sequence[int], *, each: Callable[[int], None] = lambda _: None
) -> None:
    """The loop of a user, inside or outside of Join."""
    optimizer = sgd(ddp)
    for step in range(steps[group.rank()]):
        optimizer.zero_grad()
        loss_of(ddp, batch(group.rank(), step)).backward()
        optimizer.step()
        each(step)


def by_hand(
    steps: Sequence[int], *, by_active: bool = False, kind: str = "plain"
) -> dict[str, Tensor]:
    """One process that does what all ranks do, and takes the mean over ranks."""
    model = model_of(kind)
    optimizer = sgd(model)
    for step in range(max(steps)):
        active = [rank for rank, n in enumerate(steps) if step < n]
        optimizer.zero_grad()
        if kind == "sync":
            loss_of(model, torch.cat([batch(rank, step) for rank in active])).backward()
            share = len(active) / (len(active) if by_active else len(steps))
        else:
            for rank in active:
                loss_of(model, batch(rank, step)).backward()
            share = 1 / (len(active) if by_active else len(steps))
        for p in model.parameters():
            p.grad.mul_(share)
        optimizer.step()
    return weights(model)


def same(found: dict[str, Tensor], expected: dict[str, Tensor], error: float = 1e-12) -> None:
    for name, value in expected.items():
        assert_close(found[name], value, rtol=error, atol=error)


def still_works(group: Group) -> bool:
    tensor = torch.ones(1)
    group.all_reduce(tensor)
    return tensor.item() == group.size()


# -- the same training, however it is set up ----------------------------------------------------


def average(group, bucket):
    """A plain communication hook; torch insists on what annotations say, so it has none."""
    work = group.all_reduce(bucket.buffer().div_(group.size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing special": {},
    "many buckets": {"bucket_cap_mb": TINY},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "no views": {"gradient_as_bucket_view": False},
    "no buffers": {"forward_sync_buffers": False},
}


@pytest.mark.parametrize("by_active", [False, True])
@pytest.mark.parametrize("kind", ["plain", "sync"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_ranks_that_have_run_out_add_nothing_and_end_with_the_last_ones_model(
    options: str, several: bool, kind: str, by_active: bool
) -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp, counter = DDP(model_of(kind), process_group=group, **OPTIONS[options]), Counter(group)
        joinables = [ddp, counter] if several else [ddp]
        with Join(joinables, divide_by_initial_world_size=not by_active):
            train(ddp, group, STEPS, each=lambda _: counter.step() if several else None)
        if several:
            assert counter.shadowed == max(STEPS) - STEPS[group.rank()]
        assert still_works(group)
        return weights(ddp)

    expected = by_hand(STEPS, by_active=by_active, kind=kind)
    for found in run_ranks(len(STEPS), one_rank):
        same(found, expected)


@pytest.mark.parametrize("kind", ["plain", "sync"])
def test_a_counter_may_come_first(kind: str) -> None:
    def one_rank(group: Group) -> tuple[dict[str, Tensor], list[float]]:
        ddp, counter = DDP(model_of(kind), process_group=group), Counter(group)
        sums: list[float] = []
        optimizer = sgd(ddp)
        with Join([counter, ddp]):
            for step in range(STEPS[group.rank()]):
                sums.append(counter.step())
                optimizer.zero_grad()
                loss_of(ddp, batch(group.rank(), step)).backward()
                optimizer.step()
        return weights(ddp), sums

    found = run_ranks(len(STEPS), one_rank)
    assert found[1][1] == [3.0, 3.0, 2.0, 1.0]
    for model, _ in found:
        same(model, by_hand(STEPS, kind=kind))


def test_communication_hooks_see_the_ranks_that_stand_in_as_zeros() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DDP(model_of(), process_group=group)
        ddp.register_comm_hook(group, average)
        with ddp.join():
            train(ddp, group, STEPS)
        return weights(ddp)

    for found in run_ranks(len(STEPS), one_rank):
        same(found, by_hand(STEPS))


def test_mixed_precision_goes_on_too() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        policy = _MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)
        ddp = DDP(model_of(), process_group=group, mixed_precision=policy)
        with ddp.join():
            train(ddp, group, STEPS)
        return weights(ddp)

    for found in run_ranks(len(STEPS), one_rank):
        same(found, by_hand(STEPS), 1e-5)


def test_parameters_that_a_step_leaves_out_stay_out() -> None:
    def one_rank(group: Group) -> tuple[dict[str, Tensor | None], int]:
        ddp = DDP(Branches(), process_group=group)
        with ddp.join():
            for step in range(STEPS[group.rank()]):
                ddp.zero_grad()
                ddp(data(2, 3, seed=step), chosen=[step % 2]).sum().backward()
        grads = {n: p.grad for n, p in ddp.module.named_parameters()}
        return grads, ddp.replica.reducer.picture.used[-1]

    grads, used = run_ranks(len(STEPS), one_rank)[1]  # the last one: branch 1 in its step 3
    assert grads["others.1.weight"] is not None
    assert grads["others.2.weight"] is None
    assert used == 0


def test_a_context_can_be_entered_again_and_training_goes_on_outside() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DDP(model_of("sync"), process_group=group)
        context = ddp.join()
        for _ in range(2):
            with context:
                train(ddp, group, (1, 2))
        train(ddp, group, (1, 1))
        return weights(ddp)

    def one_process() -> dict[str, Tensor]:
        model = model_of("sync")
        optimizer = sgd(model)
        for step, ranks in ((0, (0, 1)), (1, (1,)), (0, (0, 1)), (1, (1,)), (0, (0, 1))):
            optimizer.zero_grad()
            loss_of(model, torch.cat([batch(rank, step) for rank in ranks])).backward()
            for p in model.parameters():
                p.grad.mul_(len(ranks) / 2)
            optimizer.step()
        return weights(model)

    for found in run_ranks(2, one_rank):
        same(found, one_process())


def test_a_disabled_context_changes_nothing() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DDP(model_of("sync"), process_group=group)
        with ddp.join(enable=False):
            train(ddp, group, (2, 2))
        return weights(ddp)

    for found in run_ranks(2, one_rank):
        same(found, by_hand((2, 2), kind="sync"))


@pytest.mark.parametrize("kind", ["plain", "batch norm", "sync"])
def test_alone_it_is_plain_training(kind: str) -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DDP(model_of(kind), process_group=group)
        with ddp.join():
            train(ddp, group, (3,))
        return weights(ddp)

    same(run_ranks(1, one_rank)[0], by_hand((3,), kind=kind))


# -- passes that are not averaged ---------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", ["plain", "sync"])
def test_inside_no_sync_nobody_has_to_stand_in(kind: str, several: bool) -> None:
    """The last pass of each pair averages both; ranks run out after 1 and 3 pairs."""

    def one_rank(group: Group) -> tuple[dict[str, Tensor], int]:
        ddp, counter = DDP(model_of(kind), process_group=group), Counter(group)
        optimizer = sgd(ddp)
        before = ddp.replica.reducer.passes

        def tick() -> None:
            if several:  # a joinable is stood in for in every step that was announced
                counter.step()

        with Join([ddp, counter] if several else [ddp]):
            for pair in range(1 + 2 * group.rank()):
                optimizer.zero_grad()
                with ddp.no_sync():
                    loss_of(ddp, batch(group.rank(), 2 * pair)).backward()
                tick()
                loss_of(ddp, batch(group.rank(), 2 * pair + 1)).backward()
                tick()
                optimizer.step()
        return weights(ddp), ddp.replica.reducer.passes - before

    expected = model_of(kind)
    optimizer = sgd(expected)
    for pair in range(3):
        optimizer.zero_grad()
        ranks = [0, 1] if pair == 0 else [1]
        for step in (2 * pair, 2 * pair + 1):
            if kind == "sync":
                union = torch.cat([batch(rank, step) for rank in ranks])
                (loss_of(expected, union) * len(ranks)).backward()
            else:
                for rank in ranks:
                    loss_of(expected, batch(rank, step)).backward()
        for p in expected.parameters():
            p.grad.div_(2)
        optimizer.step()
    for found, passes in run_ranks(2, one_rank):
        same(found, weights(expected))
        assert passes == (3 if several else 4)  # the last one only says that all have run out


def test_weighed_passes_that_were_not_averaged_are_given_by_the_rank_that_stands_in() -> None:
    def one_rank(group: Group) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        ddp = DDP(model_of("batch norm"), process_group=group)
        optimizer = sgd(ddp)
        with ddp.join():
            for step in range(2 - group.rank()):  # rank 1 runs out in the middle
                with ddp.accumulate(2) as last, ddp.samples(3):
                    loss_of(ddp, batch(group.rank(), step)).backward()
                if last:
                    optimizer.step()
        return weights(ddp), dict(ddp.module.named_buffers())

    model = model_of("batch norm")
    loss_of(copy.deepcopy(model), batch(1, 0))
    total = sum(loss_of(model, batch(*which)) for which in ((0, 0), (0, 1)))
    buffers = {n: b.clone() for n, b in model.named_buffers()}  # rank 0 is ahead of rank 1
    ((total + loss_of(model, batch(1, 0))) / 3).backward()
    sgd(model).step()
    for found, kept in run_ranks(2, one_rank):
        same(found, weights(model))
        same(kept, buffers)


def test_what_all_ranks_still_owe_in_the_end_takes_no_step() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DDP(model_of(), process_group=group)
        with ddp.join():
            for step in range(3 - 2 * group.rank()):
                with ddp.accumulate(2), ddp.samples(3):
                    loss_of(ddp, batch(group.rank(), step)).backward()
        return weights(ddp)

    for found in run_ranks(2, one_rank):
        same(found, weights(model_of()))


# -- buffers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_buffers_follow_the_highest_rank_that_goes_on(several: bool) -> None:
    steps = (4, 2)

    def one_rank(group: Group) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        ddp, counter = DDP(model_of("batch norm"), process_group=group), Counter(group)
        seen: list[dict[str, Tensor]] = []

        def look(_: int) -> None:
            seen.append({n: b.clone() for n, b in ddp.module.named_buffers()})
            if several:
                counter.step()

        with Join([ddp, counter] if several else [ddp]):
            train(ddp, group, steps, each=look)
        return seen, dict(ddp.module.named_buffers())

    (first, end), (second, other_end) = run_ranks(2, one_rank)
    for mine, theirs in zip(first, second, strict=False):  # while both train
        same(mine, theirs, 0)
    same(end, other_end, 0)
    same(end, first[-1], 0)
    assert end["1.num_batches_tracked"] == 4


def test_running_statistics_of_sync_batch_norm_are_those_of_all_samples() -> None:
    def one_rank(group: Group) -> dict[str, Tensor]:
        ddp = DDP(model_of("sync"), process_group=group)
        with ddp.join(), torch.no_grad():
            for step in range(STEPS[group.rank()]):
                loss_of(ddp, batch(group.rank(), step))
        return dict(ddp.module.named_buffers())

    model = model_of("sync")
    for step in range(max(STEPS)):
        active = [rank for rank, n in enumerate(STEPS) if step < n]
        loss_of(model, torch.cat([batch(rank, step) for rank in active]))
    found = run_ranks(len(STEPS), one_rank)
    same(found[1], dict(model.named_buffers()))  # no pass: nothing has made the others' alike


# -- what is sent -------------------------------------------------------------------------------


def calls_of(group: Group) -> list[tuple[str, int]]:
    seen: list[tuple[str, int]] = []
    group.register_hooks(before=lambda call: seen.append((call.kind, call.nbytes)))
    return seen


@pytest.mark.parametrize("kind", ["plain", "batch norm"])
@pytest.mark.parametrize("weight", [None, 7.0])
@pytest.mark.parametrize("cap", [None, TINY])
@pytest.mark.parametrize("hook", [None, average])
def test_a_step_inside_join_sends_exactly_what_one_outside_sends(
    hook: Any, cap: float | None, weight: float | None, kind: str
) -> None:
    def one_rank(group: Group) -> list[list[tuple[str, int]]]:
        ddp = DDP(model_of(kind), process_group=group, bucket_cap_mb=cap)
        if hook is not None:
            ddp.register_comm_hook(group, hook)
        optimizer = sgd(ddp)
        calls = calls_of(group)
        taken: list[list[tuple[str, int]]] = []

        def step(weight: float | None = None) -> None:
            calls.clear()
            optimizer.zero_grad()
            with contextlib.nullcontext() if weight is None else ddp.samples(weight):
                loss_of(ddp, batch(group.rank(), 0)).backward()
            optimizer.step()
            taken.append(sorted(calls))

        step()
        step()  # by now the buckets are as they will be
        step()
        with ddp.join():
            for _ in range(3 - group.rank()):
                step(weight)
        step()
        return taken[2:]

    for taken in run_ranks(2, one_rank):
        assert len(taken) > 3
        assert all(step == taken[0] for step in taken)


def test_a_weight_sends_nothing_more() -> None:
    def one_rank(group: Group) -> list[list[tuple[str, int]]]:
        ddp = DDP(model_of("sync"), process_group=group)
        calls, taken = calls_of(group), []
        layers = calls_of(ddp.module[1]._paceline_group.group)
        for weight in (1.0, 1.0, 1.0, 3.0, 0.0, 5.0 + group.rank()):
            ddp.zero_grad()
            calls.clear()
            layers.clear()
            ddp.samples(weight)
            loss_of(ddp, batch(group.rank(), 0)).backward()
            taken.append(calls + layers)
        return taken[2:]

    for taken in run_ranks(2, one_rank):
        assert all(step == taken[0] for step in taken)


def test_layers_send_one_row_each_way_inside_join() -> None:
    def one_rank(group: Group) -> list[tuple[str, int]]:
        ddp = DDP(model_of("sync"), process_group=group)
        calls = calls_of(ddp.module[1]._paceline_group.group)
        with ddp.join():
            train(ddp, group, (2, 1))
        return calls

    row = ("all_gather_single", 8 * (2 + 2 * 5))
    assert run_ranks(2, one_rank) == [[row] * 5] * 2  # two each way, and one that all are empty


# -- early termination --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "sync"])
def test_with_throw_on_early_termination_all_ranks_raise_when_one_has_run_out(kind: str) -> None:
    def one_rank(group: Group) -> tuple[type, int]:
        ddp = DDP(model_of(kind), process_group=group)
        done: list[int] = []
        kinds = (InputsExhaustedError, PeerExhaustedError)
        with pytest.raises(kinds) as caught, ddp.join(throw_on_early_termination=True):
            train(ddp, group, (3, 1), each=done.append)
        assert still_works(group)
        train(ddp, group, (1, 1))  # the layers' group lives on, too
        return caught.type, len(done)

    assert run_ranks(2, one_rank) == [(PeerExhaustedError, 1), (InputsExhaustedError, 1)]


# -- failures -----------------------------------------------------------------------------------


class Boom(Exception):
    pass


WHERE = ["body", "forward", "between", "backward", "after"]


class Fragile(nn.Module):
    """Fails on command, in forward or backward, between its two normalizing layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        norm = SyncBatchNorm if kind == "sync" else nn.Identity
        self.first = nn.Sequential(nn.Linear(WIDE, 5), norm(5))
        self.second = nn.Sequential(nn.Linear(5, 3), norm(3), nn.Linear(3, 1))
        self.double()
        fill(self)
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.where == "forward":
            raise Boom("in forward")
        if self.where == "backward":
            x.register_hook(self.fail)
        return self.second(x)

    def fail(self, _grad: Tensor) -> Tensor:
        raise Boom("in backward")


def fail_on_rank_one(group: Group, kind: str, where: str, steps: int, several: bool) -> str:
    """Rank 1 fails in its second step; what this rank raised."""
    model = Fragile(kind)
    ddp, counter = DDP(model, process_group=group), Counter(group)
    try:
        with Join([ddp, counter] if several else [ddp]):
            for step in range(3 if group.rank() == 1 else steps):
                fails = group.rank() == 1 and step == 1
                if fails and where == "body":
                    raise Boom("in body")
                model.where = where if fails else ""
                loss = loss_of(ddp, batch(group.rank(), step))
                if fails and where == "between":
                    raise Boom("in between")
                loss.backward()
                if fails and where == "after":
                    raise Boom("in after")
                if several:
                    counter.step()
    except (Boom, PeerFailedError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def check_failures(found: list[str], where: str) -> None:
    assert found[1] == f"Boom: in {where}"
    for other in found[:1] + found[2:]:
        assert other.startswith("PeerFailedError")
        assert f"in {where}" in other


@pytest.mark.parametrize("kind", ["plain", "sync"])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("where", WHERE)
def test_when_a_rank_fails_all_raise_its_message(
    where: str, steps: int, several: bool, kind: str
) -> None:
    def one_rank(group: Group) -> tuple[str, bool]:
        said = fail_on_rank_one(group, kind, where, steps, several)
        return said, still_works(group)

    found = run_ranks(3, one_rank)
    assert all(works for _, works in found)
    check_failures([said for said, _ in found], where)


def fail_between_processes(
    meeting: Meeting, backend: str, kind: str, where: str, steps: int, several: bool
) -> str:
    with meeting.new_group(backend, timeout=timedelta(minutes=1)) as group:
        said = fail_on_rank_one(group, kind, where, steps, several)
        still_works(group)
    return said


@pytest.mark.parametrize("kind", ["plain", "sync"])
@pytest.mark.parametrize(("backend", "several"), [("shm", False), ("shm", True), ("gloo", False)])
@pytest.mark.parametrize(("where", "steps"), [("body", 3), ("forward", 3), ("backward", 0)])
def test_between_processes_too(
    where: str, steps: int, backend: str, several: bool, kind: str
) -> None:
    arguments = (backend, kind, where, steps, several)
    check_failures(spawn_ranks(2, fail_between_processes, *arguments), where)


def fail_and_end(meeting: Meeting, kind: str) -> str:
    """Over gloo with others in the context, the ranks are freed when the failed one ends."""
    group = meeting.new_group("gloo", timeout=timedelta(minutes=1))
    said = fail_on_rank_one_or_lose(group, kind)
    if meeting.rank == 1:
        os._exit(0)
    return said


def fail_on_rank_one_or_lose(group: Group, kind: str) -> str:
    try:
        return fail_on_rank_one(group, kind, "between", 3, several=True)
    except RuntimeError as error:
        return type(error).__name__


@pytest.mark.parametrize("kind", ["plain", "sync"])
def test_over_gloo_with_other_joinables_the_end_of_the_process_frees_the_rest(kind: str) -> None:
    found = spawn_ranks(2, fail_and_end, kind, may_die={1})
    assert found[0] is not None
    assert found[0] != "nothing"


def die_in_step_two(meeting: Meeting, backend: str, kind: str, where: str) -> tuple[str, int]:
    group = meeting.new_group(backend, timeout=timedelta(minutes=1))
    ddp = DDP(model_of(kind), process_group=group)

    def die(step: int) -> None:
        if meeting.rank == 1 and step == 0:
            if where == "forward":  # with the others in the layers' collective
                ddp.module[2].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        with ddp.join():
            train(ddp, group, (4, 4, 0), each=die)
    except RuntimeError as error:
        found = type(error).__name__, getattr(error, "step", -1)
    else:
        found = "nothing", 0
    return found


@pytest.mark.parametrize("kind", ["plain", "sync"])
@pytest.mark.parametrize("where", ["forward", "after"])
def test_a_rank_that_dies_is_named_with_the_step(kind: str, where: str) -> None:
    first, _, joined = spawn_ranks(3, die_in_step_two, "shm", kind, where, may_die={1})
    assert first[0] in (PeerDiedUnjoinedError.__name__, "PeerDiedError")
    assert joined[0] in (PeerDiedUnjoinedError.__name__, "PeerDiedError", "PeerLeftUnjoinedError")
    if kind == "plain":
        assert first == (PeerDiedUnjoinedError.__name__, 2)
        assert joined == (PeerDiedUnjoinedError.__name__, 1)


@pytest.mark.parametrize("kind", ["plain", "sync"])
def test_over_gloo_a_rank_that_dies_ends_the_context_of_its_peer(kind: str) -> None:
    found = spawn_ranks(2, die_in_step_two_of_two, kind, may_die={1})
    assert found[0] is not None
    assert found[0][0] != "nothing"


def die_in_step_two_of_two(meeting: Meeting, kind: str) -> tuple[str, int]:
    return die_in_step_two(meeting, "gloo", kind, "after")


def test_layers_called_in_different_orders_are_an_error_on_every_rank() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(SyncBatchNorm(WIDE) for _ in range(2)).double()

        def forward(self, x: Tensor, first: int) -> Tensor:
            return self.layers[1 - first](self.layers[first](x))

    def one_rank(group: Group) -> str:
        ddp = DDP(Crossed(), process_group=group)
        with pytest.raises((ModuleStateError, PeerFailedError)) as caught, ddp.join():
            ddp(batch(group.rank(), 0), group.rank()).sum().backward()
        return str(caught.value)

    for said in run_ranks(2, one_rank):
        assert "different SyncBatchNorm calls" in said


def test_a_layer_that_is_called_after_a_failure_says_so() -> None:
    def one_rank(group: Group) -> str:
        model = Fragile("sync")
        ddp = DDP(model, process_group=group)
        with pytest.raises((ModuleStateError, PeerFailedError)) as caught, ddp.join():
            model.where = "forward" if group.rank() == 1 else ""
            with contextlib.suppress(Boom):  # not the way to go on
                loss_of(ddp, batch(group.rank(), 0)).backward()
            ddp(batch(group.rank(), 1))
        return str(caught.value)

    found = run_ranks(2, one_rank)
    assert "after this rank had run out or failed" in found[1]


# -- layers that cannot take part ---------------------------------------------------------------


def refuse_stock_group(meeting: Meeting) -> str:
    dist.init_process_group("gloo")
    ddp = DDP(model_of("sync"))
    with pytest.raises(ModuleStateError, match="SyncBatchNorm") as caught, ddp.join():
        raise AssertionError("it was entered")
    train(ddp, dist.group.WORLD, (1, 1))  # as before
    dist.destroy_process_group()
    return str(caught.value)


def test_over_a_group_that_cannot_be_split_layers_are_refused_at_the_door() -> None:
    for said in spawn_ranks(2, refuse_stock_group):
        assert "new_group" in said


def test_layers_with_a_group_of_their_own_are_refused_at_the_door() -> None:
    def one_rank(group: Group) -> None:
        model = SyncBatchNorm.convert_sync_batchnorm(model_of("batch norm"), group)
        ddp = DDP(model, process_group=group)
        with pytest.raises(ModuleStateError, match="of their own"), ddp.join():
            raise AssertionError("it was entered")

    run_ranks(2, one_rank)


def refuse_torchs_join(meeting: Meeting) -> str:
    group = meeting.new_group("gloo", timeout=timedelta(minutes=1)).register(default=True)
    ddp = DDP(model_of("sync"), process_group=group)
    with pytest.raises(ModuleStateError) as caught, TorchJoin([ddp]):
        train(ddp, group, (2, 0))
    group.shutdown()
    return str(caught.value)


def test_torchs_join_is_refused_for_models_with_layers_on_every_rank() -> None:
    for said in spawn_ranks(2, refuse_torchs_join):
        assert "paceline.Join" in said


# -- torch's own, with ours ---------------------------------------------------------------------


def train_in(
    meeting: Meeting, ours: bool, by_active: bool, zero: bool, backend: str
) -> dict[str, Tensor]:
    """Our wrapper in our Join or in torch's, perhaps with torch's sharded optimizer."""
    with default_group(meeting, backend) as group:
        ddp = DDP(model_of())
        optimizer = (
            ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.05)
            if zero
            else sgd(ddp)
        )
        joinables = [ddp, optimizer] if zero else [ddp]
        context = Join if ours else TorchJoin
        with context(joinables, divide_by_initial_world_size=not by_active):
            for step in range((4, 2)[group.rank()]):
                optimizer.zero_grad()
                loss_of(ddp, batch(group.rank(), step)).backward()
                optimizer.step()
    return weights(ddp)


@contextlib.contextmanager
def default_group(meeting: Meeting, backend: str) -> Iterator[Any]:
    if backend == "stock":
        dist.init_process_group("gloo")
        yield dist.group.WORLD
        dist.destroy_process_group()
        return
    with meeting.new_group(backend).register(default=True) as group:
        yield group


@pytest.mark.parametrize("backend", ["stock", "shm"])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("by_active", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_our_wrapper_goes_into_either_join_with_torchs_zero_beside_it(
    ours: bool, by_active: bool, zero: bool, backend: str
) -> None:
    expected = by_hand((4, 2), by_active=by_active)
    for found in spawn_ranks(2, train_in, ours, by_active, zero, backend):
        same(found, expected)


def test_errors_of_the_engine_are_no_surprise_to_the_layers() -> None:
    """A rank that leaves the group for good, without joining."""

    def one_rank(group: Group) -> str:
        ddp = DDP(model_of("sync"), process_group=group)
        try:
            with ddp.join():
                train(ddp, group, (2, 1))
                if group.rank() == 1:
                    group.abort()
                    raise Boom
        except (Boom, GroupError) as error:
            return type(error).__name__
        return "nothing"

    with contextlib.suppress(RanksFailedError):  # what the abort does to the group's end
        found = run_ranks(2, one_rank)
        assert "nothing" not in found
