"""Streams: what a rank computes beside the loop's stream neither spoils nor misses averages.

``busy`` keeps a stream occupied for a while, so that whoever forgets to wait reads old numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import Work

from paceline import DistributedDataParallel as DDP
from paceline._exchange.journey import FutureJourney
from paceline.optim import ZeroRedundancyOptimizer
from tests.ddp.toys import TINY, Grads, assert_same, fill, grads, stack, weights

from .scene import Scene, assert_close, on_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-14}
CYCLES = 20_000_000  # about 10 ms
STEPS = 4
VIEWS = pytest.mark.parametrize("views", [True, False], ids=["views", "no views"])


def busy() -> None:
    """Let the current stream do nothing for a while."""
    torch.cuda._sleep(CYCLES)


def model() -> nn.Sequential:
    return stack(3, 64, 64, 2)


def loss(scene: Scene, net: Any, rank: int, step: int) -> Tensor:
    return net(scene.data(4, 3, seed=10 * step + rank)).square().mean()


def expected(scene: Scene, step: int) -> Grads:
    found = scene.mean_grads(model(), lambda m, rank: loss(scene, m, rank, step))
    scene.wait()
    return found


def wrapped(scene: Scene, **keywords: Any) -> DDP:
    own = scene.place(model())
    return DDP(own, process_group=scene.group, **{"bucket_cap_mb": TINY, **keywords})


@on_ranks(cuda=True)
@VIEWS
def test_a_loop_on_a_stream_of_its_own_gets_the_averages(scene: Scene, views: bool) -> None:
    ddp = wrapped(scene, gradient_as_bucket_view=views)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for step in range(STEPS):
        goal = expected(scene, step)
        with torch.cuda.stream(stream):
            busy()
            ddp.zero_grad(set_to_none=step % 2 == 0)
            loss(scene, ddp, scene.rank, step).backward()
            found = grads(ddp)  # copied in the loop's stream, without waiting on the host
        stream.synchronize()
        assert_same(found, goal, **EXACT)


@on_ranks(cuda=True)
@VIEWS
def test_streams_may_change_from_step_to_step(scene: Scene, views: bool) -> None:
    ddp = wrapped(scene, gradient_as_bucket_view=views)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for step in range(6):
        goal = expected(scene, step)
        stream, before = streams[step % 2], streams[(step + 1) % 2]
        stream.wait_stream(before)
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            busy()
            ddp.zero_grad()
            loss(scene, ddp, scene.rank, step).backward()
            found = grads(ddp)
        stream.synchronize()
        assert_same(found, goal, **EXACT)


@on_ranks(cuda=True)
@VIEWS
def test_a_backward_on_another_stream_than_its_forward_is_averaged(
    scene: Scene, views: bool
) -> None:
    ddp = wrapped(scene, gradient_as_bucket_view=views)
    side = torch.cuda.Stream()
    for step in range(STEPS):
        goal = expected(scene, step)
        ddp.zero_grad()
        busy()
        value = loss(scene, ddp, scene.rank, step)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            value.backward()
            found = grads(ddp)
        side.synchronize()
        assert_same(found, goal, **EXACT)
        torch.cuda.current_stream().wait_stream(side)


@on_ranks(cuda=True)
def test_inputs_that_a_side_stream_still_makes_are_waited_for(scene: Scene) -> None:
    ddp = wrapped(scene)
    side = torch.cuda.Stream()
    for step in range(STEPS):
        goal = expected(scene, step)
        source = scene.data(4, 3, seed=10 * step + scene.rank)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            busy()
            x = source * 1.0
        torch.cuda.current_stream().wait_stream(side)
        x.record_stream(torch.cuda.current_stream())
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        del x
        assert_same(grads(ddp), goal, **EXACT)


@on_ranks(cuda=True)
@VIEWS
def test_a_side_stream_that_waits_for_the_loop_reads_averages(scene: Scene, views: bool) -> None:
    ddp = wrapped(scene, gradient_as_bucket_view=views)
    side = torch.cuda.Stream()
    for step in range(STEPS):
        goal = expected(scene, step)
        ddp.zero_grad()
        busy()
        loss(scene, ddp, scene.rank, step).backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = grads(ddp)
        side.synchronize()
        assert_same(found, goal, **EXACT)
        torch.cuda.current_stream().wait_stream(side)


class TwoStreams(nn.Module):
    """Two branches, one of them on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = stack(3, 32, 2), stack(3, 32, 2, seed=1)
        self.streams = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.streams:
            return self.left(x) + self.right(x)
        side, now = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(now)
        x.record_stream(side)
        with torch.cuda.stream(side):
            busy()
            right = self.right(x)
        left = self.left(x)
        now.wait_stream(side)
        right.record_stream(now)
        return left + right


