"""Groups that others wrote in Python, as torch lets one do, beneath all that takes a group."""

import copy
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from paceline import DistributedDataParallel as DDP
from paceline import Group, Join, hooks
from paceline.errors import (
    CollectiveArgumentError,
    RendezvousError,
    UnsupportedError,
    WaitTimeoutError,
)
from paceline.optim import ZeroRedundancyOptimizer
from paceline.testing import run_ranks
from tests.groups.test_unequal_ranks import check_means
from tests.groups.test_what_is_given import keep_graphs
from tests.waiting import until

# Works, as they are found in the world. Each is made of the result and of the group.


def _future(result: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class TimedWork(dist.Work):
    """Takes a timeout, always: torch's C++ never calls it without."""

    def __init__(self, result: list[Tensor], group: Any) -> None:
        super().__init__()
        self._result, self._group = result, weakref.ref(group)

    def wait(self, timeout: timedelta) -> bool:
        assert isinstance(timeout, timedelta)
        self._group().waits += 1
        return True

    def get_future(self) -> Future[list[Tensor]]:
        self._group().futures += 1
        return _future(self._result)


class WorkWithoutFuture(dist.Work):
    """Its result is there only once it was waited for; and it returns nothing."""

    def __init__(self, result: list[Tensor], group: Any) -> None:
        super().__init__()
        self._result, self._hidden = result, [t.clone() for t in _flat(result)]
        for tensor in _flat(result):
            tensor.zero_()

    def wait(self, timeout: timedelta) -> None:
        for tensor, value in zip(_flat(self._result), self._hidden, strict=True):
            tensor.copy_(value)


class WorkThatSaysItHasNoFuture(WorkWithoutFuture):
    def get_future(self) -> Future[Any]:
        raise NotImplementedError("no future here")


class WorkOfAFutureAlone(dist.Work):
    """torch's own ``wait`` would block for ever."""

    def __init__(self, result: list[Tensor], group: Any) -> None:
        super().__init__()
        self._future = _future(result)

    def get_future(self) -> Future[Any]:
        return self._future


class WorkAroundAnother:
    """Not even a Work of torch's: hands everything on."""

    def __init__(self, result: list[Tensor], group: Any) -> None:
        self._inner = WorkWithoutFuture(result, group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WorkWithAStrangeFuture(TimedWork):
    def get_future(self) -> Any:
        return _future({"nothing": "to see"})


class WorkWithNestedLists(TimedWork):
    def get_future(self) -> Any:
        return _future([self._result])


class WorkWhoseFutureIsNotTorchs(TimedWork):
    def get_future(self) -> Any:
        return object()


def torchs_own(result: list[Tensor], group: Any) -> dist.Work:
    return c10d._create_work_from_future(_future(result))


def none_at_all(result: list[Tensor], group: Any) -> None:
    return None


WORKS: list[Callable[..., Any]] = [
    TimedWork,
    WorkWithoutFuture,
    WorkThatSaysItHasNoFuture,
    WorkOfAFutureAlone,
    WorkAroundAnother,
    WorkWithAStrangeFuture,
    WorkWithNestedLists,
    WorkWhoseFutureIsNotTorchs,
    torchs_own,
    none_at_all,
]


def _flat(tensors: Any) -> list[Tensor]:
    return (
        [tensors] if isinstance(tensors, Tensor) else [t for part in tensors for t in _flat(part)]
    )


class Minimal(dist.ProcessGroup):
    """What torch's DistributedDataParallel calls, with the arguments it gives, and no more.

    It has no engine for any device, no store and no name.
    """

    def __init__(self, carrier: Group, make_work: Callable[..., Any] = TimedWork) -> None:
        super().__init__(carrier.rank(), carrier.size())
        self.carrier, self.make_work = carrier, make_work
        self.waits = self.futures = 0
        self.calls: list[str] = []

    def _done(self, name: str, result: Any) -> Any:
        self.calls.append(name)
        return self.make_work(result, self)

    def broadcast(self, tensors: list[Tensor], opts: c10d.BroadcastOptions) -> Any:
        self.carrier.broadcast(tensors[0], opts.rootRank)
        return self._done("broadcast", tensors)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: c10d.AllgatherOptions
    ) -> Any:
        self.carrier.all_gather(outputs[0], inputs[0])
        return self._done("allgather", outputs)

    def allreduce(self, tensors: list[Tensor], opts: c10d.AllreduceOptions) -> Any:
        assert opts.reduceOp == dist.ReduceOp.SUM, "it knows no other"
        self.carrier.all_reduce(tensors[0])
        return self._done("allreduce", tensors)


class Elsewhere(Minimal):
    """Its sum is in its future alone, not where the tensors were."""

    def allreduce(self, tensors: list[Tensor], opts: c10d.AllreduceOptions) -> Any:
        total = tensors[0].clone()
        self.carrier.all_reduce(total)
        return self._done("allreduce", [total])


class Unfriendly(Minimal):
    """Whatever torch lets a group answer, it answers with an error; ``size`` is its own."""

    def size(self) -> int:
        return self.carrier.size()

    def getBackendName(self) -> str:
        raise NotImplementedError("not implemented")

    @property
    def group_name(self) -> str:
        raise ValueError("not set")

    def get_group_store(self) -> Any:
        raise KeyError("none")

    def _get_backend(self, device: torch.device) -> Any:
        raise KeyError(device)


class CalledGloo(Minimal):
    """Says that it is gloo, and has nothing of gloo's."""

    def getBackendName(self) -> str:
        return "gloo"


class Dropped(dist.ProcessGroup):
    """One rank; what it is asked to do is thrown away."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allreduce(self, tensors: list[Tensor], opts: object) -> Any:
        return torchs_own(tensors, self)

    def broadcast(self, tensors: list[Tensor], opts: object) -> Any:
        return torchs_own(tensors, self)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object) -> Any:
        outputs[0][0].copy_(inputs[0])
        return torchs_own(outputs, self)


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    chance = torch.Generator().manual_seed(0)  # ranks are threads, and share torch's own
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-1, 1, generator=chance)
    return model


def _batch(rank: int) -> Tensor:
    return torch.linspace(-1, 1, 6).view(2, 3) * (rank + 1)


def _means(ranks: int) -> list[Tensor]:
    """The mean gradients, computed on one."""
    totals: list[Tensor] = []
    for rank in range(ranks):
        model = _model()
        model(_batch(rank)).square().sum().backward()
        grads = [p.grad / ranks for p in model.parameters()]  # type: ignore[operator]
        totals = [a + b for a, b in zip(totals, grads, strict=True)] if totals else grads
    return totals


def _trains(group: dist.ProcessGroup, rank: int, **options: Any) -> None:
    model = _model()
    if rank:
        with torch.no_grad():
            model[0].weight.zero_()  # type: ignore[union-attr]  # DDP makes it the first rank's
    ddp = DDP(model, process_group=group, **options)
    for _ in range(3):
        ddp.zero_grad()
        ddp(_batch(rank)).square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        torch.testing.assert_close(grads, _means(group.size()))


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("make_work", WORKS)
def test_gradients_are_averaged_whatever_the_group_s_works_lack(
    make_work: Callable[..., Any], views: bool
) -> None:
    def one_rank(carrier: Group) -> None:
        group = Minimal(carrier, make_work)
        _trains(group, carrier.rank(), gradient_as_bucket_view=views)
        assert group.calls.count("allreduce") >= 3

    run_ranks(2, one_rank)


@pytest.mark.parametrize("kind", [Elsewhere, Unfriendly, CalledGloo])
def test_gradients_are_averaged_over_groups_that_answer_little(kind: type[Minimal]) -> None:
    run_ranks(2, lambda carrier: _trains(kind(carrier), carrier.rank()))


def test_works_are_waited_for_and_asked_for_their_futures() -> None:
    def one_rank(carrier: Group) -> None:
        group = Minimal(carrier)
        _trains(group, carrier.rank())
        assert group.waits >= 3
        assert group.futures >= 3

    run_ranks(2, one_rank)


def test_nothing_is_asked_of_a_group_while_init_sync_is_off() -> None:
    def one_rank(carrier: Group) -> None:
        group = Minimal(carrier)
        DDP(_model(), process_group=group, init_sync=False)
        assert (group.waits, group.futures) == (0, 0)

    run_ranks(1, one_rank)


def test_a_hook_s_work_is_all_that_counts_over_a_group_that_drops_everything() -> None:
    """As torchft does it: the wrapper has a group of one, and the hook averages elsewhere."""

    def one_rank(carrier: Group) -> None:
        def hook(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
            tensor = bucket.buffer()
            carrier.all_reduce(tensor)
            return _future(tensor / carrier.size())

        model = _model()
        ddp = DDP(model, process_group=Dropped())
        ddp.register_comm_hook(None, hook)
        for _ in range(3):
            ddp.zero_grad()
            ddp(_batch(carrier.rank())).square().sum().backward()
            torch.testing.assert_close([p.grad for p in model.parameters()], _means(2))

    run_ranks(2, one_rank)


@pytest.mark.parametrize("make_work", [TimedWork, WorkWithoutFuture, WorkOfAFutureAlone])
def test_uneven_inputs_are_joined_over_such_a_group(make_work: Callable[..., Any]) -> None:
    def one_rank(carrier: Group) -> list[Tensor]:
        rank, model = carrier.rank(), _model()
        ddp = DDP(model, process_group=Minimal(carrier, make_work))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with Join([ddp]):
            for _ in range(2 + rank):
                optimizer.zero_grad()
                ddp(_batch(rank)).square().sum().backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    first, second = run_ranks(2, one_rank)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("make_work", [TimedWork, WorkWithoutFuture, WorkOfAFutureAlone])
def test_a_sharded_optimizer_steps_over_such_a_group(make_work: Callable[..., Any]) -> None:
    def one_rank(carrier: Group) -> None:
        group, model = Minimal(carrier, make_work), _model()
        ddp = DDP(model, process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.Adam, process_group=group, lr=0.1
        )
        plain = _model()
        reference = torch.optim.Adam(plain.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ddp(_batch(carrier.rank())).square().sum().backward()
            reference.zero_grad()
            for rank in range(2):
                (plain(_batch(rank)).square().sum() / 2).backward()
            optimizer.step()
            reference.step()
            torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
        optimizer.consolidate_state_dict(to=0)

    run_ranks(2, one_rank)


@pytest.mark.parametrize("make_work", [TimedWork, WorkWithoutFuture, WorkOfAFutureAlone])
def test_batch_norm_is_taken_over_all_ranks_of_such_a_group(make_work: Callable[..., Any]) -> None:
    whole = nn.BatchNorm1d(3)
    expected = whole(torch.cat([_batch(0), _batch(1)]))

    def one_rank(carrier: Group) -> None:
        group, rank = Minimal(carrier, make_work), carrier.rank()
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3), group)
        ddp = DDP(model, process_group=group)
        torch.testing.assert_close(ddp(_batch(rank)), expected[2 * rank : 2 * rank + 2])
        torch.testing.assert_close(ddp.module.running_var, whole.running_var)

    run_ranks(2, one_rank)


@pytest.mark.parametrize("make_work", [WorkWithoutFuture, WorkAroundAnother, none_at_all])
@pytest.mark.parametrize(
    "hook", [hooks.allreduce_hook, hooks.fp16_compress_hook, hooks.quantization_pertensor_hook]
)
def test_hooks_take_such_a_group_as_their_state(
    hook: Callable[..., Any], make_work: Callable[..., Any]
) -> None:
    def one_rank(carrier: Group) -> None:
        group, model = Minimal(carrier, make_work), _model()
        ddp = DDP(model, process_group=group)
        ddp.register_comm_hook(group, hook)
        ddp(_batch(carrier.rank())).square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        torch.testing.assert_close(grads, _means(2), rtol=0.02, atol=0.3)

    run_ranks(2, one_rank)


def test_powersgd_works_over_such_a_group() -> None:
    def one_rank(carrier: Group) -> None:
        group, model = Minimal(carrier, WorkWithoutFuture), _model()
        ddp = DDP(model, process_group=group)
        state = hooks.PowerSGDState(group, matrix_approximation_rank=8, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, hooks.powerSGD_hook)
        for _ in range(4):
            ddp.zero_grad()
            ddp(_batch(carrier.rank())).square().sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], _means(2))

    run_ranks(2, one_rank)


def test_a_sum_in_a_future_is_in_place_when_the_work_says_that_it_is_completed() -> None:
    def one_rank(carrier: Group) -> list[float]:
        tensor = torch.ones(2)
        work = Group.wrap(Elsewhere(carrier, TimedWork)).all_reduce(tensor, async_op=True)
        assert work.is_completed()  # its future was done from the start
        return tensor.tolist()

    assert run_ranks(2, one_rank) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("make_work", WORKS)
def test_every_collective_is_put_together_from_three(make_work: Callable[..., Any]) -> None:
    def one_rank(carrier: Group) -> None:
        group, rank = Group.wrap(Minimal(carrier, make_work)), carrier.rank()
        mean = torch.tensor([1.0, 2.0]) * (rank + 1)
        group.all_reduce(mean, dist.ReduceOp.AVG)
        assert mean.tolist() == [2.0, 4.0]
        turned = torch.tensor([1 + 2j]) * (rank + 1)
        group.all_reduce(turned)
        assert turned.tolist() == [6 + 12j]
        most = torch.tensor([rank, -rank])
        group.all_reduce(most, dist.ReduceOp.MAX)
        assert most.tolist() == [2, 0]
        whole = torch.tensor([rank, 5])
        group.reduce(whole, root=1, op=dist.ReduceOp.AVG)
        assert whole.tolist() == ([1, 5] if rank == 1 else [rank, 5])
        own, rows = torch.tensor([rank]), torch.empty(3, dtype=torch.int64)
        group.all_gather_single(rows, own)
        assert rows.tolist() == [0, 1, 2]
        parts = [torch.empty(r + 1) for r in range(3)]
        group.all_gather(parts, torch.full((rank + 1,), float(rank)))
        assert [p.tolist() for p in parts] == [[0.0], [1.0] * 2, [2.0] * 3]
        gathered = [torch.empty(r) for r in range(3)] if rank == 2 else []
        group.gather(gathered, torch.full((rank,), float(rank)), root=2)
        assert [p.tolist() for p in gathered] == ([[], [1.0], [2.0] * 2] if rank == 2 else [])
        taken = torch.empty(rank + 1)
        group.scatter(taken, [torch.arange(r + 1.0) for r in range(3)] if rank == 0 else [], root=0)
        assert taken.tolist() == list(range(rank + 1))
        kept = torch.empty(2)
        group.reduce_scatter_single(kept, torch.arange(6.0), dist.ReduceOp.AVG)
        assert kept.tolist() == [2.0 * rank, 2.0 * rank + 1]
        group.reduce_scatter(kept, [torch.full((2,), float(r)) for r in range(3)])
        assert kept.tolist() == [3.0 * rank] * 2
        largest = torch.tensor([rank, -rank])
        group.reduce(largest, root=1, op=dist.ReduceOp.MAX)
        assert largest.tolist() == ([2, 0] if rank == 1 else [rank, -rank])
        group.reduce_scatter_single(kept, torch.arange(6.0) + rank, dist.ReduceOp.MAX)
        assert kept.tolist() == [2.0 * rank + 2, 2.0 * rank + 3]
        lower = [torch.full((2,), float(rank - r)) for r in range(3)]
        group.reduce_scatter(kept, lower, dist.ReduceOp.MIN)
        assert kept.tolist() == [0.0 - rank] * 2
        rows2 = torch.empty(3, 2)
        group.all_to_all_single(rows2, torch.full((3, 2), float(rank)))
        assert rows2[:, 0].tolist() == [0.0, 1.0, 2.0]
        uneven = torch.empty(3)
        splits = [[1, 1, 1], [0, 0, 0], [2, 2, 2]]
        takes = [s[rank] for s in splits]
        group.all_to_all_single(
            uneven, torch.full((3 * splits[rank][0],), rank + 0.5), takes, splits[rank]
        )
        assert uneven.tolist() == [0.5, 2.5, 2.5]
        lists = [torch.empty(1) for _ in range(3)]
        group.all_to_all(lists, [torch.tensor([10.0 * rank + r]) for r in range(3)])
        assert [t.item() for t in lists] == [10.0 * r + rank for r in range(3)]
        group.barrier()
        assert group.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(3)]

    run_ranks(3, one_rank)


class Scattering(Minimal):
    """Scatters sums itself, in torch's arithmetic, so shapes and types have to fit."""

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: c10d.ReduceScatterOptions
    ) -> Any:
        total = torch.stack(inputs[0])
        self.carrier.all_reduce(total)
        torch.add(total[self.rank()], 0, out=outputs[0])
        return self._done("reduce_scatter", outputs)


