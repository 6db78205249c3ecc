"""Buffers are kept alike: when, whose values count, and what a hook may do instead."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation as TorchLocation

from paceline import DistributedDataParallel, new_group
from paceline.ddp import _BufferCommHookLocation
from paceline.errors import MismatchError, ModuleTypeError
from paceline.groups import Group
from paceline.recorder.watch import watch as recorder
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.ddp.ranks import batch, seeded, watch
from tests.marks import needs_shm
from tests.recorder.patience import be_patient
from tests.waiting import PATIENCE

BUFFERS = "the wrapper's broadcast of buffers before a forward"

BEFORE, AFTER = _BufferCommHookLocation.PRE_FORWARD, _BufferCommHookLocation.POST_FORWARD


class Counted(nn.Module):
    """A parameter, and two buffers that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.shift.item())
        return (x * self.weight + self.shift).sum()


def wrapped(group: Group, model: nn.Module | None = None, **options: Any) -> Any:
    return DistributedDataParallel(model or Counted(), process_group=group, **options)


def norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


# The broadcast.


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_before_a_forward_every_rank_gets_the_buffers_of_rank_0(mode: str) -> None:
    def one_rank(group: Group) -> tuple[list[float], float, int]:
        ddp = wrapped(group)
        ddp.train(mode != "eval")
        model = ddp.module
        model.shift.fill_(10.0 + group.rank())
        model.calls.fill_(20 + group.rank())
        with torch.set_grad_enabled(mode != "no_grad"):
            ddp(torch.ones(1))
        return model.seen, model.shift.item(), model.calls.item()

    assert run_ranks(3, one_rank) == [([10.0], 10.0, 20)] * 3


def test_batch_norm_statistics_are_those_of_rank_0_in_every_step() -> None:
    def one_rank(group: Group) -> list[Tensor]:
        ddp = wrapped(group, norm())
        for step in range(3):
            ddp(batch(group.rank(), step)).sum().backward()
        ddp.eval()(batch(0))  # makes them alike
        return [b.clone() for b in ddp.module.buffers()]

    first, second = run_ranks(2, one_rank)
    assert all(map(torch.equal, first, second))
    assert first[-1].item() == 3


@pytest.mark.parametrize("size", [1, 2])
def test_a_buffer_that_is_replaced_by_another_tensor_is_followed(size: int) -> None:
    def one_rank(group: Group) -> list[float]:
        ddp = wrapped(group)
        ddp(torch.ones(1))
        for step in range(2):
            ddp.module.shift = torch.full((size,), 5.0 * step + group.rank())[:1]
            ddp(torch.ones(1))
        return ddp.module.seen

    assert run_ranks(2, one_rank) == [[0.0, 0.0, 5.0]] * 2


def test_a_buffer_that_was_none_at_first_is_followed_when_it_is_set() -> None:
    def one_rank(group: Group) -> list[float]:
        model = Counted()
        model.register_buffer("extra", None)
        ddp = wrapped(group, model)
        ddp(torch.ones(1))
        model.extra = torch.full((1,), float(group.rank()))
        model.register_buffer("later", torch.full((1,), float(group.rank())))
        ddp(torch.ones(1))
        return [model.extra.item(), model.later.item()]  # torch's follows both

    assert run_ranks(2, one_rank) == [[0.0, 0.0]] * 2


def test_a_buffer_set_to_none_is_left_out() -> None:
    def one_rank(group: Group) -> int:
        ddp = wrapped(group)
        ddp.module.calls = None
        ddp(torch.ones(1))
        return len(ddp.modules_buffers)

    assert run_ranks(2, one_rank) == [1, 1]


def test_forward_twice_before_backward_is_no_reason_to_complain() -> None:
    def one_rank(group: Group) -> None:
        ddp = wrapped(group, norm())
        for step in range(3):  # as a discriminator sees a real and a fake batch
            ddp.zero_grad()
            real, fake = ddp(batch(group.rank(), step)), ddp(batch(group.rank(), step + 10))
            (real.square().sum() - fake.square().sum()).backward()

    run_ranks(2, one_rank)