@on_ranks(cuda=True)
@VIEWS
def test_a_model_that_computes_on_two_streams_is_averaged(scene: Scene, views: bool) -> None:
    own = scene.place(TwoStreams())
    own.streams = True
    ddp = DDP(own, process_group=scene.group, bucket_cap_mb=TINY, gradient_as_bucket_view=views)
    for step in range(STEPS):
        goal = scene.mean_grads(TwoStreams(), lambda m, r, s=step: loss(scene, m, r, s))
        scene.wait()
        ddp.zero_grad()
        loss(scene, ddp, scene.rank, step).backward()
        assert_same(grads(ddp), goal, **EXACT)


class Late(torch.autograd.Function):
    """Passes its input on; the gradient takes a while on the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        busy()
        return grad * 1.0


class LateBranch(nn.Module):
    """Two branches on two streams; autograd hands the slow one's gradients over first."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = stack(3, 64)
        self.fast, self.slow = stack(64, 64, seed=1), stack(64, 64, seed=2)
        self.streams = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        if not self.streams:
            return self.fast(x) + self.slow(x)
        side, now = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(now)
        with torch.cuda.stream(side):
            fast = self.fast(x)
        slow = Late.apply(self.slow(x))
        now.wait_stream(side)
        return fast + slow


@on_ranks(cuda=True)
@VIEWS
@pytest.mark.parametrize("later", [False, True], ids=["", "later"])
def test_a_bucket_waits_for_gradients_of_other_streams(
    scene: Scene, views: bool, later: bool
) -> None:
    """``later``: the model takes to its streams when the order of gradients is known."""
    own = scene.place(LateBranch())
    cap = 2 * (64 * 64 + 64) * 8 / 2**20  # both branches in one bucket, the trunk in the next
    ddp = DDP(own, process_group=scene.group, bucket_cap_mb=cap, gradient_as_bucket_view=views)
    for step in range(2 + STEPS):
        own.streams = not later or step > 1
        goal = scene.mean_grads(LateBranch(), lambda m, r, s=step: loss(scene, m, r, s))
        scene.wait()
        ddp.zero_grad()
        loss(scene, ddp, scene.rank, step).backward()
        if not later or step > 2:  # the first such pass is not foreseen
            assert_same(grads(ddp), goal, **EXACT)
        scene.wait()


@on_ranks(cuda=True)
def test_gradients_are_not_freed_while_the_stream_of_the_backward_reads_them(scene: Scene) -> None:
    ddp = wrapped(scene)
    ahead, behind = torch.cuda.Stream(), torch.cuda.Stream()
    for step in range(STEPS):
        goal = expected(scene, step)
        ahead.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(ahead):
            ddp.zero_grad()
            value = loss(scene, ddp, scene.rank, step)
        behind.wait_stream(ahead)
        with torch.cuda.stream(behind):
            busy()
            value.backward()
            found = grads(ddp)
        with torch.cuda.stream(ahead):
            for shape in ((64, 64), (64, 3), (2, 64), (64,), (2,)):
                for _ in range(4):
                    torch.empty(shape, device=scene.device, dtype=torch.float64).fill_(77.0)
        behind.synchronize()
        assert_same(found, goal, **EXACT)
        scene.wait()