@pytest.mark.parametrize("kind", [Minimal, Elsewhere, Scattering])
def test_a_mean_of_integers_does_not_overflow_over_such_a_group(kind: type[Minimal]) -> None:
    def one_rank(carrier: Group) -> None:
        group = Group.wrap(kind(carrier))
        check_means(group)
        part = torch.empty(2, 3, dtype=torch.int8)
        group.reduce_scatter(
            part, [torch.full((2, 3), 100, dtype=torch.int8)] * 2, dist.ReduceOp.AVG
        )
        assert part.eq(100).all()

    run_ranks(2, one_rank)


def test_a_mean_of_truth_values_or_of_the_widest_numbers_is_refused_before_it_is_sent() -> None:
    def one_rank(carrier: Group) -> None:
        inner = Minimal(carrier)
        for dtype in (torch.bool, torch.uint64):
            with pytest.raises(CollectiveArgumentError, match="AVG"):
                Group.wrap(inner).all_reduce(torch.ones(2, dtype=dtype), dist.ReduceOp.AVG)
        assert inner.calls == []

    run_ranks(2, one_rank)


@pytest.mark.parametrize(
    ("kind", "make_work"),
    [(Minimal, TimedWork), (Minimal, WorkWithoutFuture), (Elsewhere, TimedWork)],
)
def test_a_collective_over_such_a_group_is_no_step_of_autograd(
    kind: type[Minimal], make_work: Callable[..., Any]
) -> None:
    run_ranks(2, lambda carrier: keep_graphs(Group.wrap(kind(carrier, make_work)), messages=False))


