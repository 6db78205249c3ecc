"""The shm engine with real processes: every collective, every type, many at once."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from paceline import Group, ReduceOp
from paceline.errors import CollectiveArgumentError, CollectiveTypeError, EngineUnavailableError
from paceline.testing import Meeting, spawn_ranks

from ..reference import check_all_collectives

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SIZES = [0, 1, 15, 16, 17, 1000, 40_000, 300_001]  # within the slot, at its edge, in windows


def do_everything(meeting: Meeting) -> None:
    with meeting.new_group("shm") as group:
        check_all_collectives(group)


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(7, marks=pytest.mark.slow)])
def test_every_collective_over_processes(size: int) -> None:
    spawn_ranks(size, do_everything)


def make(rank: int, numel: int, dtype: torch.dtype, low: int = -3, high: int = 4) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=source).bool()
    if not dtype.is_signed:
        low = 0
    return torch.randint(low, high, (numel,), generator=source).to(dtype)


def in_order(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """The reduction as one process does it: rank 0 first, half-width floats in float32."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = tensors[0].to(wide)
    for tensor in (t.to(wide) for t in tensors[1:]):
        if dtype is torch.bool:  # a sum is "any", a product is "all"
            name = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(name, name)
        total = {
            "sum": torch.add,
            "avg": torch.add,
            "product": torch.mul,
            "min": torch.minimum,
            "max": torch.maximum,
            "band": torch.bitwise_and,
            "bor": torch.bitwise_or,
            "bxor": torch.bitwise_xor,
        }[name](total, tensor)
    if name == "avg":
        rounding = None if wide.is_floating_point else "trunc"
        total = torch.div(total, len(tensors), rounding_mode=rounding)
    return total.to(dtype)


def reduce_every_type(meeting: Meeting) -> int:
    checked = 0
    names = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
    with meeting.new_group("shm") as group:
        for dtype in [*FLOATS, *INTEGERS, torch.bool]:
            for name in names:
                if not group._engine.reduces(dtype, name):
                    continue
                for numel in SIZES if name == "sum" else [33, 70_000]:
                    everyone = [make(r, numel, dtype) for r in range(meeting.size)]
                    op = getattr(ReduceOp, name.upper())
                    tensor = everyone[meeting.rank].clone()
                    group.all_reduce(tensor, op)
                    expected = in_order(everyone, name)
                    assert torch.equal(tensor, expected), (dtype, name, numel)
                    shared = group.allocate(numel, dtype)
                    shared.copy_(everyone[meeting.rank])
                    group.all_reduce(shared, op)
                    assert torch.equal(shared, expected), (dtype, name, numel, "shared")
                    checked += 1
    return checked


@pytest.mark.parametrize("size", [2, 3])
def test_every_type_and_reduction_gives_what_one_process_computes(size: int) -> None:
    counts = spawn_ranks(size, reduce_every_type)
    assert counts[0] > 100


def reduce_hard_values(meeting: Meeting) -> list[list[float]]:
    values = torch.tensor(
        [float("nan"), float("inf"), -0.0, 1e-8, 65504.0, 6e-8, -float("inf"), 2049.0]
    )
    results = []
    with meeting.new_group("shm") as group:
        for dtype in FLOATS:
            for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX):
                expected = values.to(dtype)
                tensor = expected.clone() if meeting.rank == 0 else torch.ones(8, dtype=dtype)
                group.all_reduce(tensor, op)
                assert tensor[0].isnan(), "NaN is carried, not hidden"
                wide = expected.float() if dtype.itemsize == 2 else expected
                if op is ReduceOp.SUM:
                    want = (wide + 1).to(dtype)
                elif op is ReduceOp.MIN:
                    want = torch.minimum(wide, torch.ones_like(wide)).to(dtype)
                else:
                    want = torch.maximum(wide, torch.ones_like(wide)).to(dtype)
                torch.testing.assert_close(tensor, want, rtol=0, atol=0, equal_nan=True)
                results.append(tensor.double().tolist())
    return results


def test_nan_infinity_and_rounding_are_those_of_torch() -> None:
    first, second = spawn_ranks(2, reduce_hard_values)
    assert str(first) == str(second)


def convert_every_half(meeting: Meeting) -> None:
    """All 65536 bit patterns through the engine's conversion and back."""
    bits = torch.arange(65536).to(torch.int32).to(torch.uint16)
    with meeting.new_group("shm") as group:
        for dtype in (torch.float16, torch.bfloat16):
            every = bits.view(dtype)
            tensor = every.clone() if meeting.rank == 0 else torch.zeros(65536, dtype=dtype)
            group.all_reduce(tensor)
            want = (every.float() + 0.0).to(dtype)
            torch.testing.assert_close(tensor, want, rtol=0, atol=0, equal_nan=True)
            group.all_reduce(tensor, ReduceOp.MAX)
            torch.testing.assert_close(tensor, want, rtol=0, atol=0, equal_nan=True)


