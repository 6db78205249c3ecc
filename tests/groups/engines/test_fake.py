"""The fake backend: any world size, no peers, every call done at once."""

import pytest
import torch
from torch.distributed import HashStore

from paceline.errors import CollectiveArgumentError
from paceline.groups import Group, new_group


def fake(rank: int = 0, size: int = 1024) -> Group:
    return new_group("fake", store=HashStore(), rank=rank, world_size=size)


def test_a_world_of_any_size_needs_one_process() -> None:
    group = fake(rank=1000, size=1024)
    assert (group.rank(), group.size(), group.backend) == (1000, 1024, "fake")
    tensor = torch.arange(3.0)
    group.all_reduce(tensor)
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    group.barrier()
    group.shutdown()


def test_gathers_fill_every_place_with_this_ranks_values() -> None:
    group = fake(rank=7)
    own = torch.tensor([1.0, 2.0])
    flat = torch.zeros(2 * 1024)
    group.all_gather_single(flat, own)
    assert torch.equal(flat.view(1024, 2), own.expand(1024, 2))
    outputs = [torch.zeros(2) for _ in range(1024)]
    group.all_gather(outputs, own)
    assert all(torch.equal(output, own) for output in outputs)
    group.gather([torch.zeros(2) for _ in range(1024)], own, 7)
    group.gather([], own, 0)


def test_scatters_leave_this_ranks_part() -> None:
    group = fake(rank=2, size=4)
    part = torch.zeros(2)
    group.reduce_scatter_single(part, torch.arange(8.0))
    assert part.tolist() == [4.0, 5.0]
    pieces = [torch.full((2,), float(r)) for r in range(4)]
    group.reduce_scatter(part, pieces)
    assert part.tolist() == [2.0, 2.0]
    group.scatter(part, [piece + 1 for piece in pieces], 2)
    assert part.tolist() == [3.0, 3.0]
    group.scatter(part, [], 0)
    assert part.tolist() == [3.0, 3.0]


def test_exchanges_have_the_right_shapes() -> None:
    group = fake(rank=1, size=3)
    given = [torch.full((2,), float(r)) for r in range(3)]
    taken = [torch.zeros(2) for _ in range(3)]
    group.all_to_all(taken, given)
    assert [t.tolist() for t in taken] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    output = torch.zeros(6)
    group.all_to_all_single(output, torch.arange(6.0))
    assert output.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    group.all_to_all_single(torch.zeros(5), torch.zeros(4), [5, 0, 0], [0, 2, 2])


def test_empty_tensors_pass() -> None:
    group = fake(size=3)
    group.all_gather_single(torch.empty(0), torch.empty(0))
    group.reduce_scatter_single(torch.empty(0), torch.empty(0))


def test_started_calls_are_done_already() -> None:
    group = fake()
    tensor = torch.ones(2)
    work = group.all_reduce(tensor, async_op=True)
    assert work.is_completed()
    assert work.wait()
    assert work.get_future().wait()[0] is tensor
    assert group.recv(torch.ones(1), 3, async_op=True).wait()
    assert group.send(torch.ones(1), 3, async_op=True).wait()


def test_tensors_without_memory_pass() -> None:
    group = fake()
    shapes = torch.empty(1024 * 5, device="meta")
    group.all_gather_single(shapes, torch.empty(5, device="meta"))
    group.all_reduce(shapes)


def test_arguments_are_checked_as_everywhere() -> None:
    with pytest.raises(CollectiveArgumentError):
        fake().all_gather_single(torch.ones(5), torch.ones(1))


def test_hooks_see_its_calls() -> None:
    group, seen = fake(), []
    group.register_hooks(before=lambda call: seen.append((call.kind, call.nbytes, call.sequence)))
    group.all_reduce(torch.ones(4))
    group.barrier()
    assert seen == [("all_reduce", 16, 1), ("barrier", 0, 2)]


def test_other_groups_come_out_of_it_without_waiting_for_anybody() -> None:
    group = fake(rank=1, size=4)
    part = group.split([[0, 2], [1, 3]])
    assert part is not None
    assert (part.rank(), part.size(), part.members) == (0, 2, (1, 3))
    group.reconfigure([3, 1])
    assert (group.rank(), group.size(), group.members) == (1, 2, (3, 1))
