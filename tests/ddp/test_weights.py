"""Weights: what they count for when gradients are cleared, kept, and when members change."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from paceline import DistributedDataParallel as DDP
from paceline._reducer import runner
from paceline._reducer.runner import Runner
from paceline._torch import autograd, patches
from paceline.ddp import set_strict
from paceline.errors import MixedPassesError, ModuleStateError, PeerError
from paceline.groups import Group
from paceline.testing import run_ranks


def line() -> nn.Linear:
    """One weight; its gradient is the input."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def backward(ddp: DDP, value: float, weight: float | None = None) -> None:
    if weight is not None:
        ddp.samples(weight)
    ddp(torch.full((1, 1), value, dtype=next(ddp.parameters()).dtype)).sum().backward()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("then", [None, 4.0])
def test_the_weight_of_gradients_that_were_cleared_does_not_count(
    set_to_none: bool, then: float | None
) -> None:
    def one_rank(group: Group) -> float:
        ddp = DDP(line(), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        with ddp.no_sync():
            backward(ddp, 9.0, weight=4.0)
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(ddp, 1.0, weight=then)
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [1.0, 1.0]


def test_a_gradient_that_is_zero_by_itself_keeps_its_weight() -> None:
    def one_rank(group: Group) -> float:
        ddp = DDP(line(), process_group=group)
        with ddp.no_sync():
            backward(ddp, 0.0, weight=3.0)
        backward(ddp, 4.0, weight=1.0)
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [1.0, 1.0]


@pytest.mark.parametrize("cleared", [None, True, False])
def test_plain_passes_that_were_kept_count_as_one_each_in_a_weighted_one(
    cleared: bool | None,
) -> None:
    def one_rank(group: Group) -> float:
        ddp = DDP(line(), process_group=group)
        with ddp.no_sync():
            backward(ddp, 8.0 * group.rank())
            backward(ddp, 8.0)
        if cleared is not None:
            ddp.zero_grad(set_to_none=cleared)
        backward(ddp, 3.0, weight=2.0)
        return ddp.module.weight.grad.item()

    # two ranks: 8 r + 8 + 2 x 3 over two passes that count as one and one that counts as two
    expected = (14 + 22) / 8 if cleared is None else 3.0
    assert run_ranks(2, one_rank) == [expected, expected]


def test_plain_passes_before_an_average_leave_nothing_to_a_weighted_one() -> None:
    def one_rank(group: Group) -> float:
        ddp = DDP(line(), process_group=group)
        with ddp.no_sync():
            backward(ddp, 8.0)
        backward(ddp, 2.0)  # averages both
        backward(ddp, 3.0, weight=2.0)
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [13.0, 13.0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_plain_passes_that_were_cleared_before_other_plain_ones_do_not_count(
    set_to_none: bool,
) -> None:
    def one_rank(group: Group) -> float:
        ddp = DDP(line(), process_group=group)
        backward(ddp, 1.0, weight=1.0)
        ddp.zero_grad(set_to_none=set_to_none)
        with ddp.no_sync():
            backward(ddp, 50.0)
            ddp.zero_grad(set_to_none=set_to_none)
            backward(ddp, 8.0)
        backward(ddp, 2.0, weight=1.0)
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [5.0, 5.0]


def test_an_average_under_plain_passes_stays_what_it_is() -> None:
    def one_rank(group: Group) -> list[float]:
        ddp = DDP(line(), process_group=group)
        found = []
        backward(ddp, 4.0, weight=2.0)  # an average, which is kept
        with ddp.no_sync():
            backward(ddp, 8.0)
            found.append(ddp.module.weight.grad.item())
        backward(ddp, 2.0, weight=3.0)
        return [*found, ddp.module.weight.grad.item()]

    # 4 + (1 x 8 + 3 x 2) / 4
    assert run_ranks(2, one_rank) == [[12.0, 7.5], [12.0, 7.5]]


def test_a_parameter_that_plain_passes_left_alone_keeps_its_average() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = line(), line()

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.one(x) + self.two(x) if both else self.one(x)

    def one_rank(group: Group) -> list[float]:
        ddp = DDP(Two(), process_group=group)
        for value, both, weight in [(4.0, True, 2.0), (8.0, False, None), (2.0, False, 3.0)]:
            if weight is not None:
                ddp.samples(weight)
            with ddp.no_sync() if weight is None else nullcontext():
                ddp(torch.full((1, 1), value), both).sum().backward()
        return [p.grad.item() for p in ddp.parameters()]

    assert run_ranks(2, one_rank) == [[7.5, 4.0], [7.5, 4.0]]


@pytest.mark.parametrize("cleared", [True, False, None])
def test_the_first_weight_after_plain_passes_on_something_older_is_refused(
    cleared: bool | None,
) -> None:
    def one_rank(group: Group) -> float | str:
        ddp = DDP(line(), process_group=group)
        backward(ddp, 4.0)  # an average, which is kept
        with ddp.no_sync():
            backward(ddp, 8.0)
        if cleared is not None:
            ddp.zero_grad(set_to_none=cleared)
            backward(ddp, 2.0, weight=3.0)
            return ddp.module.weight.grad.item()
        with pytest.raises(MixedPassesError) as caught:
            ddp.samples(3.0)
        backward(ddp, 2.0)  # nothing is lost
        assert ddp.module.weight.grad.item() == 14.0
        return str(caught.value)

    for rank, found in enumerate(run_ranks(2, one_rank)):
        if cleared is None:
            assert f"rank {rank}: ddp.samples() was called for the first time" in str(found)
        else:
            assert found == 2.0


def test_averages_that_are_kept_are_added_to_those_of_a_weighted_pass() -> None:
    def one_rank(group: Group) -> list[float]:
        ddp = DDP(line(), process_group=group)
        found = []
        for _ in range(3):
            backward(ddp, 1.0 + group.rank(), weight=1.0 + 2 * group.rank())
            found.append(ddp.module.weight.grad.item())
        return found

    for found in run_ranks(2, one_rank):
        assert found == pytest.approx([1.75, 3.5, 5.25])


def test_gradients_cleared_in_place_leave_nothing_to_the_next_weighted_pass() -> None:
    def one_rank(group: Group) -> list[float]:
        ddp = DDP(line(), process_group=group)
        found = []
        for _ in range(4):
            ddp.zero_grad(set_to_none=False)
            backward(ddp, 1.0 + group.rank(), weight=1.0 + 2 * group.rank())
            found.append(ddp.module.weight.grad.item())
        return found

    for found in run_ranks(2, one_rank):
        assert found == pytest.approx([1.75] * 4)


def test_a_rank_that_joins_counts_as_the_others_do() -> None:
    def one_rank(group: Group) -> float:
        rank = group.rank()
        pair = group.split([[0, 1], [2]])
        ddp = DDP(line(), process_group=pair)
        for _ in range(2 if rank < 2 else 0):
            backward(ddp, 1.0, weight=1024.0)
        ddp.zero_grad()
        ddp._update_process_group(group)
        backward(ddp, float(rank), weight=1024.0)
        return ddp.module.weight.grad.item()

    assert run_ranks(3, one_rank) == [1.0] * 3


def test_a_rank_that_is_left_alone_has_weighted_passes_of_its_own() -> None:
    def one_rank(group: Group) -> list[float]:
        ddp = DDP(nn.Sequential(line(), line(), line()), process_group=group, bucket_cap_mb=1e-6)
        found = []
        for step in range(4):
            if step == 2:
                ddp._update_process_group(group.split([[0], [1]]))
            ddp.zero_grad()
            backward(ddp, 1.0 + group.rank(), weight=8.0)
            found.append(ddp.module[0].weight.grad.item())
        return found

    first, second = run_ranks(2, one_rank)
    assert first == [1.5, 1.5, 1.0, 1.0]
    assert second == [1.5, 1.5, 2.0, 2.0]


def test_plain_micro_steps_whose_gradients_are_zero_count_in_a_weighted_mean() -> None:
    def one_rank(group: Group) -> float:
        ddp = DDP(line(), process_group=group)
        ddp(torch.ones(1, 1)).sum().backward()
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(torch.zeros(1, 1)).sum().backward()
        ddp.samples(3.0)
        ddp(torch.full((1, 1), 4.0)).sum().backward()
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [3.0] * 2  # (1 * 0 + 3 * 4) / 4


@pytest.mark.parametrize("accumulated", [False, True])
def test_float16_gradients_times_their_weights_need_not_fit_into_16_bits(accumulated: bool) -> None:
    def one_rank(group: Group) -> list[float]:
        model = nn.Linear(2, 1, bias=False).half()
        ddp = DDP(model, process_group=group)
        value = 20.0 + 4 * group.rank()
        found = []
        for _ in range(2):
            with ddp.no_sync() if accumulated else nullcontext(), ddp.samples(4096):
                ddp(torch.full((1, 2), value).half()).sum().backward()  # 81920 times its weight
            if accumulated:
                with ddp.samples(4096 * 3):
                    ddp(torch.full((1, 2), value + 16).half()).sum().backward()
            found.append(model.weight.grad[0, 0].item())
            ddp.zero_grad()
        return found

    expected = 22.0 + 12.0 * accumulated
    for found in run_ranks(2, one_rank):
        assert found == [expected, expected]


@pytest.mark.parametrize("held", [0.0, 8.0])
def test_a_gradient_penalty_leaves_earlier_weighted_micro_steps_as_they_are(held: float) -> None:
    def one_rank(group: Group) -> float:
        ddp = DDP(line(), process_group=group)
        backward(ddp, held)
        x = torch.full((1, 1), 3.0, requires_grad=True)
        with ddp.no_sync(), ddp.samples(1):
            ddp(torch.ones(1, 1)).sum().backward()
        with ddp.samples(1):
            out = ddp(x)
            torch.autograd.grad(out.sum(), x, retain_graph=True)
            out.sum().backward()
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [held + 2.0] * 2


def fail_in_backward(ddp: nn.Module) -> None:
    """A backward pass that raises behind the model."""

    def fail(_grad: torch.Tensor) -> None:
        raise ArithmeticError

    x = torch.ones(1, 1, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        ddp(x).sum().backward()


def test_a_backward_that_fails_in_no_sync_leaves_earlier_weighted_micro_steps_as_they_are() -> None:
    def one_rank(group: Group) -> float:
        ddp = DDP(line(), process_group=group)
        backward(ddp, 8.0)
        with ddp.no_sync(), ddp.samples(1):
            ddp(torch.ones(1, 1)).sum().backward()
            fail_in_backward(ddp)
        backward(ddp, 3.0, weight=1.0)
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [10.0] * 2


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("held", [None, 8.0])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_steps_that_are_cleared_after_a_backward_that_failed_do_not_come_back(
    set_to_none: bool, held: float | None, before: int
) -> None:
    def one_rank(group: Group) -> float:
        ddp = DDP(line(), process_group=group)
        if held is not None:
            backward(ddp, held)
        with ddp.no_sync(), ddp.samples(1):
            for _ in range(before):
                ddp(torch.full((1, 1), 5.0)).sum().backward()
            fail_in_backward(ddp)
        ddp.zero_grad(set_to_none=set_to_none)
        backward(ddp, 3.0, weight=1.0)
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [3.0] * 2


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of autograd's may tell of failures."""
    monkeypatch.setattr(runner, "may_run_on_threads", lambda: True)
    monkeypatch.setattr(autograd, "PATIENCE", 100.0)  # what waits for nothing runs into a deadline
    monkeypatch.setattr(Variable, "_execution_engine", Variable._execution_engine)


@pytest.mark.parametrize("uninstalls", [False, True])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_was_put_aside_is_back_when_a_failure_is_raised_though_autograd_lets_go_late(
    uninstalls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = threading.local()  # a rank is a thread

    def hold(held: list[object], went_on: threading.Event) -> None:
        went_on.wait(0.5)  # it does not, when it waits for us
        held.clear()

    def hold_as_a_thread_of_autograd_does(ending: Callable[[], None]) -> None:
        autograd.call_after_backward(ending)
        if hasattr(own, "went_on"):
            own.holder = threading.Thread(target=hold, args=([ending], own.went_on))
            own.holder.start()

    monkeypatch.setattr(runner, "call_after_backward", hold_as_a_thread_of_autograd_does)

    def one_rank(group: Group) -> float:
        ddp = DDP(line(), process_group=group)
        if uninstalls:
            backward(ddp, 1.0)
            ddp.zero_grad()
            patches.take_back()
        with ddp.no_sync(), ddp.samples(1):
            ddp(torch.full((1, 1), 5.0)).sum().backward()
            own.went_on = threading.Event()
            fail_in_backward(ddp)
        ddp.zero_grad()
        own.went_on.set()
        own.holder.join()
        del own.went_on
        backward(ddp, 3.0, weight=1.0)
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [3.0] * 2


class Held:
    """What waits for the end of a backward pass."""

    def is_awaited(self) -> bool:
        return True


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_failure_waits_for_what_a_thread_of_autograds_has_noted() -> None:
    held, went_on = [Held()], threading.Event()
    reference = weakref.ref(held[0])

    def let_go_late() -> None:
        went_on.wait(0.5)  # it does not, when it waits for us
        held.clear()

    holder = threading.Thread(target=let_go_late)

    def fail(_grad: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: autograd.note_waiting(held[0]))
        thread.start()
        thread.join()
        holder.start()
        raise ArithmeticError

    autograd.wait_for_failures()
    x = torch.ones(1, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        x.sum().backward()
    assert reference() is None
    went_on.set()
    holder.join()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_failure_does_not_wait_for_the_pass_of_another_thread() -> None:
    def one_rank(group: Group) -> float:
        ddp, told = DDP(line(), process_group=group), threading.Event()

        def fail_beside() -> None:
            fail_in_backward(line())
            told.set()

        def wait(_grad: torch.Tensor) -> None:
            beside = threading.Thread(target=fail_beside)
            beside.start()
            assert told.wait(60)
            beside.join()

        x = torch.ones(1, 1, requires_grad=True)
        x.register_hook(wait)
        ddp(x).sum().backward()
        return ddp.module.weight.grad.item()

    assert run_ranks(1, one_rank) == [1.0]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_pass_that_failed_at_its_end_is_over_whoever_keeps_the_error(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree, failed = Runner._agree_on_unit, set[int]()

    def run_out_once(of: Runner) -> None:
        if id(of) not in failed:
            failed.add(id(of))
            raise MemoryError("no memory left")
        agree(of)

    def sum_up(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = group.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    monkeypatch.setattr(Runner, "_agree_on_unit", run_out_once)

    def one_rank(group: Group) -> list[float]:
        ddp, kept, found = DDP(line(), process_group=group), [], []
        ddp.register_comm_hook(group, sum_up)
        try:
            backward(ddp, 1.0)
        except MemoryError as error:
            kept += [error] if keeps else []
        for value in (3.0, 5.0):
            ddp.zero_grad()
            backward(ddp, value + group.rank())
            found.append(ddp.module.weight.grad.item())
        return found

    assert run_ranks(2, one_rank) == [[3.5, 5.5]] * 2


def test_a_count_for_one_pass_is_gone_after_a_backward_that_failed_in_no_sync() -> None:
    def one_rank(group: Group) -> float:
        ddp, rank = DDP(line(), process_group=group), group.rank()
        with ddp.no_sync():
            ddp.samples(1 + 2 * rank)
            fail_in_backward(ddp)
        ddp.zero_grad()
        backward(ddp, 4.0 * rank)
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [2.0] * 2


def test_a_count_for_one_pass_is_gone_after_sync_grads() -> None:
    def one_rank(group: Group) -> list[float]:
        ddp, rank, found = DDP(line(), process_group=group), group.rank(), []
        ddp.module(torch.full((1, 1), 4.0 * rank)).sum().backward()
        ddp.samples(1 + 2 * rank)
        ddp.sync_grads()
        found.append(ddp.module.weight.grad.item())
        ddp.zero_grad()
        backward(ddp, 4.0 * rank)
        return [*found, ddp.module.weight.grad.item()]

    assert run_ranks(2, one_rank) == [[3.0, 2.0]] * 2


def test_a_count_for_one_pass_is_gone_after_a_forward_that_failed() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = line()

        def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
            if fails:
                raise ArithmeticError
            return self.layer(x)

    def one_rank(group: Group) -> float:
        ddp, rank = DDP(Fails(), process_group=group), group.rank()
        ddp.samples(4)
        with pytest.raises((ArithmeticError, PeerError)):
            ddp(torch.ones(1, 1), rank == 1).sum().backward()
        ddp.zero_grad()
        ddp(torch.full((1, 1), 4.0 * rank), False).sum().backward()
        return ddp.module.layer.weight.grad.item()

    assert run_ranks(2, one_rank) == [2.0] * 2


def test_the_count_of_a_context_holds_after_sync_grads_inside() -> None:
    def one_rank(group: Group) -> float:
        ddp, rank = DDP(line(), process_group=group), group.rank()
        with ddp.samples(1 + 2 * rank):
            with ddp.no_sync():
                ddp(torch.ones(1, 1)).sum().backward()
            ddp.sync_grads()
            ddp.zero_grad()
            ddp(torch.full((1, 1), 4.0 * rank)).sum().backward()
        return ddp.module.weight.grad.item()

    assert run_ranks(2, one_rank) == [3.0] * 2


@pytest.fixture(params=["static graph", "strict", "strict static graph"])
def heeding(request: pytest.FixtureRequest) -> Iterator[dict[str, bool]]:
    """Options of a wrapper that heeds what its passes reach."""
    set_strict("strict" in request.param)
    yield {"static_graph": "static" in request.param}
    set_strict(False)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("weight", [None, 3.0])
def test_sync_grads_is_not_taken_for_a_graph_that_changed(
    heeding: dict[str, bool], first: bool, weight: float | None
) -> None:
    def one_rank(group: Group) -> list[float]:
        ddp, found = DDP(line(), process_group=group, **heeding), []
        if not first:
            backward(ddp, 1.0)
        for step in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                backward(ddp, step + 2.0 * group.rank(), weight)
            ddp.sync_grads()
            found.append(ddp.module.weight.grad.item())
        ddp.zero_grad()
        backward(ddp, 8.0)
        return [*found, ddp.module.weight.grad.item()]

    assert run_ranks(2, one_rank) == [[1.0, 2.0, 3.0, 8.0]] * 2


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_counts_nothing_is_not_taken_for_a_graph_that_changed(
    heeding: dict[str, bool], first: bool
) -> None:
    def one_rank(group: Group) -> list[float]:
        ddp, found = DDP(line(), process_group=group, **heeding), []
        if not first:
            backward(ddp, 1.0)
        for step in range(3):
            ddp.zero_grad()
            backward(ddp, float(step), weight=2.0 * (group.rank() == step % 2))
            found.append(ddp.module.weight.grad.item())
        ddp.zero_grad()
        backward(ddp, 8.0)
        return [*found, ddp.module.weight.grad.item()]

    assert run_ranks(2, one_rank) == [[0.0, 1.0, 2.0, 8.0]] * 2


@pytest.mark.parametrize("every", [True, False])
def test_a_count_is_refused_where_parameters_are_averaged_apart_from_the_others(
    every: bool,
) -> None:
    def one_rank(group: Group) -> tuple[str, list[float]]:
        model = nn.Sequential(line(), line())
        named = list(model.named_parameters())
        ddp = DDP(
            model,
            process_group=group,
            delay_all_reduce_named_params=named if every else named[:1],
            param_to_hook_all_reduce=model[0].weight,
        )
        with pytest.raises(ModuleStateError) as caught:
            ddp.samples(1 + 2 * group.rank())
        backward(ddp, 4.0 * group.rank())  # all goes on
        return str(caught.value), [p.grad.item() for p in model.parameters()]

    for rank, (text, found) in enumerate(run_ranks(2, one_rank)):
        assert text.startswith(f"rank {rank}: ddp.samples() ")
        assert "delay_all_reduce_named_params" in text
        assert found == [2.0, 2.0]