def test_every_half_width_float_survives_the_way_through_float32() -> None:
    spawn_ranks(2, convert_every_half)


def sums_are_the_same_everywhere(meeting: Meeting) -> list[bytes]:
    source = torch.Generator().manual_seed(meeting.rank)
    results = []
    with meeting.new_group("shm") as group:
        for numel in (1000, 500_000):
            for shared in (False, True):
                tensor = group.allocate(numel) if shared else torch.empty(numel)
                tensor.copy_(torch.randn(numel, generator=source) * 1e3)
                group.all_reduce(tensor)
                results.append(tensor.numpy().tobytes())
    return results


def test_float_sums_are_bitwise_equal_on_every_rank_and_every_run() -> None:
    runs = [spawn_ranks(4, sums_are_the_same_everywhere) for _ in range(2)]
    assert all(rank == runs[0][0] for run in runs for rank in run)


def carry_any_type(meeting: Meeting) -> None:
    with meeting.new_group("shm") as group:
        for dtype in (torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.bool):
            own = torch.arange(16, dtype=torch.uint8).view(torch.uint8).to(torch.bool).view(dtype)
            tensor = own.clone() if meeting.rank == 1 else torch.zeros_like(own)
            group.broadcast(tensor, 1)
            assert torch.equal(tensor.view(torch.uint8), own.view(torch.uint8))
        tensor = torch.full((70_000,), 1 + 2j, dtype=torch.complex64)
        group.all_reduce(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, 2 + 4j))
        with pytest.raises(CollectiveArgumentError, match="PRODUCT"):
            group.all_reduce(tensor, ReduceOp.PRODUCT)
        with pytest.raises(CollectiveArgumentError, match="float8"):
            group.all_reduce(torch.zeros(3).to(torch.float8_e4m3fn))
        tensor = torch.full((5,), float(meeting.rank + 1))
        group.all_reduce(tensor, torch.distributed._make_nccl_premul_sum(0.5))
        assert tensor[0] == 1.5


def test_any_dtype_is_moved_and_what_cannot_be_reduced_is_refused() -> None:
    spawn_ranks(2, carry_any_type)


# -- many at once -------------------------------------------------------------------------------


def keep_many_in_flight(meeting: Meeting) -> None:
    with meeting.new_group("shm") as group:
        tensors = [torch.full((n,), float(meeting.rank)) for n in (3, 70_000, 1, 0, 400_000) * 20]
        works = [group.all_reduce(t, async_op=True) for t in tensors]
        total = float(sum(range(meeting.size)))
        for work, tensor in reversed(list(zip(works, tensors, strict=True))):
            work.wait()
            assert work.is_completed()
            assert (tensor == total).all()
        last = torch.full((5,), float(meeting.rank))
        future = group.allreduce([last]).get_future().then(lambda f: f.value()[0] * 2)
        assert future.wait()[0] == 2 * total


@pytest.mark.parametrize("size", [2, 4])
def test_operations_in_flight_end_in_any_order_of_waiting(size: int) -> None:
    spawn_ranks(size, keep_many_in_flight)