class RankForgotten(Minimal):
    """A wrapper that hands on the size and not the rank."""

    def rank(self) -> int:
        return 0


def test_ranks_that_all_say_they_are_the_first_are_refused_before_anything_is_averaged() -> None:
    def one_rank(carrier: Group) -> None:
        with pytest.raises(RendezvousError, match=r"RankForgotten has 2 ranks.*\[2.0, 0.0\]"):
            DDP(_model(), process_group=RankForgotten(carrier))

    run_ranks(2, one_rank)


class Idle(Minimal):
    """Adds up nothing, as groups do that only stand for one, or have met a fault."""

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        return TimedWork(tensors, self)


class Dividing(Minimal):
    """Gives the mean where a sum is asked for, as managed groups do."""

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        work = super().allreduce(tensors, options)
        for tensor in tensors:
            tensor.div_(self.size())
        return work


@pytest.mark.parametrize("kind", [Idle, Dividing])
def test_a_group_may_divide_or_add_up_nothing(kind: type[Minimal]) -> None:
    def one_rank(carrier: Group) -> float:
        tensor = torch.ones(1)
        Group.wrap(kind(carrier)).all_reduce(tensor)
        return tensor.item()

    assert run_ranks(2, one_rank) == [1.0, 1.0]


def test_what_cannot_be_put_together_names_the_method_that_is_missing() -> None:
    def one_rank(carrier: Group) -> None:
        group = Group.wrap(Minimal(carrier))
        with pytest.raises(UnsupportedError, match=r"send, which Minimal does not override"):
            group.send(torch.ones(1), 1 - carrier.rank())

    run_ranks(2, one_rank)


