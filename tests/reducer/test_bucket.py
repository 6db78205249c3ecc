"""Bucket: its memory, its life within a pass, and what communication hooks see of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.testing import assert_close

from paceline._reducer.bucket import Bucket, Phase, SparseBucket
from paceline._reducer.grad_bucket import GradBucket
from paceline.errors import BucketPhaseError, CommHookError
from paceline.groups import Group
from paceline.testing import Meeting, run_ranks, spawn_ranks


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def bucket_of(group: Group, params: list[nn.Parameter], **options: Any) -> Bucket:
    return Bucket.allocate(0, range(len(params)), params, group, **options)


def give(bucket: Bucket, *values: float | None) -> None:
    for param, value in zip(bucket.params, values, strict=True):
        param.grad = None if value is None else torch.full_like(param, value)


def take_rest(bucket: Bucket, scale: float = 1.0) -> None:
    bucket.take(bucket.missing(), scale)


def go_round(bucket: Bucket, group: Group, scale: float = 1.0) -> None:
    take_rest(bucket, scale)
    bucket.launch(group, average=True, quiet=False)
    bucket.wait()


def alone(check: Any) -> Any:
    """Run ``check`` with a group of one."""
    return run_ranks(1, check)[0]


# A life.


def test_a_bucket_comes_back_as_the_mean_over_ranks() -> None:
    def one_rank(group: Group) -> list[Tensor]:
        bucket = bucket_of(group, parameters((2, 3), (4,)))
        give(bucket, group.rank(), 10.0 * group.rank())
        go_round(bucket, group)
        for slot in range(2):
            bucket.give_back(slot)
        return [param.grad for param in bucket.params]

    for first, second in run_ranks(4, one_rank):
        assert_close(first, torch.full((2, 3), 1.5))
        assert_close(second, torch.full((4,), 15.0))


def test_its_phases_come_in_order_and_reset_begins_anew() -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters((2,)))
        give(bucket, 1.0)
        assert bucket.phase is Phase.FILLING
        take_rest(bucket)
        bucket.launch(group, average=True, quiet=False)
        assert bucket.phase is Phase.IN_FLIGHT
        bucket.wait()
        assert bucket.phase is Phase.REDUCED
        bucket.reset()
        assert bucket.phase is Phase.FILLING
        assert (bucket.taken, bucket.absent, bucket.kept) == (set(), set(), {})

    alone(one_rank)


def test_what_is_done_out_of_turn_is_an_error_that_names_the_phases() -> None:
    def one_rank(group: Group) -> None:
        bucket = Bucket.allocate(3, [0], parameters((2,)), group)
        with pytest.raises(BucketPhaseError) as caught:
            bucket.wait()
        error = caught.value
        assert (error.bucket, error.needed, error.found) == (3, "IN_FLIGHT", "FILLING")
        take_rest(bucket)
        bucket.launch(group, average=True, quiet=False)
        for early in (
            lambda: bucket.launch(group, average=True, quiet=False),
            lambda: bucket.launch_hook(lambda b: Future(), last=True),
            lambda: take_rest(bucket),
        ):
            with pytest.raises(BucketPhaseError):
                early()
        bucket.wait()

    alone(one_rank)


def test_a_gradient_is_taken_once_and_gone_from_its_parameter() -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters((2,), (2,)))
        give(bucket, 1.0, 2.0)
        bucket.take([1], 1.0)
        assert bucket.params[1].grad is None
        assert bucket.params[0].grad is not None
        give(bucket, 3.0, 4.0)  # the second comes too late
        take_rest(bucket)
        assert bucket.taken == {0, 1}
        assert bucket.payload.tolist() == [3.0, 3.0, 2.0, 2.0]
        assert bucket.params[1].grad is not None

    alone(one_rank)


def test_a_missing_gradient_counts_as_zeros_and_is_noted() -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters((2,), (2,)))
        bucket.buffer.fill_(7.0)
        give(bucket, None, 1.0)
        take_rest(bucket)
        assert bucket.absent == {0}
        assert bucket.payload.tolist() == [0.0, 0.0, 1.0, 1.0]

    alone(one_rank)


@pytest.mark.parametrize("count", [1, 3])
def test_gradients_are_scaled_on_the_way_in(count: int) -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters(*[(2,)] * count))
        give(bucket, *[3.0] * count)
        take_rest(bucket, 0.5)
        assert bucket.payload.tolist() == [1.5] * 2 * count

    alone(one_rank)


def test_a_gradient_that_lies_in_its_stretch_already_is_not_copied_but_scaled() -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters((2,)))
        bucket.params[0].grad = bucket.grads[0]
        bucket.grads[0].fill_(3.0)
        take_rest(bucket, 0.5)
        assert bucket.params[0].grad is None
        assert bucket.payload.tolist() == [1.5, 1.5]

    alone(one_rank)


def test_a_sparse_gradient_in_a_dense_bucket_is_spread_out() -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters((3, 1)))
        with torch.sparse.check_sparse_tensor_invariants(False):
            bucket.params[0].grad = torch.sparse_coo_tensor([[1]], [[2.0]], (3, 1))
        bucket.buffer.fill_(9.0)
        take_rest(bucket, 0.5)
        assert bucket.payload.tolist() == [0.0, 1.0, 0.0]

    alone(one_rank)


def test_another_type_on_the_way_is_not_lent_and_comes_back_in_the_parameters_own() -> None:
    def one_rank(group: Group) -> Tensor:
        bucket = bucket_of(group, parameters((2,)), dtype=torch.bfloat16)
        assert not bucket.lends
        give(bucket, 1.0 + group.rank())
        go_round(bucket, group)
        bucket.give_back(0)
        return bucket.params[0].grad

    for grad in run_ranks(2, one_rank):
        assert grad.dtype == torch.float32
        assert grad.tolist() == [1.5, 1.5]


def test_what_rides_behind_the_gradients_is_reduced_with_them() -> None:
    def one_rank(group: Group) -> list[float]:
        bucket = bucket_of(group, parameters((2,)), extra=2)
        give(bucket, 1.0)
        bucket.buffer[-2:].fill_(group.rank())
        go_round(bucket, group)
        assert bucket.payload.numel() == 2
        return bucket.buffer.tolist()

    assert run_ranks(2, one_rank) == [[1.0, 1.0, 0.5, 0.5]] * 2


# Its memory.


def test_stretches_follow_each_other_in_one_storage() -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters((2, 3), (), (0,), (4,)))
        assert [v.shape for v in bucket.views] == [(2, 3), (), (0,), (4,)]
        assert [v.storage_offset() for v in bucket.views] == [0, 6, 7, 7]
        storage = bucket.buffer.untyped_storage().data_ptr()
        assert all(v.untyped_storage().data_ptr() == storage for v in bucket.views)
        assert bucket.payload.numel() == 11

    alone(one_rank)


def test_a_stretch_has_the_strides_of_its_parameter() -> None:
    def one_rank(group: Group) -> None:
        image = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
        turned = nn.Parameter(torch.zeros(3, 2).t())
        bucket = bucket_of(group, [image, turned])
        assert [v.stride() for v in bucket.views] == [image.stride(), turned.stride()]
        assert bucket.views[0].is_contiguous(memory_format=torch.channels_last)
        values = torch.arange(120.0).view(2, 3, 4, 5)
        image.grad = values.clone().to(memory_format=torch.channels_last)
        turned.grad = torch.arange(6.0).view(2, 3)
        go_round(bucket, group)
        assert torch.equal(bucket.views[0], values)
        assert torch.equal(bucket.views[1], torch.arange(6.0).view(2, 3))

    alone(one_rank)


@pytest.mark.parametrize("gaps", ["stepped", "expanded"])
def test_a_parameter_with_gaps_in_memory_has_a_stretch_without(gaps: str) -> None:
    memory = torch.zeros(4, 6)[:, ::2] if gaps == "stepped" else torch.zeros(3).expand(4, 3)

    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, [nn.Parameter(memory)])
        assert bucket.views[0].is_contiguous()
        assert bucket.buffer.numel() == 12

    alone(one_rank)


def test_detach_in_place_works_on_what_grad_becomes() -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters((2, 2), (2,)))
        give(bucket, 1.0, 2.0)
        go_round(bucket, group)
        for slot, param in enumerate(bucket.params):
            bucket.give_back(slot)
            assert param.grad is bucket.grads[slot]
            param.grad.detach_()  # a view in autograd's sense would refuse
            assert not param.grad._is_view()

    alone(one_rank)


def test_a_bucket_that_does_not_lend_gives_back_the_object_it_took() -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters((2,), (2,)), lends=False)
        own = torch.full((2,), 4.0)
        bucket.params[0].grad = own
        go_round(bucket, group)
        bucket.give_back(0)
        bucket.give_back(1)  # had none
        assert bucket.params[0].grad is own
        storage = bucket.buffer.untyped_storage().data_ptr()
        assert bucket.params[1].grad.untyped_storage().data_ptr() != storage

    alone(one_rank)


def test_a_gradient_that_has_a_graph_of_its_own_stays_the_same_object() -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters((2,)))
        x = torch.ones(2, requires_grad=True)
        grad = x * 3  # what create_graph=True leaves
        bucket.params[0].grad = grad
        with torch.no_grad():
            go_round(bucket, group)
            bucket.give_back(0)
        assert bucket.params[0].grad is grad

    alone(one_rank)


def test_a_withheld_gradient_stays_none() -> None:
    def one_rank(group: Group) -> None:
        for lends in (True, False):
            bucket = bucket_of(group, parameters((2,)), lends=lends)
            go_round(bucket, group)
            bucket.withhold(0)
            assert bucket.params[0].grad is None

    alone(one_rank)


def shares_memory(meeting: Meeting) -> list[float]:
    with meeting.new_group("shm") as group:
        bucket = bucket_of(group, parameters((300, 100), (7,)))
        give(bucket, meeting.rank, 2.0 * meeting.rank)
        go_round(bucket, group)
        bucket.give_back(0)
        return [bucket.params[0].grad.mean().item(), bucket.views[1].mean().item()]


def test_a_bucket_in_shared_memory_comes_back_as_the_mean() -> None:
    assert spawn_ranks(2, shares_memory) == [[0.5, 1.0]] * 2


# Hooks.


def later(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_hooks_result_is_stored_whether_it_is_a_tensor_or_a_list_of_one(wrapped: bool) -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters((2,), (1,)), extra=1)
        take_rest(bucket)
        result = torch.tensor([1.0, 2.0, 3.0])
        bucket.launch_hook(lambda _: later([result] if wrapped else result), last=True)
        bucket.wait()
        assert [v.tolist() for v in bucket.views] == [[1.0, 2.0], [3.0]]

    alone(one_rank)


def test_what_is_not_a_future_or_not_the_right_tensor_is_refused() -> None:
    def one_rank(group: Group) -> None:
        for answer in (None, torch.zeros(2), 3):
            with pytest.raises(CommHookError):
                bucket_of(group, parameters((2,))).launch_hook(lambda _, a=answer: a, last=True)
        for value in (torch.zeros(3), "text", None, 3.0):
            bucket = bucket_of(group, parameters((2,)))
            bucket.launch_hook(lambda _, v=value: later(v), last=True)
            with pytest.raises(CommHookError):
                bucket.wait()

    alone(one_rank)


def test_a_hooks_view_of_a_bucket_has_every_method_of_torchs() -> None:
    public = {name for name in vars(dist.GradBucket) if not name.startswith("_")}
    assert public <= set(vars(GradBucket))


def test_a_hook_sees_the_gradients_flat_and_in_shape_without_what_rides_behind() -> None:
    def one_rank(group: Group) -> None:
        params = parameters((2, 2), (3,))
        bucket = Bucket.allocate(5, [0, 1], params, group, extra=4)
        give(bucket, 1.0, 2.0)
        take_rest(bucket)
        seen = GradBucket(bucket, last=False)
        assert (seen.index(), seen.is_last()) == (5, False)
        assert GradBucket(bucket, last=True).is_last()
        assert seen.buffer().tolist() == [1.0] * 4 + [2.0] * 3
        assert [g.shape for g in seen.gradients()] == [(2, 2), (3,)]
        assert all(a is b for a, b in zip(seen.parameters(), params, strict=True))
        seen.gradients()[1].fill_(9.0)
        assert seen.buffer().tolist() == [1.0] * 4 + [9.0] * 3

    alone(one_rank)


def test_a_replaced_buffer_is_what_gradients_are_read_from() -> None:
    def one_rank(group: Group) -> None:
        bucket = bucket_of(group, parameters((2, 2), (1,)))
        seen = GradBucket(bucket, last=True)
        seen.set_buffer(torch.arange(5, dtype=torch.float16))
        assert seen.buffer().dtype == torch.float16
        assert [g.tolist() for g in seen.gradients()] == [[[0.0, 1.0], [2.0, 3.0]], [4.0]]

    alone(one_rank)


# Sparse gradients.


def entries(rows: list[int], value: float, shape: tuple[int, int] = (5, 2)) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor([rows], torch.full((len(rows), shape[1]), value), shape)


def test_sparse_gradients_of_any_number_of_entries_come_back_as_their_mean() -> None:
    rows = [[0, 0, 3], [3], []]

    def one_rank(group: Group) -> Tensor:
        bucket = SparseBucket.hold(0, 0, parameters((5, 2))[0])
        bucket.params[0].grad = entries(rows[group.rank()], 3.0)
        go_round(bucket, group)
        bucket.give_back(0)
        assert bucket.params[0].grad.is_sparse
        return bucket.params[0].grad.to_dense()

    expected = torch.zeros(5, 2)
    expected[0], expected[3] = 2.0, 2.0
    assert all(torch.equal(found, expected) for found in run_ranks(3, one_rank))


def test_a_rank_without_a_sparse_gradient_gives_no_entries() -> None:
    def one_rank(group: Group) -> Tensor:
        bucket = SparseBucket.hold(0, 0, parameters((5, 2))[0])
        if group.rank() == 0:
            bucket.params[0].grad = entries([1], 4.0)
        go_round(bucket, group, scale=0.5)
        assert bucket.absent == (set() if group.rank() == 0 else {0})
        bucket.give_back(0)
        return bucket.params[0].grad.to_dense()[1]

    assert [found.tolist() for found in run_ranks(2, one_rank)] == [[1.0, 1.0]] * 2


def test_a_dense_gradient_in_a_sparse_bucket_travels_as_entries() -> None:
    def one_rank(group: Group) -> Tensor:
        bucket = SparseBucket.hold(0, 0, parameters((3, 2))[0])
        bucket.params[0].grad = torch.full((3, 2), float(group.rank()))
        go_round(bucket, group)
        bucket.give_back(0)
        return bucket.params[0].grad.to_dense()

    assert all(torch.equal(g, torch.full((3, 2), 0.5)) for g in run_ranks(2, one_rank))


def test_a_hook_sees_the_sparse_tensor_itself() -> None:
    def one_rank(group: Group) -> None:
        bucket = SparseBucket.hold(0, 0, parameters((5, 2))[0])
        bucket.params[0].grad = entries([1], 4.0)
        take_rest(bucket)
        seen = GradBucket(bucket, last=True)
        assert seen.buffer().is_sparse
        assert seen.gradients()[0].is_sparse
        bucket.launch_hook(lambda b: later(b.buffer() * 2), last=True)
        bucket.wait()
        bucket.give_back(0)
        assert bucket.params[0].grad.to_dense()[1].tolist() == [8.0, 8.0]

    alone(one_rank)


def test_a_sparse_bucket_holds_nothing_between_passes() -> None:
    def one_rank(group: Group) -> None:
        for leave in (SparseBucket.give_back, SparseBucket.withhold):
            bucket = SparseBucket.hold(0, 0, parameters((5, 2))[0])
            bucket.params[0].grad = entries([1], 4.0)
            go_round(bucket, group)
            leave(bucket, 0)
            assert bucket.buffer._nnz() == 0

    alone(one_rank)


class _Interrupted(dist.Work):
    """Was interrupted when somebody waited for it; ``kept``: it has ended with that."""

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.error = KeyboardInterrupt()
        self.kept = kept

    def wait(self, timeout: object = None) -> bool:
        raise self.error

    def exception(self) -> Any:
        return self.error if self.kept else None


def test_a_bucket_that_an_interrupt_has_ended_is_abandoned_without_another() -> None:
    def check(group: Group) -> None:
        bucket = bucket_of(group, parameters((2,)))
        bucket.work = _Interrupted(kept=True)
        bucket.abandon()
        bucket.work = _Interrupted(kept=False)
        with pytest.raises(KeyboardInterrupt):
            bucket.abandon()

    alone(check)