def use_threads(meeting: Meeting) -> None:
    """Each thread has its own group; all of them are busy at once, and one group is shared."""
    shared = meeting.new_group("shm")
    groups = [meeting.new_group("shm") for _ in range(3)]
    errors: list[BaseException] = []

    def work(group: Group, numel: int) -> None:
        try:
            for _ in range(20):
                tensor = torch.full((numel,), float(meeting.rank))
                group.all_reduce(tensor)
                assert (tensor == 1).all()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(group, numel))
        for group, numel in zip(groups, (5, 1000, 200_000), strict=True)
    ]
    # on one group calls of several threads are one sequence; equal calls may come in any order
    threads += [threading.Thread(target=work, args=(shared, 64)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in (shared, *groups):
        group.shutdown()
    if errors:
        raise errors[0]


def test_groups_are_used_from_several_threads_at_once() -> None:
    spawn_ranks(2, use_threads)


def pass_messages(meeting: Meeting) -> None:
    rank = meeting.rank
    with meeting.new_group("shm") as group:
        if rank == 0:
            for tag in range(5):
                group.send(torch.full((tag + 1,), float(tag)), 1, tag)
            big = group.send(torch.ones(1_000_000), 1, 9, async_op=True)
            small = group.send(torch.ones(1), 2, async_op=True)
            small.wait()
            big.wait()
        elif rank == 1:
            for tag in (3, 0, 4, 1, 2):  # not the order they were sent in
                got = torch.empty(tag + 1)
                group.recv(got, 0, tag)
                assert (got == tag).all()
            got = torch.empty(1_000_000)
            group.recv(got, 0, 9)
            assert got.sum() == 1_000_000
        else:
            got = torch.empty(1)
            assert group.recv(got).source_rank() == 0
        ring = torch.empty(300_000)
        works = [
            group.send(torch.full((300_000,), float(rank)), (rank + 1) % 3, async_op=True),
            group.recv(ring, (rank - 1) % 3, async_op=True),
        ]
        group.barrier()  # transfers and collectives do not wait for each other
        for work in works:
            work.wait()
        assert (ring == (rank - 1) % 3).all()


def test_messages_are_matched_by_tag_and_large_ones_cross() -> None:
    spawn_ranks(3, pass_messages)


def progress_by_poking(meeting: Meeting) -> None:
    group = meeting.new_group("shm")
    operation = group._engine.shm  # the engine's quiet mode: nobody moves it but who passes by
    from paceline._transport import DTYPE_CODES, KIND_CODES

    tensor = torch.full((400_000,), float(meeting.rank + 1))
    quiet = operation.start(
        tensor,
        True,
        KIND_CODES["all_reduce"],
        DTYPE_CODES[torch.float32],
        0,
        4,
        -1,
        0,
        tensor.numel(),
        tensor.data_ptr(),
        tensor.data_ptr(),
        30.0,
    )
    assert quiet is not None
    deadline = time.monotonic() + 30
    while not operation.done(quiet) and time.monotonic() < deadline:
        group.progress()
        os.sched_yield()
    operation.wait(quiet)
    assert (tensor == 3).all()
    group.shutdown()


def test_a_quiet_operation_is_moved_along_by_whoever_passes() -> None:
    spawn_ranks(2, progress_by_poking)


# -- memory -------------------------------------------------------------------------------------


def allocate_and_free(meeting: Meeting) -> None:
    with meeting.new_group("shm") as group:
        heap = group._engine.shm._resources.segment.heap
        tensors = [group.allocate(n, torch.float64) for n in (1, 1000, 500_000)]
        views = [t[: t.numel() // 2] for t in tensors]
        assert heap.used >= 8 * 501_001
        for tensor in tensors:
            tensor.fill_(meeting.rank)
            group.all_reduce(tensor)
            assert (tensor == 1).all()
        half = views[2]  # a stretch of shared memory is reduced where it lies, too
        half.fill_(2)
        group.all_reduce(half)
        assert (tensors[2][:250_000] == 4).all()
        assert (tensors[2][250_000:] == 1).all()
        del tensors, views, tensor, half
        assert heap.used == 0
        assert group.allocate(0).numel() == 0
        with pytest.raises(MemoryError, match="no room"):
            group.allocate(1 << 60, torch.uint8)
        outlives = group.allocate(10_000)
        other = torch.ones(10_000)
        if meeting.rank == 0:  # one rank's tensor is shared, the other's is not
            outlives.fill_(1)
            group.all_reduce(outlives)
        else:
            group.all_reduce(other)
    outlives.fill_(7)
    assert outlives.sum() == 70_000


def test_allocated_memory_is_reduced_in_place_freed_and_outlives_the_group() -> None:
    spawn_ranks(2, allocate_and_free)


def gather_in_place(meeting: Meeting) -> None:
    rank, size, part = meeting.rank, meeting.size, 150_000
    with meeting.new_group("shm") as group:
        for flat in (torch.zeros(size * part), group.allocate(size * part)):
            own = flat[rank * part : (rank + 1) * part]
            own.fill_(rank)
            group.all_gather_single(flat, own)
            assert torch.equal(flat, torch.arange(size).repeat_interleave(part).float())
            out = group.allocate(part)
            group.reduce_scatter_single(out, flat)
            assert (out == rank * size).all()
            flat.fill_(rank)
            group.broadcast(flat, 1)
            flat[0] = -1  # the root may write at once; nobody still reads
            assert flat[1] == 1


def test_gathers_may_end_where_their_inputs_lie() -> None:
    spawn_ranks(3, gather_in_place)


# -- bad arguments ------------------------------------------------------------------------------


def call_wrongly(meeting: Meeting) -> list[str]:
    with meeting.new_group("shm") as group:
        one, two = torch.ones(1), torch.ones(2)
        wrong = [
            lambda: group.all_reduce("not a tensor"),  # type: ignore[arg-type]
            lambda: group.all_reduce(torch.ones(2, device="meta")),
            lambda: group.all_reduce(torch.ones(2), ReduceOp.BAND),
            lambda: group.all_reduce(torch.ones(1).expand(4)),
            lambda: group.broadcast(one, 2),
            lambda: group.reduce(one, -1),
            lambda: group.all_gather([one], one),
            lambda: group.all_gather([two, two], one),
            lambda: group.all_gather([one, torch.ones(1, dtype=torch.int32)], one),
            lambda: group.all_gather_single(torch.ones(3), one),
            lambda: group.gather([one], one, group.rank()),
            lambda: group.scatter(one, [one, one], 1 - group.rank()),
            lambda: group.reduce_scatter(two, [one, one]),
            lambda: group.reduce_scatter_single(two, torch.ones(3)),
            lambda: group.all_to_all([one, one], [one]),
            lambda: group.all_to_all_single(torch.ones(3), torch.ones(3)),
            lambda: group.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [1, 2]),
            lambda: group.send(one, group.rank()),
            lambda: group.send(one, 5),
            lambda: group.recv(one, 5),
            lambda: group.split([0, 0]),
            lambda: group.split([0, 5]),
            lambda: group.reconfigure([]),
        ]
        texts = []
        for call in wrong:
            with pytest.raises(CollectiveArgumentError) as caught:
                call()
            texts.append(str(caught.value))
        with pytest.raises(CollectiveTypeError):
            wrong[0]()
        with pytest.raises(TypeError, match="timeout"):
            group.barrier("soon")  # type: ignore[arg-type]
        total = torch.ones(3)
        group.all_reduce(total)  # nothing was sent, so the ranks are still in step
        assert total[0] == 2
        return texts


def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    for rank, texts in enumerate(spawn_ranks(2, call_wrongly)):
        for text in texts:
            assert text.startswith(f"rank {rank}: ")
            assert "expected" in text
            assert "got" in text


def open_too_many(meeting: Meeting) -> None:
    with pytest.raises(EngineUnavailableError, match="65 ranks"):
        from paceline import new_group

        new_group("shm", store=meeting.store(), rank=0, world_size=65)


def test_more_than_64_ranks_are_refused() -> None:
    spawn_ranks(1, open_too_many)


def fork_a_child(meeting: Meeting) -> None:
    with meeting.new_group("shm") as group:
        child = os.fork()
        if child == 0:
            try:
                group.barrier()
                os._exit(1)
            except RuntimeError:
                group.shutdown()
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, "a forked child is not this rank"
        total = torch.ones(100_000)
        group.all_reduce(total)
        assert total[0] == meeting.size


def test_a_forked_child_cannot_disturb_the_group() -> None:
    spawn_ranks(2, fork_a_child)


# -- extremes -----------------------------------------------------------------------------------


def be_one_of_many(meeting: Meeting) -> None:
    with meeting.new_group("shm") as group:
        for numel in (1, 5000, 100_000):
            tensor = torch.full((numel,), float(meeting.rank))
            group.all_reduce(tensor)
            assert (tensor == sum(range(meeting.size))).all()
        gathered = torch.empty(meeting.size)
        group.all_gather_single(gathered, torch.tensor([float(meeting.rank)]))
        assert torch.equal(gathered, torch.arange(float(meeting.size)))
        swapped = torch.empty(meeting.size)
        group.all_to_all_single(swapped, torch.full((meeting.size,), float(meeting.rank)))
        assert torch.equal(swapped, torch.arange(float(meeting.size)))


def test_64_ranks_work_on_one_host() -> None:
    spawn_ranks(64, be_one_of_many)


def reduce_gigabytes(meeting: Meeting, shared: bool) -> None:
    numel = 2**31 + 12_345  # more than 32 bits can count
    with meeting.new_group("shm") as group:
        tensor = (
            group.allocate(numel, torch.uint8) if shared else torch.empty(numel, dtype=torch.uint8)
        )
        tensor.fill_(meeting.rank + 1)
        tensor[-1] = 7
        group.all_reduce(tensor)
        assert tensor[-1] == 14
        assert tensor[0] == 3
        assert tensor[numel // 2] == 3
        assert tensor[2**31] == 3


@pytest.mark.parametrize("shared", [False, True], ids=["ordinary", "shared"])
def test_tensors_of_gigabytes_are_reduced(shared: bool) -> None:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 7 << 30:
        pytest.skip(f"needs 7 GiB of free memory, and there are {free / 2**30:.1f}")
    spawn_ranks(2, reduce_gigabytes, shared)
