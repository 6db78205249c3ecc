"""Groups on a device: every collective, against plain torch on all ranks' inputs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed import ReduceOp, Work

from tests.groups import reference

from .scene import Scene, assert_close, on_ranks

# NCCL has no tags, no receiving from anybody, and sums no sparse tensors.
NOT_NCCL = {"transfers", "sparse_all_reduce"}


def _end(form: reference.Form, work: Work) -> None:
    """On a device waiting is for the stream; the host comes to it when the device is done."""
    assert work.wait()
    torch.cuda.synchronize()
    assert work.is_completed()


@on_ranks
@pytest.mark.parametrize("name", reference.CHECKS)
def test_a_collective_gives_what_it_must(scene: Scene, name: str) -> None:
    if scene.machine.backend == "nccl" and name in NOT_NCCL:
        pytest.skip("NCCL has nothing like it")
    if scene.on_gpu:
        with torch.device(scene.device), mock.patch.object(reference.Form, "end", _end):
            reference.check_all_collectives(scene.group, only=[name])
    else:
        reference.check_all_collectives(scene.group, only=[name])


@on_ranks
def test_messages_go_round_the_ring(scene: Scene) -> None:
    onward, back = (scene.rank + 1) % scene.size, (scene.rank - 1) % scene.size
    for step in range(3):
        out = scene.data(50, seed=10 * step + scene.rank)
        room = torch.zeros_like(out)
        first, second = (scene.group.send, scene.group.recv), (scene.group.recv, scene.group.send)
        for call in first if scene.rank % 2 == 0 else second:
            if call == scene.group.send:
                call(out, onward)
            else:
                call(room, back)
        assert_close(room, scene.data(50, seed=10 * step + back), rtol=0, atol=0)


@on_ranks
def test_halves_of_the_ranks_have_groups_of_their_own(scene: Scene) -> None:
    half = scene.size // 2
    mine = list(range(half)) if scene.rank < half else list(range(half, scene.size))
    with scene.new_group() as world:
        part = world.split(mine)
        assert part is not None
        numbers = torch.full((4,), float(scene.rank), device=scene.device)
        part.all_reduce(numbers, ReduceOp.SUM)
        assert numbers.tolist() == [float(sum(mine))] * 4
        world.all_reduce(numbers)  # both still work
        total = half * sum(range(half)) + (scene.size - half) * sum(range(half, scene.size))
        assert numbers.tolist() == [float(total)] * 4
        scene.wait()
        part.shutdown()


@on_ranks
def test_many_groups_come_and_go(scene: Scene) -> None:
    for number in range(5):
        with scene.new_group() as group:
            ones = torch.full((3,), float(number), device=scene.device)
            group.all_reduce(ones)
            assert ones.tolist() == [float(number * scene.size)] * 3
