"""Meshes and placements over our groups, inside compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from paceline import new_group
from paceline.compiled import UNAVAILABLE
from paceline.testing import Meeting, spawn_ranks

from . import rows

pytestmark = [
    pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch renames its functions
]


def mesh_of(rank: int, size: int, name: str) -> DeviceMesh:
    group = new_group("fake", store=HashStore(), rank=rank, world_size=size)
    group.register(name, default=True)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def test_a_mesh_of_another_size_compiles_again_and_is_told_apart() -> None:
    def tell(x: Tensor, mesh: DeviceMesh) -> Tensor:
        return x + mesh.size() + 10 * mesh.get_local_rank() + 100 * mesh.get_group().size()

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    function = torch.compile(tell, backend=counter, fullgraph=True)
    for rank, size in [(0, 4), (1, 8)]:
        mesh = mesh_of(rank, size, f"mesh_{rank}_{size}")
        try:
            assert torch.equal(function(torch.zeros(1), mesh), tell(torch.zeros(1), mesh))
        finally:
            dist.destroy_process_group()
    assert counter.frame_count == 2


def part_of_a_mesh(meeting: Meeting) -> bool:
    """Needs torch's way to open groups, since a mesh of two dimensions opens some itself."""
    store = dist.PrefixStore("parts", meeting.store())
    dist.init_process_group("paceline", store=store, rank=meeting.rank, world_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))

    def look(x: Tensor, mesh: DeviceMesh) -> Any:
        inner = mesh["inner"]
        y = x + inner.size() + 10 * mesh.size(0) + 100 * mesh.ndim + inner.get_local_rank()
        z = DTensor.from_local(y, inner, [Shard(0)]).redistribute(inner, [Replicate()])
        return z.to_local(), mesh.get_coordinate(), mesh.mesh_dim_names

    x = torch.arange(2.0) + 7 * meeting.rank
    function = torch.compile(look, backend="aot_eager", fullgraph=True)
    found = rows.same(function(x, mesh), look(x, mesh))
    dist.destroy_process_group()
    return found


def survives_a_break(meeting: Meeting, backend: str) -> bool:
    with meeting.new_group(backend) as group:
        group.register(default=True)
        mesh = DeviceMesh.from_group(group, "cpu")

        def reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
            y = x * 2
            dist.all_reduce(y, group=mesh.get_group())
            torch._dynamo.graph_break()
            return y + mesh.get_group().rank()

        x = torch.arange(2.0) + meeting.rank
        return torch.equal(torch.compile(reduce, backend="aot_eager")(x, mesh), reduce(x, mesh))


def on_two_processes(meeting: Meeting, backend: str) -> dict[str, Any]:
    found = {"part": part_of_a_mesh(meeting), "break": survives_a_break(meeting, backend)}
    return found | rows.measure_meshes(rows.of_paceline(meeting, backend))


@pytest.fixture(scope="module", params=["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def processes(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What two processes found, over a group of each backend."""
    return spawn_ranks(2, on_two_processes, request.param, deadline=300)


def test_every_row_about_meshes_is_one_graph_and_right(processes: list[dict[str, Any]]) -> None:
    for verdicts in processes:
        for title in rows.MESH_ROWS:
            assert verdicts[title] == f"{rows.ONE_GRAPH}, 1 compiled", title


def test_a_part_of_a_mesh_of_two_dimensions_is_used_in_one_graph(
    processes: list[dict[str, Any]],
) -> None:
    assert all(found["part"] for found in processes)


def test_a_mesh_made_of_a_group_survives_a_graph_break(processes: list[dict[str, Any]]) -> None:
    assert all(found["break"] for found in processes)