def test_in_eval_mode_too_forward_may_run_twice_before_backward() -> None:
    def one_rank(group: Group) -> None:
        ddp = wrapped(group, norm()).eval()  # here backward needs the running statistics
        (ddp(batch(0)).sum() + ddp(batch(1)).sum()).backward()

    run_ranks(2, one_rank)


def test_inside_no_sync_buffers_come_apart_until_the_first_averaged_step() -> None:
    def one_rank(group: Group) -> list[int]:
        ddp = wrapped(group)
        seen = watch(group)
        counts = []
        for syncs in (True, False, False, True, True):
            seen.clear()
            ddp.zero_grad()
            ddp.require_backward_grad_sync = syncs
            loss = ddp(torch.ones(1))
            counts.append(sum(kind == "broadcast" for kind, _ in seen))
            loss.backward()
        return counts

    # As in torch: the forward after an averaged step still makes them alike, and so does not the
    # one after a step inside no_sync.
    assert run_ranks(2, one_rank) == [[1, 1, 0, 0, 1]] * 2


# What rules it.


def test_without_forward_sync_buffers_they_are_alike_at_the_start_and_then_go_their_own_way() -> (
    None
):
    def one_rank(group: Group) -> list[float]:
        model = Counted()
        model.shift.fill_(7.0 + group.rank())
        ddp = wrapped(group, model, forward_sync_buffers=False)
        ddp(torch.ones(1))
        model.shift.fill_(group.rank())
        seen = watch(group)
        ddp(torch.ones(1))
        assert seen == []
        assert not ddp.will_sync_module_buffers()
        return model.seen

    assert run_ranks(2, one_rank) == [[7.0, 0.0], [7.0, 1.0]]


def test_the_old_keyword_is_deprecated_and_rules_the_construction_as_well() -> None:
    def one_rank(group: Group) -> list[float]:
        model = Counted()
        model.shift.fill_(7.0 + group.rank())
        ddp = wrapped(group, model, broadcast_buffers=False)
        ddp(torch.ones(1))
        return model.seen

    with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated"):
        assert run_ranks(2, one_rank) == [[7.0], [8.0]]


@pytest.mark.parametrize("value", [True, False])
def test_the_old_keyword_gives_way_to_the_new_one_with_a_warning(value: bool) -> None:
    def one_rank(group: Group) -> bool:
        ddp = wrapped(group, broadcast_buffers=not value, forward_sync_buffers=value)
        return ddp.forward_sync_buffers

    with pytest.warns(FutureWarning, match="Both `broadcast_buffers`"):
        assert run_ranks(1, one_rank) == [value]


def test_the_warning_points_at_the_line_that_gave_the_keyword() -> None:
    def one_rank(group: Group) -> None:
        DistributedDataParallel(Counted(), process_group=group, broadcast_buffers=True)

    with pytest.warns(FutureWarning) as caught:
        run_ranks(1, one_rank)
    assert caught[0].filename == __file__


def test_without_either_keyword_nothing_is_warned_of() -> None:
    assert run_ranks(1, lambda group: wrapped(group).broadcast_buffers) == [True]


def test_the_attribute_may_be_changed_later() -> None:
    def one_rank(group: Group) -> list[float]:
        ddp = wrapped(group)
        ddp.broadcast_buffers = False
        ddp.module.shift.fill_(group.rank())
        ddp(torch.ones(1))
        ddp.forward_sync_buffers = True
        ddp(torch.ones(1))
        return ddp.module.seen

    assert run_ranks(2, one_rank) == [[0.0, 0.0], [1.0, 0.0]]


def test_ignored_buffers_and_parameters_are_left_to_the_model() -> None:
    def one_rank(group: Group) -> tuple[float, int, list[str], Any]:
        model = Counted()
        model.alone = nn.Parameter(torch.full((1,), float(group.rank())))
        model.shift.fill_(group.rank())
        model.calls.fill_(group.rank())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, ["shift", "alone"]
        )
        ddp = wrapped(group, model)
        (ddp(torch.ones(1)) + model.alone * group.rank()).backward()
        names = list(ddp.named_module_buffers)
        return model.shift.item(), model.calls.item(), names, model.alone.grad.item()

    assert run_ranks(2, one_rank) == [(0.0, 0, ["calls"], 0.0), (1.0, 0, ["calls"], 1.0)]


