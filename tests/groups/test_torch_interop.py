"""Everything in torch that takes a group takes ours."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline import Group
from paceline.errors import PeerDiedError, RendezvousError
from paceline.testing import Meeting, spawn_ranks
from tests.marks import USUAL

BACKENDS = ["shm", "gloo"]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch renames its functions


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 4)).double()


def batch(rank: int) -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(rank)).double()


def expected_gradients(size: int) -> list[Tensor]:
    whole = model()
    for rank in range(size):
        (whole(batch(rank)).square().mean() / size).backward()
    return [p.grad for p in whole.parameters() if p.grad is not None]


# -- stock DistributedDataParallel --------------------------------------------------------------


def train_with_stock_ddp(meeting: Meeting, backend: str) -> list[Tensor]:
    with meeting.new_group(backend) as group:
        wrapped = DistributedDataParallel(model(), process_group=group)
        wrapped(batch(meeting.rank)).square().mean().backward()
        return [p.grad for p in wrapped.parameters() if p.grad is not None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_stock_ddp_averages_over_a_group_that_is_not_registered(backend: str) -> None:
    expected = expected_gradients(3)
    results = spawn_ranks(3, train_with_stock_ddp, backend)
    for gradients in results:
        torch.testing.assert_close(gradients, expected)
    for gradients in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, results[0], strict=True))


def lose_a_rank_in_backward(meeting: Meeting) -> str:
    import os
    import signal

    group = meeting.new_group("shm")
    wrapped = DistributedDataParallel(model(), process_group=group)
    loss = wrapped(batch(meeting.rank)).square().mean()
    if meeting.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    with pytest.raises(PeerDiedError):
        group.barrier()
    return str(caught.value)


def test_a_rank_that_dies_in_backward_is_named_through_stock_ddp() -> None:
    assert "rank 1 died" in spawn_ranks(2, lose_a_rank_in_backward, may_die=[1])[0]


# -- registered groups --------------------------------------------------------------------------


@contextmanager
def registered(meeting: Meeting, backend: str) -> Generator[Group, None, None]:
    with meeting.new_group(backend) as group:
        yield group.register(default=True)
    assert not dist.is_initialized()


def use_torchs_functions(meeting: Meeting, backend: str) -> None:
    rank, size = meeting.rank, meeting.size
    with registered(meeting, backend) as group:
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [sum(range(size))] * 3
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
        work.wait()
        listed = [torch.empty(2) for _ in range(size)]
        dist.all_gather(listed, torch.full((2,), float(rank)), group=group)
        assert [t[0].item() for t in listed] == list(range(size))
        flat = torch.empty(2 * size)
        dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)))
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, flat)
        assert part.tolist() == [rank * size] * 2
        swapped = torch.empty(size)
        dist.all_to_all_single(swapped, torch.arange(float(size)) + 10 * rank)
        assert swapped.tolist() == [10 * r + rank for r in range(size)]
        pieces = [torch.tensor([float(r)]) for r in range(size)] if rank == 0 else None
        mine = torch.empty(1)
        dist.scatter(mine, pieces, src=0)
        assert mine.item() == rank
        gathered = [torch.empty(1) for _ in range(size)] if rank == 1 else None
        dist.gather(mine, gathered, dst=1)
        dist.reduce(mine, dst=0)
        objects: list[object] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": r} for r in range(size)]
        dist.barrier()
        got = torch.empty(4)
        operations = [
            dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % size),
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert got[0] == (rank - 1) % size
        half = dist.new_group([0, 1], backend="paceline")
        if rank < 2:
            dist.all_reduce(got, group=half)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_functions_take_a_registered_group(backend: str) -> None:
    spawn_ranks(3, use_torchs_functions, backend)


def use_functional_collectives(meeting: Meeting, backend: str, compiled: bool) -> None:
    rank, size = meeting.rank, meeting.size
    with registered(meeting, backend) as group:

        def step(x: Tensor) -> tuple[Tensor, ...]:
            total = functional.all_reduce(x, "sum", group)
            gathered = functional.all_gather_tensor(x, 0, group)
            part = functional.reduce_scatter_tensor(gathered, "avg", 0, group)
            swapped = functional.all_to_all_single(gathered, None, None, group)
            cast = functional.broadcast(x, 1, group)
            return total + 0, gathered + 0, part + 0, swapped + 0, cast + 0

        run: Callable[[Tensor], tuple[Tensor, ...]] = (
            torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
        )
        total, gathered, part, swapped, cast = run(torch.full((2,), float(rank)))
        assert total.tolist() == [sum(range(size))] * 2
        assert gathered.tolist() == [r for r in range(size) for _ in range(2)]
        assert part.tolist() == [float(rank)] * 2
        assert swapped.tolist() == [float(rank)] * (2 * size)
        assert cast.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_functional_collectives_take_a_registered_group(backend: str, compiled: bool) -> None:
    spawn_ranks(2, use_functional_collectives, backend, compiled)


def use_dtensor(meeting: Meeting, backend: str) -> None:
    with registered(meeting, backend) as group:
        mesh = DeviceMesh.from_group(group, "cpu")
        whole = torch.arange(12.0).view(6, 2)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
        assert torch.equal((sharded @ sharded.t()).full_tensor(), whole @ whole.t())


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtensor_and_device_mesh_take_a_registered_group(backend: str) -> None:
    spawn_ranks(2, use_dtensor, backend)


def shard_a_model(meeting: Meeting, backend: str, allocate: bool) -> list[Tensor]:
    with registered(meeting, backend) as group:
        sharded = model()
        fully_shard(sharded, mesh=DeviceMesh.from_group(group, "cpu"))
        if allocate:
            sharded.set_allocate_memory_from_process_group_for_comm(True)
        sharded(batch(meeting.rank)).square().mean().backward()
        return [p.grad.full_tensor() for p in sharded.parameters()]


@pytest.mark.parametrize("allocate", [False, True], ids=["ordinary memory", "the group's memory"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fsdp2_shards_over_a_registered_group(backend: str, allocate: bool) -> None:
    if allocate and backend != "shm":
        pytest.skip("gloo has no memory of its own to give")
    if allocate and not hasattr(FSDPModule, "set_allocate_memory_from_process_group_for_comm"):
        pytest.skip("this torch has no such setting")
    for gradients in spawn_ranks(2, shard_a_model, backend, allocate):
        torch.testing.assert_close(gradients, expected_gradients(2))


def start_torchs_world(meeting: Meeting) -> tuple[str, float]:
    dist.init_process_group("paceline")
    group = dist.group.WORLD
    assert isinstance(group, Group)
    total = torch.tensor(float(meeting.rank))
    dist.all_reduce(total)
    pair = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    row = mesh["a"].get_group()
    assert isinstance(row, Group)
    dist.all_reduce(total, group=row)
    wrapped = DistributedDataParallel(model())
    wrapped(batch(meeting.rank)).sum().backward()
    if meeting.rank < 2:
        dist.barrier(group=pair)
    backend = group.backend
    dist.destroy_process_group()
    assert not dist.is_initialized()
    return backend, total.item()


def test_init_process_group_opens_one_of_ours() -> None:
    assert spawn_ranks(4, start_torchs_world) == [(USUAL, 12.0)] * 4


def register_twice(meeting: Meeting) -> None:
    with meeting.new_group(USUAL) as group:
        group.register("first")
        assert group.group_name == "first"
        with pytest.raises(RendezvousError, match="registered already"):
            group.register()
        other = group.split([0])
        assert other is not None
        with pytest.raises(RendezvousError, match="named first"):
            other.register("first")
        group.unregister()
        other.register("first", default=True)
        with pytest.raises(RendezvousError, match="default group already"):
            group.register(default=True)
        other.shutdown()
        assert not dist.is_initialized()


def test_a_name_and_a_group_are_registered_once() -> None:
    spawn_ranks(1, register_twice)


def dispatch_tensors_of_a_plain_torch_group(meeting: Meeting) -> float:
    dist.init_process_group("gloo", store=meeting.store(), rank=meeting.rank, world_size=2)
    group = Group.wrap(dist.group.WORLD)
    assert Group.wrap(group) is group
    tensor = torch.ones(3, 2).t()  # strided, which gloo itself refuses
    group.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.sum().item()


def test_any_torch_group_can_be_wrapped() -> None:
    assert spawn_ranks(2, dispatch_tensors_of_a_plain_torch_group) == [12.0, 12.0]


def let_go_of_torchs_group(meeting: Meeting) -> list[str]:
    """What keeps a group busy lets go while the group still works, and once."""
    heard: list[str] = []
    for name in ("first", "second"):
        store = dist.PrefixStore(name, meeting.store())
        dist.init_process_group("gloo", store=store, rank=meeting.rank, world_size=2)
        group, gone = Group.wrap(dist.group.WORLD), Group.wrap(dist.group.WORLD)

        def let_go(name: str = name, group: Group = group) -> None:
            tensor = torch.ones(1)
            group.all_reduce(tensor)
            heard.append(f"{name} {int(tensor)}")

        removed = group.before_end(lambda: heard.append("removed"))
        group.before_end(let_go)
        removed.remove()
        gone.before_end(lambda: heard.append("gone"))
        del gone
        dist.destroy_process_group()
    return heard


def test_what_a_wrapper_holds_is_let_go_before_torch_ends_all_groups() -> None:
    assert spawn_ranks(2, let_go_of_torchs_group) == [["first 2", "second 2"]] * 2


def waits_where_torch_asks(meeting: Meeting) -> tuple[str, list[int]]:
    """torch's monitored barrier over our default group: all come, then rank 1 does not."""
    dist.init_process_group(
        "paceline", store=meeting.store(), rank=meeting.rank, world_size=meeting.size
    )
    dist.monitored_barrier()
    missing: list[int] = []
    if meeting.rank == 0:
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        except RuntimeError as error:
            missing = list(error.ranks)
    name = dist.get_backend()
    dist.destroy_process_group()
    return name, missing


def test_torchs_monitored_barrier_takes_our_groups_and_names_who_is_missing() -> None:
    assert spawn_ranks(2, waits_where_torch_asks) == [
        ("paceline", [1]),
        ("paceline", []),
    ]


def test_torchs_monitored_barrier_is_torchs_again_after_uninstall() -> None:
    group = paceline.new_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    ours = dist.monitored_barrier
    assert hasattr(ours, "__wrapped__")
    paceline.uninstall()
    try:
        assert dist.monitored_barrier is ours.__wrapped__
        assert dist.distributed_c10d.monitored_barrier is ours.__wrapped__
    finally:
        group.shutdown()