class WorkOfNothing(dist.Work):
    def __init__(self, result: list[Tensor], group: Any) -> None:
        super().__init__()


def test_a_work_with_neither_wait_nor_future_is_refused_instead_of_waited_for_for_ever() -> None:
    def one_rank(carrier: Group) -> None:
        group = Group.wrap(Minimal(carrier, WorkOfNothing))
        with pytest.raises(UnsupportedError, match="neither wait nor get_future"):
            group.all_reduce(torch.ones(1))

    run_ranks(1, one_rank)


class WorkThatFails(TimedWork):
    def get_future(self) -> Future[Any]:
        def fail(_: Future[Any]) -> Any:
            raise ValueError("the wire broke")

        return _future(None).then(fail)


class WorkThatFailsInWait(TimedWork):
    def wait(self, timeout: timedelta) -> bool:
        raise ValueError("the wire broke")


@pytest.mark.parametrize("make_work", [WorkThatFails, WorkThatFailsInWait])
def test_what_goes_wrong_in_a_work_is_raised(make_work: Callable[..., Any]) -> None:
    def one_rank(carrier: Group) -> None:
        group = Group.wrap(Minimal(carrier, make_work))
        with pytest.raises(Exception, match="the wire broke"):
            group.all_reduce(torch.ones(1))

    run_ranks(1, one_rank)