def test_a_buffer_that_stands_in_two_places_is_sent_once() -> None:
    def one_rank(group: Group) -> int:
        model = Counted()
        model.inner = nn.Module()
        model.inner.register_buffer("same", model.shift)
        return len(wrapped(group, model).named_module_buffers)

    assert run_ranks(1, one_rank) == [2]


# Hooks.


@pytest.mark.parametrize("location", [BEFORE, AFTER, TorchLocation.PRE_FORWARD])
def test_a_hook_stands_in_for_the_broadcast_before_or_after_the_forward(location: Any) -> None:
    def one_rank(group: Group) -> tuple[list[float], float]:
        ddp = wrapped(group)
        model = ddp.module

        def highest(state: list[str], buffers: dict[str, Tensor]) -> None:
            state.extend(buffers)
            group.all_reduce(buffers["shift"], torch.distributed.ReduceOp.MAX)

        state: list[str] = []
        ddp._register_buffer_comm_hook(state, highest, location)
        model.shift.fill_(group.rank())
        seen = watch(group)
        ddp(torch.ones(1))
        assert seen == [("all_reduce", 1)]
        assert state == ["shift", "calls"]
        assert ddp.buffer_hook.buffer_comm_hook is highest
        return model.seen, model.shift.item()

    found = run_ranks(2, one_rank)
    seen = [[0.0], [1.0]] if location is AFTER else [[1.0], [1.0]]
    assert found == [(own, 1.0) for own in seen]


def test_by_default_a_hook_runs_after_the_forward() -> None:
    def one_rank(group: Group) -> list[int]:
        ddp = wrapped(group)
        ran: list[int] = []
        ddp._register_buffer_comm_hook(None, lambda _, __: ran.append(len(ddp.module.seen)))
        ddp(torch.ones(1))
        return ran

    assert run_ranks(1, one_rank) == [[1]]