@on_ranks(cuda=True)
def test_what_is_done_with_the_future_of_a_codec_comes_behind_its_decoding(scene: Scene) -> None:
    buffer = torch.zeros(1 << 16, device=scene.device)

    def steps() -> Iterator[Sequence[Work]]:
        yield ()
        busy()
        buffer.fill_(1.0)

    journey = FutureJourney(steps(), buffer)
    read = journey.future.then(lambda future: future.value().clone())
    journey.wait()
    journey.end(None)
    assert_close(read.wait(), torch.ones_like(buffer))


@on_ranks(cuda=True)
@pytest.mark.parametrize("lazy", [False, True], ids=["", "lazy"])
def test_memory_that_is_used_again_at_once_does_not_spoil_an_average(
    scene: Scene, lazy: bool
) -> None:
    """Freed gradients and inputs are handed out anew while the exchange may still read them."""

    def spoil() -> None:
        for shape in ((64, 64), (64, 3), (2, 64), (64,), (64 * 64 + 64,), (4, 64)):
            for _ in range(4):
                torch.empty(shape, device=scene.device, dtype=torch.float64).fill_(float("nan"))

    ddp = wrapped(scene, lazy_bucket_allocation=lazy, gradient_as_bucket_view=not lazy)
    side = torch.cuda.Stream()
    for step in range(8):
        goal = expected(scene, step)
        ddp.zero_grad()
        if scene.rank == 0:
            busy()  # the others' exchange waits on the device while they go on
        loss(scene, ddp, scene.rank, step).backward()
        found = grads(ddp)
        ddp.zero_grad()
        spoil()
        with torch.cuda.stream(side):
            spoil()
        assert_same(found, goal, **EXACT)


@on_ranks(cuda=True)
def test_averages_waited_for_by_hand_belong_to_the_stream_that_waits(scene: Scene) -> None:
    ddp = wrapped(scene)
    ddp.require_manual_backward_finalization = True
    side = torch.cuda.Stream()
    for step in range(STEPS):
        goal = expected(scene, step)
        ddp.zero_grad()
        if scene.rank == 0:
            busy()
        loss(scene, ddp, scene.rank, step).backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ddp.finalize_backward()
            found = grads(ddp)
        side.synchronize()
        assert_same(found, goal, **EXACT)
        torch.cuda.current_stream().wait_stream(side)


@on_ranks(cuda=True)
def test_a_sharded_optimizer_on_a_stream_of_its_own_steps_as_one_process(scene: Scene) -> None:
    ddp = wrapped(scene)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, ddp=ddp, lr=0.05)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(STEPS):
            busy()
            zero.zero_grad()
            loss(scene, ddp, scene.rank, step).backward()
            zero.step()
        found = weights(ddp)
    stream.synchronize()

    def alone(net: Any, rank: int, step: int) -> Tensor:
        return loss(scene, net, rank, step)

    goal = scene.trained_alone(model(), lambda p: torch.optim.AdamW(p, lr=0.05), alone, STEPS)
    assert_same(found, goal, rtol=1e-9, atol=1e-11)


# Users with CUDA graphs of their own.


@on_ranks(cuda=True, deadline=120)
def test_a_part_of_the_model_in_a_cuda_graph_is_averaged(scene: Scene) -> None:
    """As torch's page on CUDA graphs has it: the part is captured before the wrapper is made."""
    own = scene.place(model())
    sample = scene.data(4, 64).requires_grad_()
    own[2] = torch.cuda.make_graphed_callables(own[2], (sample,))
    ddp = DDP(own, process_group=scene.group, bucket_cap_mb=TINY)
    for step in range(STEPS):
        goal = expected(scene, step)
        ddp.zero_grad()
        loss(scene, ddp, scene.rank, step).backward()
        assert_same(grads(ddp), goal, **EXACT)