class LateWork(dist.Work):
    """Comes when somebody sets its future."""

    def __init__(self, result: list[Tensor], group: Any) -> None:
        super().__init__()
        self.future: Future[Any] = Future()
        group.late = self

    def get_future(self) -> Future[Any]:
        return self.future


def test_a_wait_with_a_timeout_ends_and_the_work_goes_on() -> None:
    def one_rank(carrier: Group) -> None:
        inner = Minimal(carrier, LateWork)
        tensor = torch.ones(2)
        work = Group.wrap(inner).all_reduce(tensor, async_op=True)
        with pytest.raises(WaitTimeoutError):
            work.wait(timedelta(milliseconds=20))
        assert not work.is_completed()
        inner.late.future.set_result([torch.full((2,), 7.0)])  # type: ignore[attr-defined]
        assert work.is_completed()
        assert work.wait()
        assert tensor.tolist() == [7.0, 7.0]

    run_ranks(1, one_rank)


def test_futures_of_dropped_wrappers_leave_no_thread_behind() -> None:
    def one_rank(carrier: Group) -> None:
        inner = Minimal(carrier, WorkWithoutFuture)
        for _ in range(20):
            Group.wrap(inner).all_reduce(torch.ones(2), async_op=True).get_future().wait()

    before = threading.active_count()
    run_ranks(1, one_rank)
    assert until(lambda: threading.active_count() <= before + 1)


def test_a_model_can_be_copied_and_wrapped_over_another_such_group() -> None:
    def one_rank(carrier: Group) -> None:
        model = _model()
        for group in (Minimal(carrier), Minimal(carrier, WorkWithoutFuture)):
            _trains(group, carrier.rank())
            DDP(copy.deepcopy(model), process_group=group)

    run_ranks(2, one_rank)
