"""Who waits for a call that has something to do at its end: each stream that waits gets the result.

``busy`` keeps a stream occupied for a while, so that whoever forgets to wait reads old numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Work

from paceline import ReduceOp

from .scene import Scene, assert_close, on_ranks
from .test_streams import busy

SIZE = 1 << 16
LONG = 60.0  # seconds: nothing here takes so long unless it hangs
# A call, where its result will be, what that is, and what the caller gave, which is its to keep.
Started = tuple[Work, Tensor, Tensor, object]


def _zeros(scene: Scene, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, device=scene.device, dtype=dtype)


def _gather(scene: Scene) -> Started:
    """Every rank is the root once, so that each has a result."""
    room = _zeros(scene, scene.size, SIZE)
    own = torch.full((SIZE,), float(scene.rank + 1), device=scene.device)
    works = [
        scene.group.gather(list(room.unbind()) if here else None, own, root, async_op=True)
        for root in range(scene.size)
        for here in [scene.rank == root]
    ]
    goal = torch.arange(1.0, scene.size + 1).unsqueeze(1).expand(-1, SIZE)
    return works[scene.rank], room, goal, (own, works)


def _scatter(scene: Scene) -> Started:
    out = _zeros(scene, SIZE)
    parts = [torch.full((SIZE,), float(r + 5), device=scene.device) for r in range(scene.size)]
    work = scene.group.scatter(out, parts if scene.rank == 0 else None, 0, async_op=True)
    return work, out, torch.full((SIZE,), scene.rank + 5.0), parts


def _reduce_scatter(scene: Scene) -> Started:
    out = _zeros(scene, SIZE)
    parts = [torch.full((SIZE,), float(r + 1), device=scene.device) for r in range(scene.size)]
    work = scene.group.reduce_scatter(out, parts, async_op=True)
    return work, out, torch.full((SIZE,), float(scene.size * (scene.rank + 1))), parts


def _all_gather(scene: Scene) -> Started:
    room = _zeros(scene, scene.size, SIZE)
    own = torch.full((SIZE,), float(scene.rank + 1), device=scene.device)
    work = scene.group.all_gather(list(room.unbind()), own, async_op=True)
    goal = torch.arange(1.0, scene.size + 1).unsqueeze(1).expand(-1, SIZE)
    return work, room, goal, own


def _strided(scene: Scene) -> Started:
    columns = _zeros(scene, SIZE, 2)[:, 0]
    columns.fill_(scene.rank + 1)
    return scene.group.all_reduce(columns, async_op=True), columns, _total(scene), ()


def _integers(scene: Scene) -> Started:
    tensor = torch.full((SIZE,), 10 * scene.rank, device=scene.device, dtype=torch.int32)
    work = scene.group.all_reduce(tensor, ReduceOp.AVG, async_op=True)
    mean = sum(10 * r for r in range(scene.size)) // scene.size
    return work, tensor, torch.full((SIZE,), mean, dtype=torch.int32), ()


def _coalesced(scene: Scene) -> Started:
    first = _zeros(scene, SIZE, 2)[:, 0]
    first.fill_(scene.rank + 1)
    second = _zeros(scene, 8)
    work = scene.group.all_reduce_coalesced([first, second])
    return work, first, _total(scene), second


def _scaled(scene: Scene) -> Started:
    out = _zeros(scene, SIZE)
    given = torch.full((scene.size * SIZE,), float(scene.rank + 1), device=scene.device)
    twice: Any = torch.distributed._make_nccl_premul_sum(2.0)
    work = scene.group.reduce_scatter_single(out, given, twice, async_op=True)
    return work, out, 2 * _total(scene), given


def _total(scene: Scene) -> Tensor:
    return torch.full((SIZE,), sum(rank + 1.0 for rank in range(scene.size)))


STARTS: dict[str, Callable[[Scene], Started]] = {
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "strided": _strided,
    "integers": _integers,
    "coalesced": _coalesced,
    "scaled": _scaled,
}
KINDS = pytest.mark.parametrize("kind", STARTS)


def read(scene: Scene, result: Tensor, goal: Tensor, stream: torch.cuda.Stream) -> None:
    """Compare on the host what ``stream`` sees now."""
    with torch.cuda.stream(stream):
        seen = result.clone()
    stream.synchronize()
    assert_close(seen.cpu(), goal)
    scene.wait()


@on_ranks(cuda=True)
@KINDS
def test_each_stream_that_waits_sees_the_result(scene: Scene, kind: str) -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    work, result, goal, _kept = STARTS[kind](scene)
    with torch.cuda.stream(first):
        busy()
        work.wait()  # what there is to do at the end comes after that
    with torch.cuda.stream(second):
        work.wait()
    read(scene, result, goal, second)


@on_ranks(cuda=True)
@KINDS
def test_a_stream_that_waits_for_the_future_sees_the_result(scene: Scene, kind: str) -> None:
    own = torch.cuda.Stream()
    work, result, goal, _kept = STARTS[kind](scene)
    busy()  # on the stream on which another thread waits
    with torch.cuda.stream(own):
        work.get_future().wait()
    read(scene, result, goal, own)


@on_ranks(cuda=True)
@KINDS
def test_the_result_is_there_when_a_work_says_that_it_is_completed(scene: Scene, kind: str) -> None:
    asking, own = torch.cuda.Stream(), torch.cuda.Stream()
    work, result, goal, _kept = STARTS[kind](scene)
    until = time.monotonic() + LONG
    with torch.cuda.stream(asking):
        busy()
        while not work.is_completed():
            assert time.monotonic() < until
    read(scene, result, goal, own)  # which waits for nothing


@on_ranks(cuda=True)
@KINDS
def test_memory_of_ours_is_not_handed_out_while_another_stream_uses_it(
    scene: Scene, kind: str
) -> None:
    starting, waiting = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(starting):
            work, result, goal, _kept = STARTS[kind](scene)
        with torch.cuda.stream(waiting):
            busy()
            work.wait()
        del work  # and with it what we made
        with torch.cuda.stream(starting):
            for numel in (SIZE, 2 * SIZE, scene.size * SIZE, 2 * scene.size * SIZE):
                for dtype in (torch.float32, torch.int32, torch.int64):
                    for _ in range(3):
                        torch.empty(numel, device=scene.device, dtype=dtype).fill_(77)
        read(scene, result, goal, waiting)
        starting.synchronize()


@on_ranks(cuda=True)
def test_a_call_with_an_end_of_ours_in_a_cuda_graph_is_right_at_every_replay(scene: Scene) -> None:
    if scene.machine.backend != "nccl":
        pytest.skip("only NCCL's kernels can be captured")
    columns = _zeros(scene, SIZE, 2)[:, 0]
    scene.group.all_reduce(columns)  # the communicator is there before the capture
    scene.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = scene.group.all_reduce(columns, async_op=True)
        work.wait()
        work.wait()
    for number in range(3):
        columns.fill_(scene.rank + number)
        graph.replay()
        total = sum(rank + number for rank in range(scene.size))
        assert_close(columns, torch.full_like(columns, total))
    scene.wait()
