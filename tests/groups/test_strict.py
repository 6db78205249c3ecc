"""Groups with checks: calls that one rank makes in another order, though kind and size fit."""

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.errors import MismatchError, RanksFailedError, RendezvousError
from paceline.groups import Group, new_group
from paceline.recorder import events
from paceline.testing import Meeting, run_ranks, spawn_ranks
from tests.marks import needs_shm

both = pytest.mark.parametrize("backend", [pytest.param("shm", marks=needs_shm), "gloo"])


def in_another_order(group: Group, *, start: bool = False) -> tuple[list[float], str, str, str]:
    """Two sums that rank 1 swaps; what they hold when it is noticed, and what is said."""
    one, ten = torch.tensor([1.0]), torch.tensor([10.0])

    def add_one() -> None:
        group.all_reduce(one, async_op=start).wait()  # the first

    def add_ten() -> None:
        group.all_reduce(ten, async_op=start).wait()  # the second

    group.barrier()
    with pytest.raises(MismatchError) as caught:
        for add in (add_one, add_ten) if group.rank() != 1 else (add_ten, add_one):
            add()
    group.barrier()  # the group goes on
    error = caught.value
    error.wait_for_verdict()
    return [one.item(), ten.item()], error.line_a, error.line_b, str(error)


def line_of(name: str) -> str:
    with open(__file__) as file:
        number = next(n for n, text in enumerate(file, start=1) if text.endswith(f"# {name}\n"))
    return f"test_strict.py:{number}"


def check(found: list[tuple[list[float], str, str, str]]) -> None:
    for values, line_a, line_b, text in found:
        assert values == [1.0, 10.0], "no number was used"
        assert line_a.endswith(line_of("the first"))
        assert line_b.endswith(line_of("the second"))
        assert "rank 0 called all_reduce(1 x torch.float32, SUM) at " in text
        assert "rank 1 called all_reduce(1 x torch.float32, SUM) at " in text


def swap_in_process(meeting: Meeting, backend: str, start: bool) -> object:
    with meeting.new_group(backend, checks="strict") as group:
        return in_another_order(group, start=start)


@both
@pytest.mark.parametrize("start", [False, True])
def test_a_strict_group_raises_on_all_ranks_before_the_numbers_are_used(
    backend: str, start: bool
) -> None:
    check(spawn_ranks(3, swap_in_process, backend, start))


def test_what_is_split_off_a_strict_group_is_strict() -> None:
    def one_rank(group: Group) -> tuple[list[float], str, str, str]:
        group.set_checks("strict")
        part = group.split([0, 1])
        assert part is not None
        return in_another_order(part)

    check(run_ranks(2, one_rank))


def test_the_same_calls_pass_through_a_strict_group() -> None:
    def one_rank(group: Group) -> float:
        group.set_checks("strict")
        total = torch.tensor([1.0])
        for _ in range(3):
            group.all_reduce(total)
            group.barrier()
        group.broadcast(total, 1)
        return total.item()

    assert run_ranks(3, one_rank) == [27.0] * 3


def test_ranks_that_stand_in_for_others_inside_join_pass_through_a_strict_group() -> None:
    def one_rank(group: Group) -> int:
        group.set_checks("strict")
        ddp = DistributedDataParallel(nn.Linear(3, 2, bias=False), process_group=group)
        with ddp.join():
            for _ in range(1 + 2 * group.rank()):
                ddp(torch.ones(2, 3)).sum().backward()
        return group.rank()

    assert run_ranks(3, one_rank) == [0, 1, 2]


def test_two_lines_differ_though_a_third_rank_stands_in() -> None:
    def one_rank(group: Group) -> tuple[int, int]:
        group.set_checks("strict")
        total = torch.tensor([1.0])
        with pytest.raises(MismatchError) as caught:
            if group.rank() == 0:
                with events.calls_for(group.board, events.STANDING_IN):
                    group.all_reduce(total)
            elif group.rank() == 1:
                group.all_reduce(total)
            else:
                group.all_reduce(total)
        return caught.value.rank_a, caught.value.rank_b

    assert run_ranks(3, one_rank) == [(1, 2)] * 3


def disagree(meeting: Meeting) -> None:
    checks = "strict" if meeting.rank == 0 else "warn"
    meeting.new_group("gloo", checks=checks).shutdown()


def test_a_group_that_is_strict_on_some_ranks_only_is_refused() -> None:
    with pytest.raises(RanksFailedError, match=r"checks by rank: {0: 'strict', 1: 'warn'}"):
        spawn_ranks(2, disagree)


def test_a_setting_that_is_none_is_refused() -> None:
    with pytest.raises(RendezvousError, match=r"checks is 'loud'\. Give one of off, warn, strict"):
        new_group(
            "threads", store=torch.distributed.HashStore(), rank=0, world_size=1, checks="loud"
        )