@pytest.mark.parametrize("as_list", [True, False])
def test_the_futures_of_a_hook_are_awaited_at_the_end_of_backward(as_list: bool) -> None:
    def one_rank(group: Group) -> float:
        ddp = wrapped(group)
        ended = []

        def later(_state: None, buffers: dict[str, Tensor]) -> Any:
            work = group.all_reduce(buffers["shift"], async_op=True)
            future = work.get_future().then(lambda f: ended.append(1))
            return [future] if as_list else future

        ddp._register_buffer_comm_hook(None, later)
        for step in range(1, 4):
            ddp.module.shift.fill_(1.0 + group.rank())
            ddp(torch.ones(1)).backward()
            assert len(ended) == step
        return ddp.module.shift.item()

    assert run_ranks(2, one_rank) == [3.0, 3.0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_future_of_a_hook_outlives_the_backward_pass(ranks: int) -> None:
    def one_rank(group: Group) -> int:
        ddp = wrapped(group)

        def done(_state: None, _buffers: dict[str, Tensor]) -> Future[None]:
            future: Future[None] = Future()
            future.set_result(None)
            return future

        ddp._register_buffer_comm_hook(None, done)
        for _ in range(3):
            ddp(torch.ones(1)).backward()
        return len(ddp.replica.buffers.futures)

    assert run_ranks(ranks, one_rank) == [0] * ranks


def test_a_hook_that_cannot_be_called_is_refused() -> None:
    def one_rank(group: Group) -> None:
        ddp = wrapped(group)
        with pytest.raises(ModuleTypeError):
            ddp._register_buffer_comm_hook(None, 1)
        assert not hasattr(ddp, "buffer_hook")

    run_ranks(1, one_rank)


def test_all_buffers_may_be_ignored() -> None:
    def one_rank(group: Group) -> float:
        model = norm()
        names = [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        ddp = wrapped(group, model)
        for step in range(2):
            ddp(batch(group.rank(), step)).sum().backward()
        return float(next(model.buffers()).sum())

    means = run_ranks(2, one_rank)
    assert means[0] != means[1]


# Forwards without gradients, of which ranks may have unequal numbers.


def _validate(ddp: Any, rank: int, batches: int, train: bool) -> None:
    ddp.train(train)
    with torch.no_grad():
        for step in range(batches):
            ddp(batch(rank, 50 + step))
    ddp.train()


def _train_and_validate(meeting: Meeting, backend: str, train: bool) -> list[list[float]]:
    """Steps with a validation between them of 0 to 3 batches, and what rank 0's norm saw last."""
    rank = meeting.rank
    with new_group(backend) as group:
        ddp = wrapped(group, seeded(norm))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().sum().backward()
            optimizer.step()
            if step in (1, 3):
                _validate(ddp, rank, (3, 1, 0)[rank] if step == 1 else (0, 2, 1)[rank], train)
        ddp._sync_buffers()
        return [value.flatten().tolist() for value in ddp.module.state_dict().values()]


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("backend", [pytest.param("shm", marks=needs_shm), "gloo"])
def test_ranks_may_validate_on_unequal_numbers_of_batches(backend: str, train: bool) -> None:
    first, *others = spawn_ranks(3, _train_and_validate, backend, train)
    assert others == [first, first]
    # Of rank 0: 6 steps, and in train mode the 3 batches of its validation.
    assert first[-1] == [9 if train else 6]


FORWARDS = ("train", "no_grad", "no_sync", "no_grad in no_sync", "eval", "no backward")


def _will_sync(make: Any, group: Group, forwards: list[str]) -> list[bool]:
    ddp = make(Counted(), process_group=group)
    found = []
    for kind in forwards:
        ddp.train(kind != "eval")
        inside = ddp.no_sync() if "no_sync" in kind else contextlib.nullcontext()
        with inside, torch.set_grad_enabled("no_grad" not in kind):
            found.append(ddp.will_sync_module_buffers())
            loss = ddp(torch.ones(1))
            if loss.requires_grad and kind != "no backward":
                loss.backward()
    return found


@given(forwards=st.lists(st.sampled_from(FORWARDS), max_size=12))
@settings(deadline=None, max_examples=40)
def test_buffers_are_sent_before_the_forwards_before_which_torch_sends_them(
    forwards: list[str],
) -> None:
    def one_rank(group: Group) -> tuple[list[bool], list[bool]]:
        ours = _will_sync(DistributedDataParallel, group, forwards)
        return ours, _will_sync(TorchDDP, group, forwards)

    ((ours, theirs),) = run_ranks(1, one_rank)
    assert ours == theirs


@pytest.mark.parametrize("backend", [pytest.param("shm", marks=needs_shm), "threads"])
def test_a_mismatch_names_the_broadcast_of_buffers_as_the_wrappers_own(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder.peers, "patience", PATIENCE)
    ranks = run_ranks(2, _forward_on_one_rank) if backend == "threads" else None
    for text in ranks or spawn_ranks(2, _forward_in_process, backend):
        assert "rank 0 called broadcast(" in text
        assert "(the wrapper's broadcast of buffers before a forward) at " in text
        assert "use the inner module (ddp.module)" in text


def _forward_on_one_rank(group: Group) -> str:
    ddp = wrapped(group)
    with pytest.raises(MismatchError) as caught:
        if group.rank() == 0:
            ddp(torch.ones(1))
        else:
            group.all_reduce(torch.ones(3))
    caught.value.wait_for_verdict(PATIENCE)
    assert (caught.value.purpose_a, caught.value.purpose_b) == (BUFFERS, "")
    return str(caught.value)


def _forward_in_process(meeting: Meeting, backend: str) -> str:
    be_patient(PATIENCE)
    with new_group(backend) as group:
        text = _forward_on_one_rank(group)
        meeting.store().set(f"told {meeting.rank}", "")
        meeting.store().wait(["told 0", "told 1"])  # a rank that has left cannot be asked
    return text