@on_ranks(cuda=True, deadline=120)
def test_an_optimizer_step_in_a_cuda_graph_takes_averages(scene: Scene) -> None:
    """Gradients stay where they are, so a graph that was captured once reads every average."""
    ddp = wrapped(scene, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05, capturable=True)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    for step in range(6):
        ddp.zero_grad(set_to_none=False)
        loss(scene, ddp, scene.rank, step).backward()
        if step < 3:  # until buckets are where they stay
            optimizer.step()
        elif step == 3:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.graph(graph, stream=side):
                optimizer.step()
            graph.replay()  # capturing ran nothing
        else:
            graph.replay()
    found = weights(ddp)
    scene.assert_same_bits(found)

    def alone(net: Any, rank: int, step: int) -> Tensor:
        return loss(scene, net, rank, step)

    goal = scene.trained_alone(
        model(), lambda p: torch.optim.AdamW(p, lr=0.05, capturable=True), alone, 6
    )
    assert_same(found, goal, rtol=1e-9, atol=1e-11)


@on_ranks(cuda=True, deadline=120)
def test_a_collective_of_ours_in_a_cuda_graph_sums_at_every_replay(scene: Scene) -> None:
    if scene.machine.backend != "nccl":
        pytest.skip("only NCCL's kernels can be captured")
    buffer = torch.zeros(1024, device=scene.device)
    scene.group.all_reduce(buffer)  # the communicator is there before the capture
    scene.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scene.group.all_reduce(buffer)
    for number in range(3):
        buffer.fill_(scene.rank + number)
        graph.replay()
        total = sum(rank + number for rank in range(scene.size))
        assert_close(buffer, torch.full_like(buffer, total))


@on_ranks(cuda=True)
def test_collectives_on_several_streams_at_once_give_their_sums(scene: Scene) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    buffers = [torch.full((1 << 18,), float(i + scene.rank), device=scene.device) for i in range(3)]
    scene.wait()
    works = []
    for number, (stream, buffer) in enumerate(zip(streams, buffers, strict=True)):
        with torch.cuda.stream(stream):
            if (number + scene.rank) % 2:
                busy()
            works.append(scene.group.all_reduce(buffer, async_op=True))
    for number, (stream, buffer, work) in enumerate(zip(streams, buffers, works, strict=True)):
        with torch.cuda.stream(stream):
            work.wait()
            total = sum(number + rank for rank in range(scene.size))
            assert_close(buffer, torch.full_like(buffer, total))


@on_ranks(cuda=True)
def test_a_tensor_that_is_dropped_in_flight_is_not_handed_out(scene: Scene) -> None:
    """The group holds on to what it works on until the work is done."""
    for _ in range(10):
        if scene.rank == 0:
            busy()
        ones = torch.ones(1 << 16, device=scene.device)
        result = torch.empty((scene.size, 1 << 16), device=scene.device)
        work = scene.group.all_gather(list(result.unbind()), ones, async_op=True)
        del ones
        for _ in range(4):
            torch.empty(1 << 16, device=scene.device).fill_(-1.0)
        work.wait()
        assert_close(result, torch.ones_like(result))


@on_ranks(cuda=True)
def test_broadcast_buffers_follow_the_stream_of_the_loop(scene: Scene) -> None:
    own = scene.place(
        nn.Sequential(fill(nn.Linear(3, 4)), nn.BatchNorm1d(4), fill(nn.Linear(4, 2)))
    )
    ddp = DDP(own, process_group=scene.group)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(STEPS):
            busy()
            x = scene.data(4, 3, seed=10 * step + scene.rank, dtype=torch.float32)
            ddp(x).square().mean().backward()
        ddp(scene.data(4, 3, dtype=torch.float32))  # begins with rank 0's buffers
    stream.synchronize()
    scene.assert_same_bits([own[1].running_mean, own[1].running_var])
