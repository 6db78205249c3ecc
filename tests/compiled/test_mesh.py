"""Meshes and placements over our groups, inside compiled code."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline import new_group
from paceline.compiled import UNAVAILABLE

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
