"""Objects in compiled code on two processes: the rows of ``rows.py``, and all collectives.

There is one launch for everything, over shm; the same over gloo is slow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from paceline import Group
from paceline.compiled import UNAVAILABLE
from paceline.testing import Meeting, spawn_ranks
from tests.marks import SHM

from . import rows
from .marks import needs_compiler

pytestmark = [
    pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch renames its functions
]
Found = list[dict[str, Any]]


# -- all collectives ------------------------------------------------------------------------------


def every_collective(x: Tensor, group: Group) -> list[Tensor]:
    """Each collective once, each result in the list."""
    n, me = group.size(), group.rank()
    flat = torch.cat([x + r for r in range(n)])
    made = [x.clone() for _ in range(6)]
    group.all_reduce(made[0], ReduceOp.AVG)
    group.all_reduce(made[1], ReduceOp.MAX, timeout=20.0)
    group.reduce(made[2], 0)
    group.broadcast(made[3], 1)
    group.all_reduce_coalesced(made[4:6]).wait()
    gathered, scattered = x.new_empty(n * x.numel()), torch.empty_like(x)
    group.all_gather_single(gathered, x)
    group.reduce_scatter_single(scattered, flat)
    lists = [torch.empty_like(x) for _ in range(n)]
    group.all_gather(lists, x)
    reduced = torch.empty_like(x)
    group.reduce_scatter(reduced, [x + r for r in range(n)])
    swapped = torch.empty_like(flat)
    group.all_to_all_single(swapped, flat)
    split = torch.empty_like(flat)
    sizes = [x.numel()] * n
    group.all_to_all_single(split, flat, sizes, sizes)
    each = [torch.empty_like(x) for _ in range(n)]
    group.all_to_all(each, [x + r for r in range(n)])
    roots = [torch.empty_like(x) for _ in range(n)] if me == 0 else []
    group.gather(roots, x, 0)
    taken = torch.empty_like(x)
    group.scatter(taken, [x + r for r in range(n)] if me == 0 else [], 0)
    group.barrier()
    passed = torch.empty_like(x)
    if me == 0:
        group.send(x, 1)
    elif me == 1:
        group.recv(passed, 0)
    return [*made, gathered, scattered, *lists, reduced, swapped, split, *each, *roots, taken] + (
        [passed] if me == 1 else []
    )


def collectives_twice(group: Group) -> bool:
    calls = rows.heard(group)
    x = torch.arange(3.0) + 10 * group.rank()
    eager, wanted = every_collective(x, group), list(calls)
    calls.clear()
    got = torch.compile(every_collective, backend="aot_eager", fullgraph=True)(x, group)
    return len(eager) == len(got) and all(map(torch.equal, eager, got)) and calls == wanted


def overlapped(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    first, second = x * 2, x * 3
    works = [group.all_reduce(t, async_op=True) for t in (first, second)]
    z = x.cos()
    works[1].wait()
    works[0].wait()
    return first + z, second


def overlap(group: Group, compiler: str = "aot_eager") -> bool:
    x = torch.arange(4.0) + group.rank()
    function = torch.compile(overlapped, backend=compiler, fullgraph=True)
    return all(map(torch.allclose, function(x, group), overlapped(x, group)))


class Averaged(torch.autograd.Function):
    """Identity whose gradient is averaged over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        ctx.group.all_reduce(grad, ReduceOp.AVG, async_op=True).wait()
        return grad, None


def averaged_gradients(group: Group) -> bool:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 0.5)
    x = torch.arange(8.0).view(2, 4) + group.rank()

    def loss(x: Tensor) -> Tensor:
        return Averaged.apply(model(x), group).square().sum()

    found = []
    for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        call(x).backward()
        found.append(model.weight.grad.clone())  # type: ignore[union-attr]
    return torch.equal(*found)


def collectives(meeting: Meeting, backend: str) -> dict[str, bool]:
    with meeting.new_group(backend) as group:
        ways = (collectives_twice, overlap, averaged_gradients)
        return {way.__name__: way(group) for way in ways}


# -- meshes ---------------------------------------------------------------------------------------


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


# -- on two processes -----------------------------------------------------------------------------


def objects(meeting: Meeting, backend: str) -> dict[str, Any]:
    """Everything about objects that two processes can find out."""
    found: dict[str, Any] = collectives(meeting, backend)
    found["part"] = part_of_a_mesh(meeting)
    found["break"] = survives_a_break(meeting, backend)
    world = rows.of_paceline(meeting, backend)
    found |= rows.measure_groups(world) | rows.measure_meshes(world) | rows.measure_across(world)
    return found


OVER_GLOO = pytest.param("gloo", marks=pytest.mark.slow if SHM.available else ())


@pytest.fixture(scope="module", params=["shm", OVER_GLOO])
def found(request: pytest.FixtureRequest) -> Found:
    """What two processes found, over groups of each backend."""
    return spawn_ranks(2, objects, request.param)


@pytest.mark.parametrize("way", ["collectives_twice", "overlap", "averaged_gradients"])
def test_collectives_in_a_graph_do_what_they_do_in_eager_mode(found: Found, way: str) -> None:
    assert all(verdicts[way] for verdicts in found)


ONCE_EACH = {  # where groups are compared or looked up
    "a group as a dictionary key",
    "functional collective",
    "`g == h`, `g is h`",
    "`dist.batch_isend_irecv`, with torch's switch for it",
}
ONCE = {"the default group, its rank and size"}
newer = pytest.mark.skipif(torch.__version__ < "2.13", reason="2.11 and 2.12 share less")


@newer
def test_every_row_about_groups_is_one_graph_and_right_for_each_group(found: Found) -> None:
    for verdicts in found:
        for title in rows.about_groups():
            times = 3 if title in ONCE_EACH else 1 if title in ONCE else 2
            assert verdicts[title] == f"{rows.ONE_GRAPH}, {times} compiled", title


@newer
def test_every_row_about_meshes_is_one_graph_and_right(found: Found) -> None:
    for verdicts in found:
        for title in rows.MESH_ROWS:
            assert verdicts[title] == f"{rows.ONE_GRAPH}, 1 compiled", title


@newer
def test_what_was_made_before_a_graph_break_is_right_behind_it(found: Found) -> None:
    for verdicts in found:
        for title in (*rows.GROUPS_ACROSS, *rows.MESHES_ACROSS):
            assert verdicts[title].startswith(rows.RIGHT), title


def test_a_part_of_a_mesh_of_two_dimensions_is_used_in_one_graph(found: Found) -> None:
    assert all(verdicts["part"] for verdicts in found)


def test_a_mesh_made_of_a_group_survives_a_graph_break(found: Found) -> None:
    assert all(verdicts["break"] for verdicts in found)


# -- with Inductor --------------------------------------------------------------------------------


def overlap_by_inductor(meeting: Meeting, backend: str) -> bool:
    with meeting.new_group(backend) as group:
        return overlap(group, "inductor")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_inductor_keeps_started_collectives_right(backend: str) -> None:
    assert spawn_ranks(2, overlap_by_inductor, backend) == [True, True]
